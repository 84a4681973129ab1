"""The plugin on SGLang's own scheduler, against the `serving` simulation in Transformers: same logits, same codes,
and nothing left behind."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from packed import ARTIFACT, CHUNK, FEEDBACK, MODEL, PAGE, divergence, packed, simulated, small
from transformers import AutoTokenizer

from rolaq.kernels.reference import unpack_rows
from rolaq.serve import proof

WORDS = "In 1914 the war began in Europe and the armies of many nations went to fight. "
NEW = 10


@functools.cache
def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    texts = [
        "The capital",
        "Once upon a time there was a king who",
        WORDS * 4,
        "def main():\n    import os\n" + WORDS * 22,
    ]
    return [tokenizer(text)["input_ids"] for text in texts]


@pytest.fixture
def served(request, monkeypatch):
    budget, overlap, artifact = getattr(request, "param", ("4+16", False, ARTIFACT))
    with packed(monkeypatch, budget, artifact=artifact, disable_overlap_schedule=not overlap) as engine:
        yield engine


PLAIN = [("4+16", False), ("4+8", True), ("0+0", True), ("0+5", False), ("3+0", False)]
SHAPED = [("4+16", False), ("0+0", True)]


@pytest.mark.parametrize(
    "served", [(*p, ARTIFACT) for p in PLAIN] + [(*p, FEEDBACK) for p in SHAPED], indirect=True
)
def test_logits_are_those_of_the_simulation(served, tmp_path) -> None:
    jobs, names = [], []
    for kind in ("new", "hit"):  # the second time over a cached prefix
        for i, prompt in enumerate(prompts()):
            served.submit(f"{kind}-{i}", prompt, NEW)
            served.run()
            hit = served.requests[f"{kind}-{i}"].cached_tokens
            assert hit == (0 if kind == "new" else (len(prompt) - 1) // PAGE * PAGE)
            if hit and served.budget[1]:
                continue  # the prefix is read without a recent window, which no simulation of one text has
            cuts = [*range(CHUNK, hit or len(prompt), CHUNK), *([hit] if hit else [])]
            tokens = prompt + list(served.requests[f"{kind}-{i}"].output_ids)
            assert len(prompt) - (cuts or [0])[-1] > 1  # the simulation takes one token for a decode step
            jobs.append((*served.budget, tokens[:-1], [*cuts, len(prompt)]))
            names.append(f"{kind}-{i}")
    artifact = Path(served.pool.settings.artifact)
    results = zip(names, jobs, simulated(tmp_path, jobs, artifact=artifact), strict=True)
    found = {name: divergence(served, name, job, want) for name, job, want in results}
    for name, kl in found.items():
        assert small(kl, mean=5e-3 if artifact == FEEDBACK else 1e-3), name
    if served.budget == (0, 0):  # nothing is BF16 but RoPE keys, on both sides
        assert found["new-0"].abs().max() < 1e-5


def test_many_at_once_are_as_one_by_one(served) -> None:
    alone = [served.generate([p], NEW)[0] for p in prompts()]
    served.tree.reset()
    served.slots.clear()
    served.runner.req_to_token_pool.clear()
    assert served.generate(prompts(), NEW) == alone


BOTH = pytest.mark.parametrize(
    "served", [("4+16", False, ARTIFACT), ("4+16", False, FEEDBACK)], indirect=True
)


@BOTH
def test_packed_rows_are_the_reference_encoding_of_the_latents(served) -> None:
    seen, store = [], type(served.pool).store
    pool = served.pool

    def note(layer_id, slots, latents, rope, exact_row):
        seen.append((layer_id, slots.clone(), latents.clone(), rope.clone()))
        store(pool, layer_id, slots, latents, rope, exact_row)

    pool.store = note
    served.generate([prompts()[2]], 3)
    artifact, close = pool.artifact, []
    method, means = artifact.method(), artifact.tensors.get("mean", torch.zeros(6, 256))
    assert {layer for layer, *_ in seen} == set(range(6))
    for layer, slots, latents, rope in seen:
        written, keys = unpack_rows(pool.rows(layer)[slots], 256, 32)
        want = method.reconstruct(latents[None], layer)[0]
        got = written @ method.read_matrix[layer].T + means[layer]
        close.append(torch.isclose(got, want, atol=2e-5, rtol=1e-5).all(-1))
        assert torch.equal(keys, rope.bfloat16().view_as(keys))
    # products are summed in fp64 there, in fp32 here: an error's last digit then turns a few chains
    assert torch.cat(close).float().mean() >= (0.98 if artifact.config.feedback else 1)


def test_aborts_and_retraction_leave_nothing_behind(served, monkeypatch) -> None:
    short = [prompts()[3][i : i + 60] for i in range(6)]
    before = served.generate([short[0]], 20)
    for i, prompt in enumerate(short * 3):
        served.submit(f"gone-{i}", prompt, 100)
    served.step(6)
    served.abort("gone-2")
    served.step(3)
    served.abort()
    served.run()
    assert served.generate([short[0]], 20) == before
    assert not served.pool.pending
    free = served.slots.available_size() + served.tree.evictable_size()
    assert (free, served.tree.protected_size()) == (4096, 0)


@BOTH
def test_state_tells_of_the_packed_pool(served) -> None:
    from sglang.srt.managers.io_struct import GetInternalStateReq

    state = served.scheduler.get_internal_state(GetInternalStateReq()).internal_state
    block, artifact = state["rolaq"], served.pool.artifact
    assert (block["artifact"], block["method"]) == (artifact.id, artifact.config.method)
    assert (block["pool"], block["budget"], block["folded_layers"], block["layers"]) == (
        "packed",
        "4+16",
        6,
        6,
    )
    assert block["bytes_per_token_layer"] == 144
    assert not block["missing_hooks"]
    if (
        artifact.config.feedback
    ):  # whose write side is the same on a CPU: the launcher counts to the last byte
        proof.check_states({"internal_states": [state]}, proof.expected(artifact, served.pool.settings), 1)
