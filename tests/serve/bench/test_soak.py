"""Load and faults against a stand-in server: a sound one passes, each fault is found."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stand_in import CONTEXT, StandIn, serving

from rolaq.common.files import read_json
from rolaq.serve.bench import soak, traffic
from rolaq.serve.bench.bad import refusals, requests
from rolaq.serve.bench.client import connect
from rolaq.serve.bench.server import Server
from rolaq.serve.bench.traffic import KINDS, Traffic

ROOT = Path(__file__).parents[3]


@pytest.fixture
def soaked(settings, monkeypatch):
    """A function from a server's fault to the rows of a soak of some seconds."""
    monkeypatch.setattr(soak, "PAUSE_S", 0.05)
    monkeypatch.setattr(soak, "prompts", lambda _, lengths, skip: [list(range(30, 30 + n)) for n in lengths])
    monkeypatch.setattr(soak, "tokens", lambda _, count: [20 + n % 3000 for n in range(count)])
    cfg = settings("soak.minutes=0.03", "soak.clients=8", "soak.probes=4")

    def run(fault):
        server = StandIn(pace=0.0002, fault=fault)
        with serving(server) as url:
            rows = asyncio.run(soak.soak(cfg, Server(url, None)))
        return server, {row["figure"]: row for row in rows}

    return run


def test_a_sound_server_passes(soaked):
    server, rows = soaked(None)
    assert all(row["ok"] for row in rows.values()), rows
    assert rows["soak_failures"]["sent"] > 20 and rows["soak_changed"]["same"] > 4
    assert rows["soak_leaked"]["refilled"] == 1200 // (256 + 128) and rows["soak_retracted"]["value"] == 3
    assert server.running == 0


@pytest.mark.parametrize(("fault", "figure"), [("change", "soak_changed"), ("leak", "soak_leaked")])
def test_faults_are_found(soaked, fault, figure):
    _, rows = soaked(fault)
    assert [name for name, row in rows.items() if not row["ok"]] == [figure]


def test_every_kind_of_request_ends_and_leaves_nothing():
    server = StandIn(pace=0.001)
    bad = requests(CONTEXT)
    flow = Traffic(list(range(20, 3000)), CONTEXT, bad, time.monotonic() + 60, seed=3)

    async def each(url):
        async with connect(url) as client:
            for kind, _ in KINDS.values():
                await asyncio.gather(*(kind(flow, client) for _ in range(4)))
            await client.flush(10)

    with serving(server) as url:
        asyncio.run(each(url))
    assert flow.wrong == [] and server.running == 0


def test_bad_requests_must_be_refused():
    bad = requests(CONTEXT)

    async def send(url):
        async with connect(url) as client:
            return await refusals(client, bad)

    with serving(StandIn()) as url:
        assert asyncio.run(send(url)) == []
    with serving(StandIn(fault="accept")) as url:
        assert (
            len(asyncio.run(send(url))) >= len(bad) - 3
        )  # what is no JSON, and an unknown path, stay refused


def test_a_dead_server_counts_and_does_not_hang(monkeypatch):
    monkeypatch.setattr(traffic.asyncio, "sleep", asyncio.sleep)
    flow = Traffic(list(range(20, 3000)), CONTEXT, requests(CONTEXT), time.monotonic() + 1.2)

    async def send():
        async with connect("http://127.0.0.1:9") as client:
            await flow.client(client)

    asyncio.run(send())
    assert flow.wrong and "ClientConnectorError" in flow.wrong[0]


@pytest.mark.slow
def test_the_command_writes_rows_and_fails_where_something_does_not_hold(tmp_path):
    def command(url, *more):
        arguments = [
            "run=[soak]", f"soak.url={url}", f"output={tmp_path}", "soak.minutes=0.02", "soak.probes=2",
            "soak.clients=4", *more,
        ]  # fmt: skip
        return subprocess.run(
            [sys.executable, "-m", "rolaq.serve.bench", *arguments],
            capture_output=True,
            text=True,
            cwd=ROOT / "src",
        )

    with serving(StandIn(pace=0.0002)) as url:
        done = command(url)
    assert done.returncode == 0, done.stderr
    rows = read_json(tmp_path / "serve.json")
    assert {row["figure"] for row in rows} == {
        "soak_failures",
        "soak_changed",
        "soak_leaked",
        "soak_retracted",
    }
    assert {"commit", "gpu", "command", "date"} <= set(rows[0])
    with serving(StandIn(pace=0.0002, fault="leak")) as url:
        done = command(url)
    assert done.returncode == 1 and "did not hold: soak_leaked" in done.stderr
    wrong = command("http://127.0.0.1:9", "use=[int3]")
    assert wrong.returncode == 1 and "Did you mean: int2" in wrong.stderr and "Traceback" not in wrong.stderr
