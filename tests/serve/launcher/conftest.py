"""What the tests of the launcher share: a configuration of the testbed model and the stand-in for SGLang."""

import json
import os
import socket
import sys
import time
from pathlib import Path

import pytest

from rolaq.common.config import ModelConfig
from rolaq.quant.artifact import Artifact
from rolaq.serve import launch
from rolaq.serve.config import ServeConfig, ServerConfig
from rolaq.serve.launch import Plan

ROOT = Path(__file__).parents[3]
FAKE = (sys.executable, str(Path(__file__).parent / "fake_server.py"))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # a killed process whose parent has not looked yet is dead
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.fixture
def gone():
    """Whether processes have ended within some seconds."""

    def check(pids, seconds=5):
        end = time.monotonic() + seconds
        while any(map(alive, pids)) and time.monotonic() < end:
            time.sleep(0.05)
        return not any(map(alive, pids))

    return check


@pytest.fixture
def make_config():
    def make(model=None, budget="4+16", artifact="auto", **server):
        values = {
            "name": "tiny",
            "path": str(ROOT / "testbed/tiny"),
            "artifact": str(ROOT / "testbed/artifact"),
        }
        settings = {"port": free_port(), "startup_timeout": 20, "stop_timeout": 5, **server}
        return ServeConfig(
            model=ModelConfig(**{**values, **(model or {})}),
            server=ServerConfig(**settings),
            budget=budget,
            artifact=artifact,
            artifacts="nowhere",
        )

    return make


@pytest.fixture
def make_plan(make_config):
    def make(**options):
        cfg = make_config(**options)
        folder = cfg.artifact_folder()
        return Plan(cfg, cfg.settings(folder), Artifact.load(folder), 4096)

    return make


@pytest.fixture
def block():
    """What the testbed model's server reports at 4+16 with 4 slots and 8 places for sinks, counted by hand."""
    rows = 8 * 4 + 5 * 16  # places for sinks, then a ring for each slot and one for padding
    token = 6 * (256 // 4 + 2 * 32 + 8 * 2) + 4
    fixed = rows * 6 * 256 * 2 + 4 * (rows + 1 + 8 + 1) + 6 * 3 * 256 * 256 * 2 + 64 * token
    return {
        "pool": "packed",
        "artifact": "b860392772ca",
        "method": "rolaq",
        "model": "tiny",
        "layers": 6,
        "folded_layers": 6,
        "bytes_per_token_layer": 144,
        "bytes_per_token": token,
        "tokens": 640,
        "fixed_bytes": fixed,
        "pool_bytes": fixed + 640 * token,
        "budget": "4+16",
        "sink": 4,
        "recent": 16,
        "sink_entries": 8,
        "slots": 4,
        "page_size": 64,
        "prefill": "plain",
        "missing_hooks": [],
        "protected_rows_used": 20,
    }


@pytest.fixture
def fake(monkeypatch, block):
    """Sets what the stand-in does and says."""

    monkeypatch.setattr(launch, "PAUSE", 0.05)

    def setup(mode="good", states=None, **more):
        text = json.dumps({"mode": mode, "states": [block] if states is None else states, **more})
        monkeypatch.setenv("FAKE_SERVER", text)
        return FAKE

    return setup
