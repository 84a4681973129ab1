"""The model families that are served, as tiny random models: same logits as the simulation's."""

from __future__ import annotations

import pytest
import torch
from packed import CHUNK, divergence, packed, run_there, simulated, small

KINDS = ("deepseek_v2", "deepseek_v3", "minicpm3")
CASES = [(kind, "rolaq", budget) for kind in KINDS for budget in ("0+0", "4+16")]
CASES += [("deepseek_v3", "rolaq-feedback", "0+0"), ("minicpm3", "rolaq-feedback", "4+16")]
NEW = 6


@pytest.mark.parametrize(("kind", "method", "budget"), CASES)
def test_logits_are_those_of_the_simulation(kind, method, budget, monkeypatch, tmp_path) -> None:
    run_there("make_model.py", kind, method, tmp_path)
    places = {"model": tmp_path / "model", "artifact": tmp_path / "artifact"}
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 4000, (n,), generator=generator).tolist() for n in (5, 70, CHUNK + 90)]
    with packed(monkeypatch, budget, **places, trust_remote_code=True) as engine:
        jobs = []
        for i, prompt in enumerate(prompts):
            engine.submit(str(i), prompt, NEW)
            engine.run()
            tokens = prompt + list(engine.requests[str(i)].output_ids)
            jobs.append((*engine.budget, tokens[:-1], [*range(CHUNK, len(prompt), CHUNK), len(prompt)]))
        for i, want in enumerate(simulated(tmp_path, jobs, **places)):
            assert want.std() > 0.1
            kl = divergence(engine, str(i), jobs[i], want)
            assert small(kl, *((1e-3, 1e-2) if method == "rolaq-feedback" else ())), f"prompt {i}: {kl}"
