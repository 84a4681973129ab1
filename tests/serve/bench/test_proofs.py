"""Conversation and tensor parallelism against a stand-in server."""

from contextlib import contextmanager

import pytest
from stand_in import StandIn, serving

from rolaq.serve.bench import conversation, tp
from rolaq.serve.bench.server import Server


def stands_in(seen, make):
    """What stands for a function that starts servers: notes its arguments, serves a new `StandIn`."""

    @contextmanager
    def start(*arguments, **options):
        server = make(options)
        seen.append((server, options))
        with serving(server) as url:
            yield Server(url, None)

    return start


@pytest.mark.parametrize("fault", [None, "change"])
def test_a_conversation_goes_on_with_the_same_answers(settings, monkeypatch, fault):
    cfg = settings("conversation.tokens=320", "conversation.turn=64", "conversation.answer=8")
    seen = []

    def make(options):
        server = StandIn(fault=None if options.get("disable_radix_cache") else fault)
        server.served = 100  # a faulty one's answers differ from the first on
        return server

    monkeypatch.setattr(conversation, "server", stands_in(seen, make))
    monkeypatch.setattr(conversation, "tokens", lambda _, count: [30 + n for n in range(count)])
    (row,) = conversation.run(cfg)
    (plain, options), (cached, _) = seen
    assert options["disable_radix_cache"] and options["chunked_prefill_size"] == 64
    prompts = [[body["input_ids"] for body in server.seen] for server in (plain, cached)]
    assert prompts[0] == prompts[1] and list(map(len, prompts[0])) == [56, 120, 184, 248, 312]
    assert row["turns"] == 5 and row["cached_tokens"] > 0
    assert (row["value"], row["ok"]) == ((1.0, True) if fault is None else (0.0, False))


@pytest.mark.parametrize(("fault", "changed"), [(None, 0), ("change", 3)])
def test_outputs_of_two_sizes_are_compared(settings, tmp_path, fault, changed):
    cfg, seen = settings(f"output={tmp_path}", "tp.new_tokens=4"), []

    def make(options):
        server = StandIn(fault=fault if options["size"] == 2 else None)
        server.served = 100
        return server

    start = stands_in(seen, make)
    texts = [[50, 60, 70 + n] for n in range(3)]
    row = tp._compare(cfg, "m, small", texts, lambda size, log: start(size=size, log=log.name))
    assert (row["value"], row["gpus"], row["ok"]) == (changed, 2, changed == 0)
    assert [options for _, options in seen] == [{"size": n, "log": f"tp{n}-m.log"} for n in (1, 2)]
