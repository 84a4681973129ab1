"""Starting, proving and stopping a server, against a stand-in for SGLang's."""

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rolaq.common.errors import RolaqError
from rolaq.serve import launch
from rolaq.serve.child import Child
from rolaq.serve.client import Client

POOL = {"slots": 4, "sink_entries": 8}


@pytest.mark.parametrize("mode", ["good", "stubborn"])
def test_a_proven_server_leaves_no_process_behind(make_plan, fake, tmp_path, block, mode, gone):
    plan = make_plan(**POOL, stop_timeout=1 if mode == "stubborn" else 5)
    with launch.running(plan, fake(mode, pids=str(tmp_path / "pids"))) as (child, blocks, seconds):
        assert blocks == [block]
        assert seconds < 20
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert pids[0] == child.pid
        assert not gone(pids, seconds=0)
    assert gone(pids)


def test_two_copies_are_both_asked(make_plan, fake, block):
    with launch.running(make_plan(**POOL, dp=2), fake(states=[block, block])) as (_, blocks, _):
        assert len(blocks) == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"pool": "bf16"}, "pool='bf16'"),
        ({"artifact": "other"}, "artifact='other'"),
        ({"budget": "0+0"}, "budget='0+0', '4+16' was asked for"),
        ({"bytes_per_token_layer": 576}, "bytes_per_token_layer=576, 144 was asked for"),
        ({"folded_layers": 5}, "folded_layers=5, 6 was asked for"),
        ({"slots": 8}, "slots=8"),
        ({"missing_hooks": ["a.b"]}, "missing_hooks=['a.b']"),
        ({"tokens": 0}, "holds 0 tokens"),
        ({"tokens": 704}, "holds 704 tokens in the packed pool, SGLang counts 640"),
        ({"pool_bytes": 1}, "takes 1 bytes for 640 tokens"),
        ({"protected_rows_used": 0}, "without writing to the packed pool"),
        (None, "the plugin did not load"),
    ],
)
def test_a_server_that_is_not_as_asked_is_stopped(make_plan, fake, tmp_path, block, change, says, gone):
    states = [None if change is None else {**block, **change}]
    command = fake(states=states, pids=str(tmp_path / "pids"))
    with pytest.raises(RolaqError, match=".+") as error, launch.running(make_plan(**POOL), command):
        pass
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert gone([int(pid) for pid in (tmp_path / "pids").read_text().split()])


def test_a_missing_copy_is_noticed(make_plan, fake):
    with (
        pytest.raises(RolaqError, match="has 1 copies of the model, 2 were asked for"),
        launch.running(make_plan(**POOL, dp=2), fake()),
    ):
        pass


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("refused", "SGLang ended with status 1: --kv-cache-dtype fp8_e4m3: no"),
        ("unloaded", "SGLang ended with status 2: the plugin did not load: TypeError: no such thing"),
        ("crash", "SGLang was killed by signal 9: RuntimeError: out of memory"),
        ("mute", "a test generation gave 0 tokens in place of 8"),
        ("slow", "the server is not up after 2 s (loading weights): raise server.startup_timeout"),
    ],
)
def test_failures_say_why_and_leave_no_process(make_plan, fake, tmp_path, mode, says, gone):
    plan = make_plan(**POOL, startup_timeout=2 if mode == "slow" else 20)
    command = fake(mode, pids=str(tmp_path / "pids"))
    with pytest.raises(RolaqError) as error, launch.running(plan, command):
        pass
    assert says in str(error.value)
    assert gone([int(pid) for pid in (tmp_path / "pids").read_text().split()])


def test_a_server_that_ends_later_is_reported(make_plan, fake):
    with launch.running(make_plan(**POOL), fake("short")) as (child, _, _):
        status = child.wait()
        assert str(launch.ended(child, status)) == "SGLang ended with status 3: ValueError: late"


def test_the_key_is_needed_and_shows_nowhere(make_plan, fake, monkeypatch, capfd):
    monkeypatch.setenv("ROLAQ_API_KEY", "s3cret")
    plan = make_plan(**POOL)
    with launch.running(plan, fake()) as (child, _, _):
        command = Path(f"/proc/{child.pid}/cmdline").read_bytes().decode()
        environment = Path(f"/proc/{child.pid}/environ").read_bytes().decode()
        assert "s3cret" not in command + environment
        config = command.split("\0")[command.split("\0").index("--config") + 1]
        assert not Path(config).exists()  # read and removed
        assert Client(plan.cfg.server.url).status("/model_info") == 401
        assert Client(plan.cfg.server.url, "s3cret").status("/model_info") == 200
    output = capfd.readouterr()
    assert "api_key='***'" in output.err
    assert "s3cret" not in output.out + output.err


