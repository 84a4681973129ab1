"""The `rolaq` block and the gauges, from real windows and settings and a pool's bare attributes."""

from types import SimpleNamespace

import pytest
import torch

from rolaq.quant.artifact import Artifact
from rolaq.serve import proof, watch
from rolaq.serve.metrics import GAUGES, Gauges, describe, live
from rolaq.serve.settings import Settings
from rolaq.serve.windows import Windows


def make_backend(budget=(4, 16)):
    """What `metrics` reads of a backend, with 640 tokens and buffers as the packed pool lays them out."""
    artifact = Artifact.load("testbed/artifact/rolaq")
    settings = Settings(artifact="a", sink=budget[0], recent=budget[1], sink_entries=8, slots=4)
    windows = Windows(640 + 64, 5, *budget, 8, "cpu")
    rows, exact = (640 + 64) * 6 * 144, windows.rows * 6 * 256 * 2
    rotation = SimpleNamespace(nbytes=3 * 256 * 256 * 2)
    pool = SimpleNamespace(
        artifact=artifact, settings=settings, sizing=proof.sizing_of(artifact, settings), windows=windows,
        layers=[rotation] * 6, layer_num=6, size=640, page_size=64,
        get_kv_size_bytes=lambda: rows + exact + windows.nbytes,
    )  # fmt: skip
    modules = {i: SimpleNamespace(rolaq_folded=True) for i in range(6)}
    return SimpleNamespace(pool=pool, modules=modules, name="plain")


def write(windows, request, tokens, first_slot):
    position = torch.arange(tokens)
    n = torch.full((tokens,), 1)
    windows.write_chunk(
        n * request, position, position + first_slot, n * first_slot, n * tokens, torch.tensor([0])
    )


def test_the_block_is_what_the_launcher_asks_for(block):
    backend = make_backend()
    write(backend.pool.windows, 1, 40, 64)
    found = describe(backend, SimpleNamespace(available_size=lambda: 600))
    assert {key: found[key] for key in block if key != "missing_hooks"} == {
        key: value for key, value in block.items() if key != "missing_hooks"
    }
    assert found["tokens_used"] == 40
    settings = backend.pool.settings
    state = {"rolaq": {**found, "missing_hooks": []}, "memory_usage": {"token_capacity": 640}}
    wanted = proof.expected(backend.pool.artifact, settings)
    assert proof.check_states({"internal_states": [state]}, wanted, 1)[0]["budget"] == "4+16"


@pytest.mark.parametrize("budget", [(0, 0), (4, 0), (0, 16), (4, 16), (1, 1)])
def test_bytes_reported_are_bytes_planned(budget):
    pool = make_backend(budget).pool
    found = describe(SimpleNamespace(pool=pool, modules={}, name=""))
    assert found["pool_bytes"] == pool.sizing.bytes(640)
    assert found["folded_layers"] == 0


def test_counts_follow_requests():
    pool = make_backend().pool
    assert live(pool) == {"sink_entries_used": 0, "protected_rows": 8 * 4 + 5 * 16, "protected_rows_used": 0}
    write(pool.windows, 1, 40, 64)
    write(pool.windows, 2, 10, 128)
    assert live(pool)["sink_entries_used"] == 2
    assert live(pool)["protected_rows_used"] == (4 + 16) + (4 + 6)
    write(pool.windows, 3, 40, 64)  # the first request's slots, given to another
    assert live(pool)["sink_entries_used"] == 2
    assert live(pool)["protected_rows_used"] == (4 + 16) + (4 + 6)
    pool.windows.forget(torch.arange(704))
    assert live(pool)["protected_rows_used"] == 0


def scheduler(backend):
    runner = SimpleNamespace(attn_backend=backend)
    return SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=runner),
        token_to_kv_pool_allocator=SimpleNamespace(available_size=lambda: 640),
        server_args=SimpleNamespace(attention_backend="rolaq", page_size=64, max_running_requests=4),
    )


def test_gauges_carry_sglangs_labels_and_do_not_count_too_often(monkeypatch):
    client = pytest.importorskip("prometheus_client")
    backend = make_backend()
    watcher = watch.Watch(backend.pool.settings)
    monkeypatch.setattr(watch, "missing_hooks", list)
    collector = SimpleNamespace(labels={"model_name": "tiny", "tp_rank": 0})
    watcher.publish(None, collector)  # before a scheduler runs there is nothing to tell
    watcher.started(None, scheduler(backend))
    watcher.publish(None, collector)
    labels = {"model_name": "tiny", "tp_rank": "0"}

    def read(key):
        return client.REGISTRY.get_sample_value(f"rolaq_{key}", labels)

    assert read("tokens") == 640
    assert read("bytes_per_token") == 868
    assert read("protected_rows_used") == 0
    assert all(read(key) is not None for key in GAUGES)
    write(backend.pool.windows, 1, 40, 64)
    watcher.publish(None, collector)
    assert read("protected_rows_used") == 0  # counted a moment ago
    monkeypatch.setattr(watcher._gauges, "_next", 0)
    watcher.publish(None, collector)
    assert read("protected_rows_used") == 20


def test_gauges_wait_between_counts(monkeypatch):
    gauges = Gauges.__new__(Gauges)
    gauges._next = 0.0
    clock = iter([100.0, 104.9, 105.1])
    monkeypatch.setattr("rolaq.serve.metrics.time.monotonic", lambda: next(clock))
    assert [gauges.due() for _ in range(3)] == [True, False, True]
