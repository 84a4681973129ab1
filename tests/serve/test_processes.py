"""SGLang's server with all its processes, the plugin found through its entry point: what no single process shows."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import engine  # skips where SGLang or its place are missing
import pytest

from rolaq.serve.settings import Settings

ROOT = Path(__file__).parents[2]
MODEL, ARTIFACT = ROOT / "testbed" / "tiny", ROOT / "testbed" / "artifact" / "rolaq"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "rolaq" not in entry_points(group="sglang.srt.plugins").names,
        reason="rolaq is not installed here: make test-serve",
    ),
]


def fetch(url: str, body: dict | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url, data, {"Content-Type": "application/json"}), timeout=60) as answer:
        return answer.read().decode()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = engine.DEFAULTS | {
        "attention_backend": "rolaq",
        "model_path": MODEL,
        "port": port,
        "enable_metrics": True,
    }
    arguments = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        arguments += [flag] if value is True else [flag, str(value)]
    settings = Settings(artifact=str(ARTIFACT), sink_entries=16, slots=8).environment()
    settings["SGLANG_PLUGINS"] += ",cpu"
    log = tmp_path_factory.mktemp("server") / "log.txt"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", *arguments],
            env=os.environ | settings, stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        wait(f"{url}/health", process, log)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait(url: str, process: subprocess.Popen, log: Path, most: float = 180) -> None:
    for _ in range(int(most)):
        if process.poll() is not None:
            break
        try:
            fetch(url)
            return
        except (URLError, OSError):
            time.sleep(1)
    pytest.fail(f"the server did not start:\n{log.read_text()[-4000:]}")


def test_the_packed_pool_serves(server):
    answer = json.loads(
        fetch(
            f"{server}/v1/completions",
            {"model": "m", "prompt": "The capital of", "max_tokens": 8, "temperature": 0},
        )
    )
    assert answer["choices"][0]["text"].startswith(" the capital")
    state = json.loads(fetch(f"{server}/get_server_info"))["internal_states"][0]["rolaq"]
    assert (state["pool"], state["layers"], state["slots"]) == ("packed", 6, 8)
    assert not state["missing_hooks"]
    assert "rolaq_" in fetch(f"{server}/metrics")


def test_bad_requests_are_refused_and_harm_nobody(server):
    for body in ({"prompt": "x " * 5000, "model": "m"}, {"prompt": 3.5, "model": "m"}):
        with pytest.raises(URLError, match="400|422"):
            fetch(f"{server}/v1/completions", body)
    assert json.loads(fetch(f"{server}/generate", {"text": "The", "sampling_params": {"max_new_tokens": 4}}))[
        "text"
    ]
