"""SGLang's engine with the plugin on the CPU, and the simulation that it is held against."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import CpuEngine
from torch import Tensor
from torch.nn import functional

from rolaq.serve import plugin
from rolaq.serve.settings import Settings

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MODEL, ARTIFACT = ROOT / "testbed" / "tiny", ROOT / "testbed" / "artifact" / "rolaq"
FEEDBACK = ROOT / "testbed" / "artifact" / "rolaq-feedback"
PAGE, CHUNK = 64, 256
ALONE = {**os.environ, "PYTHONPATH": str(ROOT / "src")}  # without SGLang's packages


@contextmanager
def packed(
    patch: pytest.MonkeyPatch, budget: str = "4+16", model: Path = MODEL, artifact: Path = ARTIFACT, **options: Any
) -> Iterator[CpuEngine]:  # fmt: skip
    """An engine on the packed cache; `engine.budget` is (sink, recent)."""
    sink, recent = map(int, budget.split("+"))
    settings = Settings(
        artifact=str(artifact), sink=sink, recent=recent, sink_entries=24, slots=8, page_size=PAGE
    )
    for name, value in settings.environment().items():
        patch.setenv(name, value)
    plugin.artifact.cache_clear()
    options = {"chunked_prefill_size": CHUNK, "max_running_requests": 8} | options
    with CpuEngine(model, plugin.register, attention_backend="rolaq", page_size=PAGE, **options) as engine:
        engine.budget = (sink, recent)
        yield engine


@functools.cache
def simulator() -> str:
    """A Python whose Transformers caches latents: SGLang pins one that does not."""
    check = "import transformers as t; assert tuple(map(int, t.__version__.split('.')[:2])) >= (5, 17)"
    for python in filter(os.path.exists, (sys.executable, str(ROOT / ".venv" / "bin" / "python"))):
        if subprocess.run([python, "-c", check], env=ALONE, capture_output=True).returncode == 0:
            return python
    pytest.skip("the simulation needs transformers>=5.17 in .venv: make setup")


def run_there(script: str, *arguments: Any) -> None:
    """Run a script of this folder with the simulation's Python."""
    command = [simulator(), str(HERE / script), *map(str, arguments)]
    subprocess.run(command, env=ALONE, check=True, timeout=120)


def simulated(
    folder: Path, jobs: list[tuple], model: Path = MODEL, artifact: Path = ARTIFACT
) -> list[Tensor]:
    """Logits of the simulation (`simulate.py`)."""
    torch.save(jobs, folder / "jobs.pt")
    run_there("simulate.py", model, artifact, folder / "jobs.pt", folder / "logits.pt")
    return torch.load(folder / "logits.pt")


def divergence(engine: CpuEngine, name: str, job: tuple, want: Tensor) -> Tensor:
    """KL `[steps]` of the simulation's logits and a request's, which reads protected rows and a cached prefix in BF16."""
    got = torch.stack([engine.logits[name][n] for n in range(job[3][-1], len(job[2]) + 1)])
    kl = functional.kl_div(got.log_softmax(-1), want.log_softmax(-1), log_target=True, reduction="none")
    return kl.sum(-1)


def small(kl: Tensor, first: float = 2e-4, mean: float = 1e-3) -> bool:
    """Whether logits are those of the simulation: the first ones read what both have stored alike; later ones also
    what differences in BF16 have rounded to other codes, of which error feedback makes more."""
    return bool(kl[0] < first and kl.mean() < mean)
