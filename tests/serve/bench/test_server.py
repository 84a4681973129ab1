"""Servers in processes of their own: command lines, start, failure, end."""

import os
import subprocess
import sys
import time

import pytest

from rolaq.common.errors import RolaqError
from rolaq.serve.bench.probe import Probe
from rolaq.serve.bench.server import flags, free_port, started

SERVE = """
import http.server, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b'{"path": "%s"}' % self.path.encode())
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


def test_flags():
    given = {"a_b": 1, "yes": True, "no": False, "none": None, "many": [1, 2], "json": {"x": 1}, "text": "t"}
    want = ["--a-b", "1", "--yes", "--many", "1", "2", "--json", '{"x": 1}', "--text", "t"]
    assert flags(given) == want


def test_a_server_answers_and_leaves_no_process(tmp_path):
    port = free_port()
    command = [sys.executable, "-c", SERVE, str(port)]
    with started(command, tmp_path / "log", f"http://127.0.0.1:{port}", {"X": "1"}, 20) as server:
        assert server.get("/some") == {"path": "/some"}
        groups = [pid for pid in os.listdir("/proc") if pid.isdigit() and _command(pid) == command]
        group = os.getpgid(int(groups[0]))
        assert len(members(group)) == 2  # the server and the process that it started
    assert members(group) == []


def members(group):
    """Commands of a process group's processes, but for those that only wait to be reaped."""
    table = subprocess.run(["ps", "-eo", "pgid,stat,args"], capture_output=True, text=True, check=True).stdout
    lines = [line.split(maxsplit=2) for line in table.splitlines()[1:]]
    return [line[2] for line in lines if line[0] == str(group) and not line[1].startswith("Z")]


def _command(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().decode().split("\0")[:-1]
    except OSError:
        return None


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("print('all fine'); raise ValueError('no GPU')", "ValueError: no GPU"),
        ("print('last words'); raise SystemExit(3)", "ended with 3: last words"),
    ],
)
def test_a_server_that_ends_says_why(tmp_path, script, words):
    with (
        pytest.raises(RolaqError, match=words),
        started([sys.executable, "-c", script], tmp_path / "log", "http://127.0.0.1:9", None, 20),
    ):
        pass


def test_a_silent_server_is_given_up(tmp_path):
    began = time.monotonic()
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with (
        pytest.raises(RolaqError, match="did not answer"),
        started(command, tmp_path / "log", "http://127.0.0.1:9", None, 1),
    ):
        pass
    assert time.monotonic() - began < 10


def test_a_probe_travels_as_text_and_knows_its_rank():
    probe = Probe(skip=True, logits="/x/l", codes=None)
    assert Probe.parse(probe.text()) == probe
    assert probe.at_rank(1) == Probe(skip=True, logits="/x/l.1")
