"""Logits of the `serving` simulation, in a process of its own: SGLang pins a Transformers that caches no latents.

Usage: simulate.py MODEL ARTIFACT JOBS.pt OUT.pt; a job is (sink, recent, tokens, cuts), its result the logits after
each token from the last cut on, `[len(tokens) - cuts[-1] + 1, vocabulary]`.
"""

import sys
from itertools import pairwise

import torch
from transformers import AutoModelForCausalLM

from rolaq.quant.adapters.attach import attach
from rolaq.quant.artifact import Artifact
from rolaq.quant.protection import Protection


def main(model: str, artifact: str, jobs: str, out: str) -> None:
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
