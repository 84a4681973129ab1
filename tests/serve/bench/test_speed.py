"""Decode and burst measurements against a stand-in server whose pace is known."""

import asyncio

import pytest
from stand_in import StandIn, serving

from rolaq.common.errors import RolaqError
from rolaq.serve.bench.client import connect
from rolaq.serve.bench.measure import capacity, decode, ttft, warm_up
from rolaq.serve.bench.server import Server
from rolaq.serve.bench.speed import Speed
from rolaq.serve.bench.stats import Timeline


def measured(stand_in, function):
    """What a coroutine function of a client returns."""

    async def inner(url):
        async with connect(url) as client:
            return await function(client)

    with serving(stand_in) as url:
        return asyncio.run(inner(url))


def test_decode_throughput_is_the_servers_pace(settings):
    cfg = settings(
        "decode.requests=2", "decode.inputs=[64,128,256]", "decode.tokens=96", "decode.drop=16",
        "decode.interval=[64,256]",
    )  # fmt: skip
    server = StandIn(pace=0.002)
    rows = measured(server, lambda client: decode(client, cfg))
    assert [row["input_tokens"] for row in rows] == [64, 128, 256, 64]
    for row in rows:
        # a sleeping thread is late, never early
        assert 50 < row["value"] <= 1000 * 1.02
    assert rows[-1]["figure"] == "decode_interval" and rows[-1]["output_tokens"] == 256
    by_name = {body["rid"]: body["input_ids"] for body in server.seen}
    assert by_name["skip-256-1"][:128] == by_name["skip-128-1"] != by_name["skip-128-0"]


def test_burst_waits_for_first_tokens_alone(settings):
    cfg = settings(
        "ttft.requests=[1,4,8]", "ttft.input_tokens=50", "ttft.output_tokens=400", "server.context=512"
    )
    rows = measured(StandIn(pace=0.05, prefill=0.001), lambda client: ttft(client, cfg, 30.0))
    found = {(row["figure"], row["requests"]): row["value"] for row in rows}
    # one prefill after the other, 50 ms each, then a token
    assert 0.09 < found["ttft_p99", 1] < found["ttft_p99", 4] < found["ttft_p99", 8]
    assert found["ttft_p99", 8] > 8 * 0.05
    assert found["ttft_p50", 8] == found["ttft_p99", 4]
    assert not any("bound" in row for row in rows)


def test_a_burst_that_is_cut_off_gives_bounds(settings):
    cfg = settings(
        "ttft.requests=[1,8]", "ttft.input_tokens=50", "ttft.output_tokens=8", "server.context=512"
    )
    rows = measured(StandIn(prefill=0.006), lambda client: ttft(client, cfg, 0.75))
    late = [row for row in rows if row.get("bound") == "at least"]
    assert [row["requests"] for row in late] == [8, 8] or [row["figure"] for row in late] == ["ttft_p99"]
    assert all(0.7 < row["value"] < 1.5 for row in late)


def test_a_refused_request_ends_the_measurement(settings):
    cfg = settings("decode.inputs=[600]", "decode.interval=[600,600]")
    with pytest.raises(RolaqError, match="longer than"):
        measured(StandIn(), lambda client: decode(client, cfg))


def test_capacity_without_protection_from_the_same_bytes(settings):
    cfg = settings()
    with serving(StandIn()) as url:
        plain = capacity(Server(url, None), cfg, cfg.implementations["bf16-triton"])
        packed = capacity(Server(url, None), cfg, cfg.implementations["int2"])
    assert [row["value"] for row in plain] == [64000]
    assert packed[0]["value"] == 64000 and packed[1]["budget"] == "0+0"
    # 4 x 1024 sink rows and 16 x 257 recent ones of 27 layers, 1 KiB each, in rows of 27 x 288 bytes and a tag
    freed = (4 * 1024 + 16 * 257) * (27 * 1024 + 4)
    assert packed[1]["value"] == (64000 + freed // (27 * 288 + 4)) // 64 * 64


def test_the_warm_up_leaves_the_server_idle():
    server = StandIn()
    measured(server, warm_up)
    assert server.running == 0 and any(body.get("rid", "").startswith("skip-") for body in server.seen)


def test_starts_and_order_of_implementations(settings, tmp_path):
    cfg = settings(f"output={tmp_path}", "use=[bf16-flashmla,int2]")
    speed = Speed(cfg, ["capacity", "ttft"])
    assert speed._order() == ["int2", "bf16-flashmla"]
    assert speed._starts(cfg.implementations["int2"]) == [(["capacity", "ttft"], {})]
    apart = speed._starts(cfg.implementations["bf16-flashmla"])
    assert apart == [(["capacity"], {}), (["ttft"], {"chunked_prefill_size": 16384})]
    assert Speed(cfg, ["decode"])._starts(cfg.implementations["bf16-flashmla"]) == [(["decode"], {})]


def test_a_failing_start_is_reported_and_all_failing_is_an_error(settings, tmp_path, monkeypatch, capsys):
    cfg = settings(f"output={tmp_path}", "use=[int2]")

    def refuse(*_):
        raise RolaqError("no GPU here")

    monkeypatch.setattr(Speed, "_server", refuse)
    with pytest.raises(RolaqError, match="none of int2"):
        Speed(cfg, ["capacity"]).run()
    assert "no GPU here" in capsys.readouterr().err


def test_chunks_may_be_cumulative_or_incremental():
    parts = {"new": [[1], [2, 3], [4]], "all": [[1], [1, 2, 3], [1, 2, 3, 4]]}
    for chunks in parts.values():
        from rolaq.serve.bench.client import Client

        class Canned(Client):
            async def chunks(self, *_, **__):
                for ids, count in zip(chunks, (1, 3, 4), strict=True):  # noqa: B023
                    yield {"output_ids": ids, "meta_info": {"completion_tokens": count}}

        line = asyncio.run(Canned(None, "").stream([1], 4))
        assert line.ids == [1, 2, 3, 4] and [n for _, n in line.samples] == [1, 3, 4]
        assert isinstance(line, Timeline)
