"""Logits of the `serving` simulation, in a process of its own: SGLang pins a Transformers that caches no latents.

Usage: simulate.py MODEL ARTIFACT JOBS.pt OUT.pt; a job is (sink, recent, tokens, cuts), its result the logits after
each token from the last cut on, `[len(tokens) - cuts[-1] + 1, vocabulary]`. RoPE keys are cached in BF16, as packed
rows hold them.
"""

import sys
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rolaq.quant.adapters.attach import attach
from rolaq.quant.adapters.cache import LatentCacheLayer
from rolaq.quant.artifact import Artifact
from rolaq.quant.protection import Protection


def round_rope_keys() -> None:
    """A decoded token reads its own RoPE key from the cache too, a chunk reads its own as they are."""
    update = LatentCacheLayer.update

    def rounded(self: Any, latents: Tensor, rope: Tensor, *rest: Any, **more: Any) -> tuple[Tensor, Tensor]:
        if rope.shape[2] == 1:
            rope = rope.bfloat16().float()
        seen = update(self, latents, rope, *rest, **more)
        self.values = self.values.bfloat16().float()
        return seen

    LatentCacheLayer.update = rounded


def main(model: str, artifact: str, jobs: str, out: str) -> None:
    round_rope_keys()
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    method, results = Artifact.load(artifact).method(), []
    for sink, recent, tokens, cuts in torch.load(jobs):
        with torch.no_grad(), attach(loaded, method, Protection(sink, recent, "serving")):
            cache, rows = None, []
            for begin, end in pairwise([0, *cuts, *range(cuts[-1] + 1, len(tokens) + 1)]):
                result = loaded(torch.tensor([tokens[begin:end]]), past_key_values=cache, use_cache=True)
                cache = result.past_key_values
                rows.append(result.logits[0, -1])
        results.append(torch.stack(rows[len(cuts) - 1 :]))
    torch.save(results, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
