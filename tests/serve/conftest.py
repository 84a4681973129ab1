"""Serving tests: makes the harness importable (`engine.py`) and, where SGLang is, fit for a CPU."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

HERE = Path(__file__).parent
SITE = HERE / "site"  # what lets SGLang run on a CPU
sys.path.insert(0, str(HERE))
if find_spec("sglang") is not None and not torch.cuda.is_available():
    sys.path.insert(0, str(SITE))
    import sglang_on_cpu

    sglang_on_cpu.install()
    # for the processes that an engine starts
    os.environ["PYTHONPATH"] = os.pathsep.join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])])


def pytest_configure(config):
    for module in ("sglang", "torch.jit"):
        config.addinivalue_line("filterwarnings", f"ignore:::{module}.*")