def test_a_server_that_ignores_the_key_is_stopped(make_plan, fake, monkeypatch):
    monkeypatch.setenv("ROLAQ_API_KEY", "s3cret")
    with (
        pytest.raises(RolaqError, match="answers 200 to a request without the API key"),
        launch.running(make_plan(**POOL), fake("open")),
    ):
        pass


def test_an_open_address_without_a_key_is_warned_of(make_plan, fake, capsys):
    plan = make_plan(**POOL, host="0.0.0.0")
    with launch.running(plan, fake()):
        pass
    assert "warning: 0.0.0.0 is open to the network" in capsys.readouterr().err


def test_a_taken_port_is_refused(make_config):
    import socket

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        cfg = make_config(port=other.getsockname()[1])
        with pytest.raises(RolaqError, match=r"server.port=\d+ cannot be listened on"):
            launch.check_port(cfg.server)
    launch.check_port(cfg.server)


@pytest.mark.parametrize(
    ("version", "points", "gpus", "server", "says"),
    [
        (None, True, 1, {}, "SGLang is not installed"),
        ("0.4.9", True, 1, {}, "SGLang 0.4.9 is not supported: install one of 0.5.17"),
        ("0.5.17", False, 1, {}, "does not see the plugin"),
        ("0.5.17", True, 0, {}, "no CUDA device"),
        ("0.5.17", True, 3, {"tp": 2, "dp": 2}, "needs 4 GPUs, there are 3"),
        ("0.5.17", True, 4, {"tp": 2, "dp": 2}, None),
    ],
)
def test_what_the_machine_lacks(make_config, monkeypatch, version, points, gpus, server, says):
    def installed(name):
        if version is None:
            raise launch.importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(launch.importlib.metadata, "version", installed)
    monkeypatch.setattr(launch.importlib.metadata, "entry_points", lambda **_: ["rolaq"] if points else [])
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    cfg = make_config(**server)
    if says is None:
        launch.check_machine(cfg.server)
        return
    with pytest.raises(RolaqError, match=says):
        launch.check_machine(cfg.server)


def test_the_server_does_not_outlive_a_killed_launcher(fake, tmp_path, gone):
    command = fake(pids=str(tmp_path / "pids"))
    script = (
        "import os, sys, time\nfrom rolaq.serve.child import Child\n"
        f"child = Child({[*command, '--host', '127.0.0.1', '--port', '0']!r}, os.environ)\ntime.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": "src"}
    launcher = subprocess.Popen(
        [sys.executable, "-c", script], env=environment, cwd=Path(__file__).parents[3]
    )
    try:
        end = time.monotonic() + 30
        while not (tmp_path / "pids").exists() or not (tmp_path / "pids").read_text():
            assert time.monotonic() < end
            time.sleep(0.1)
        server, helper = (int(pid) for pid in (tmp_path / "pids").read_text().split())
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
        assert gone([server])
    finally:
        launcher.kill()
        os.kill(helper, signal.SIGKILL)


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("a\nValueError: one\nrolaq.common.errors.RolaqError: ours\nRuntimeError: later\n", "ours"),
        (
            "torch.OutOfMemoryError: CUDA out of memory\nkilled\n",
            "torch.OutOfMemoryError: CUDA out of memory",
        ),
        (
            "usage: …\nlaunch_server.py: error: unrecognized arguments: --x\n",
            "error: unrecognized arguments: --x",
        ),
        ("nothing special\n\n", "nothing special"),
        (
            "x\nSubprocess scheduler_0 (pid=1) crashed with exit code -9.\nbye\n",
            "Subprocess scheduler_0 (pid=1) crashed with exit code -9.",
        ),
        ("", "no output"),
    ],
)
def test_the_reason_of_an_end(log, reason):
    child = Child([sys.executable, "-c", f"print({log!r}, end='')"], os.environ, log=io.StringIO())
    child.wait(20)
    assert child.reason() == reason
