"""The command itself, in a process of its own."""

import os
import signal
import subprocess
import sys

import pytest

from rolaq.common.errors import RolaqError
from rolaq.serve.__main__ import GIB, plan, table

START = """
import sys
from rolaq.serve import __main__ as command, launch
launch.LAUNCH, launch.PAUSE = {fake!r}, 0.05
command.check_machine = lambda server: None
sys.argv[1:] = {arguments!r}
command.run_hydra("serve", command.run)
"""


def run(*arguments):
    command = [sys.executable, "-m", "rolaq.serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": "src"})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["model=ds-v2-lite", "artifacts=nowhere"],
            "error: no artifact for ds-v2-lite in nowhere/ds-v2-lite/rolaq",
        ),
        (["server.page_size=32"], "error: server.page_size=32"),
        (["server.slot=1"], "error: Unknown setting 'server.slot'. Did you mean: server.slots"),
    ],
)
def test_refusals_are_one_line_and_status_1(arguments, says):
    done = run(*arguments)
    assert done.returncode == 1
    assert done.stderr.startswith(says), done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_server_and_ends_well(fake, make_config, tmp_path, gone, number):
    arguments = ["server.slots=4", "server.sink_entries=8", f"server.port={make_config().server.port}"]
    script = START.format(fake=fake(pids=str(tmp_path / "pids")), arguments=arguments)
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": "src"},
    )  # fmt: skip
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("url"):
            break
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert f"stopped by {number.name}: no process is left" in err
    shown = "".join(lines)
    assert "artifact         b860392772ca (rolaq)" in shown
    assert "868 over 6 layers (144 a layer); BF16 3,456, 3.98 ×" in shown
    assert "640" in shown
    assert gone([int(pid) for pid in (tmp_path / "pids").read_text().split()])


def test_what_is_planned_and_shown(make_config, monkeypatch, block):
    monkeypatch.setattr("rolaq.serve.__main__.check_machine", lambda server: None)
    ready, weights = plan(make_config(slots=4, sink_entries=8))
    assert weights == "match"
    assert ready.vocabulary == 4096
    shown = table(ready, [block, {**block, "tokens": 1280}], weights, 3)
    assert "tokens that fit  640 + 1,280" in shown
    assert f"({block['pool_bytes'] / GIB:.2f} GiB" in shown


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"budget": "4+61"}, "budget 4+61 protects 65 tokens a sequence"),
        ({"args": ["--enable-pdmux"]}, "--enable-pdmux is not supported on the packed cache"),
        ({"tp": 4}, "server.tp=4 does not divide the 6 attention heads of tiny"),
    ],
)
def test_refused_before_anything_starts(make_config, options, says):
    with pytest.raises(RolaqError) as error:
        plan(make_config(**options))
    assert says in str(error.value)
