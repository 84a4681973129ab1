"""The plugin on SGLang's own scheduler, against the `serving` simulation in Transformers: same logits, same codes,
and nothing left behind."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engine import CpuEngine
from torch.nn import functional
from transformers import AutoTokenizer

from rolaq.kernels.reference import unpack_rows
from rolaq.quant.artifact import Artifact
from rolaq.serve import plugin
from rolaq.serve.settings import Settings

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MODEL, ARTIFACT = ROOT / "testbed" / "tiny", ROOT / "testbed" / "artifact" / "rolaq"
WORDS = "In 1914 the war began in Europe and the armies of many nations went to fight. "
PAGE, CHUNK, NEW = 64, 256, 10
ALONE = {**os.environ, "PYTHONPATH": str(ROOT / "src")}  # without SGLang's packages


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
    budget, overlap = getattr(request, "param", ("4+16", False))
    sink, recent = map(int, budget.split("+"))
    for name, value in (
        Settings(artifact=str(ARTIFACT), sink=sink, recent=recent, sink_entries=24, slots=8, page_size=PAGE)
        .environment()
        .items()
    ):
        monkeypatch.setenv(name, value)
    plugin.artifact.cache_clear()
    options = {
        "attention_backend": "rolaq",
        "page_size": PAGE,
        "chunked_prefill_size": CHUNK,
        "max_running_requests": 8,
    }
    with CpuEngine(MODEL, plugin.register, disable_overlap_schedule=not overlap, **options) as engine:
        engine.budget = (sink, recent)
        yield engine


@functools.cache
def simulator() -> str:
    """A Python whose Transformers caches latents: SGLang pins one that does not."""
    check = "import transformers as t; assert tuple(map(int, t.__version__.split('.')[:2])) >= (5, 17)"
    for python in (sys.executable, str(ROOT / ".venv" / "bin" / "python")):
        if (
            Path(python).exists()
            and not subprocess.run([python, "-c", check], env=ALONE, capture_output=True).returncode
        ):
            return python
    pytest.skip("the simulation needs transformers>=5.17 in .venv: make setup")


def simulated(folder: Path, jobs: list[tuple]) -> list[torch.Tensor]:
    """Logits of the simulation (`simulate.py`)."""
    torch.save(jobs, folder / "jobs.pt")
    arguments = [HERE / "simulate.py", MODEL, ARTIFACT, folder / "jobs.pt", folder / "logits.pt"]
    subprocess.run([simulator(), *map(str, arguments)], env=ALONE, check=True, timeout=120)
    return torch.load(folder / "logits.pt")


@pytest.mark.parametrize(
    "served", [("4+16", False), ("4+8", True), ("0+0", True), ("0+5", False), ("3+0", False)], indirect=True
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
    for name, want, job in zip(names, simulated(tmp_path, jobs), jobs, strict=True):
        got = torch.stack([served.logits[name][n] for n in range(job[3][-1], len(job[2]) + 1)])
        kl = functional.kl_div(got.log_softmax(-1), want.log_softmax(-1), log_target=True, reduction="none")
        assert kl.sum(-1).mean() < 1e-3, name  # RoPE keys and protected rows are BF16 here, fp32 there


def test_many_at_once_are_as_one_by_one(served) -> None:
    alone = [served.generate([p], NEW)[0] for p in prompts()]
    served.tree.reset()
    served.slots.clear()
    served.runner.req_to_token_pool.clear()
    assert served.generate(prompts(), NEW) == alone


def test_packed_rows_are_the_reference_encoding_of_the_latents(served) -> None:
    seen, store = [], type(served.pool).store
    pool = served.pool

    def note(layer_id, slots, latents, rope, exact_row):
        seen.append((layer_id, slots.clone(), latents.clone(), rope.clone()))
        store(pool, layer_id, slots, latents, rope, exact_row)

    pool.store = note
    served.generate([prompts()[2]], 3)
    artifact = Artifact.load(ARTIFACT)
    assert {layer for layer, *_ in seen} == set(range(6))
    for layer, slots, latents, rope in seen:
        rotated, keys = unpack_rows(pool.rows(layer)[slots], 256, 32)
        want = artifact.method().reconstruct(latents[None], layer)[0]
        got = rotated @ artifact.rotation[layer].T
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-5)
        assert torch.equal(keys, rope.bfloat16().view_as(keys))


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


def test_state_tells_of_the_packed_pool(served) -> None:
    from sglang.srt.managers.io_struct import GetInternalStateReq

    block = served.scheduler.get_internal_state(GetInternalStateReq()).internal_state["rolaq"]
    assert (block["pool"], block["budget"], block["folded_layers"], block["layers"]) == (
        "packed",
        "4+16",
        6,
        6,
    )
    assert block["bytes_per_token_layer"] == 144
    assert not block["missing_hooks"]
