"""Settings as the command composes them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the stand-in server


@pytest.fixture
def settings():
    """A function from command line overrides to the bench's settings."""
    pytest.importorskip("hydra")
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    from rolaq.common.config import resolve
    from rolaq.serve.bench.config import BenchConfig

    def make(*overrides):
        GlobalHydra.instance().clear()
        with initialize_config_module("rolaq.conf", version_base="1.3"):
            return resolve(compose("bench", list(overrides)), BenchConfig)

    return make
