"""Held-out perplexity per domain and retrieval accuracy of a saved model."""

import math
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.nn import functional as F
from transformers import DeepseekV2ForCausalLM

from rolaq.testbed.data import END_OF_TEXT_ID, encode, read_documents, shard_paths
from rolaq.testbed.model import CONTEXT
from rolaq.testbed.retrieval import TASKS, Prompt, Task
from rolaq.testbed.synthetic import PromptMaker, Source

# lm-eval keeps this much of the wanted length free for the answer.
ANSWER_ROOM = 128
# The longest answer, four numbers or one uuid, takes under 40 tokens.
NEW_TOKENS = 64


def load_model(folder: Path, device: str) -> DeepseekV2ForCausalLM:
    """The saved model, in BF16 on a GPU and in FP32 elsewhere, ready for evaluation."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = DeepseekV2ForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.to(device).eval()


@torch.no_grad()
def perplexities(
    model: DeepseekV2ForCausalLM, tokenizer: Tokenizer, folder: Path, windows: int
) -> dict[str, dict[str, float]]:
    """Per file of `folder` (one domain each): perplexity per token, bits per byte, tokens.

    Documents are joined by end-of-text and cut into windows of 2,048 tokens, at most
    `windows` of them; each window starts without a past.
    """
    results = {}
    for path in shard_paths(folder):
        texts = [document["text"] for document in read_documents(path)]
        stream = encode(tokenizer, texts)
        count = min(windows, len(stream) // CONTEXT) or 1
        rows = torch.from_numpy(stream[: count * CONTEXT].astype("int64"))
        loss = _mean_loss(model, rows.view(count, -1).to(model.device))
        tokens_per_byte = len(stream) / sum(len(text.encode()) for text in texts)
        results[path.name.split(".")[0]] = {
            "perplexity": round(math.exp(loss), 3),
            "bits_per_byte": round(loss * tokens_per_byte / math.log(2), 4),
            "tokens": rows.numel(),
        }
    return results


def _mean_loss(model: DeepseekV2ForCausalLM, rows: torch.Tensor) -> float:
    total = 0.0
    for row in rows.split(8):
        logits = model(row, use_cache=False).logits[:, :-1].float()
        total += F.cross_entropy(logits.flatten(0, 1), row[:, 1:].flatten(), reduction="sum").item()
    return total / (rows.shape[0] * (rows.shape[1] - 1))


def retrieval_accuracy(
    model: DeepseekV2ForCausalLM,
    tokenizer: Tokenizer,
    source: Source,
    length: int,
    prompts: int,
    seed: int,
) -> dict[str, Any]:
    """Percent of values found per task, and their average, by greedy generation.

    Prompts take at most `length - 128` tokens, as in lm-eval.
    """
    scores = {}
    for name, task in TASKS.items():
        maker = PromptMaker(tokenizer, source, random.Random(f"{seed}/{name}/{length}"))
        batch = [sized_prompt(maker, task, length) for _ in range(prompts)]
        outputs = generate(model, tokenizer, [prompt.model_input for prompt in batch])
        shares = [matched_share(*pair) for pair in zip(batch, outputs, strict=True)]
        scores[name] = round(100 * sum(shares) / prompts, 2)
    return {"tasks": scores, "average": round(sum(scores.values()) / len(scores), 2)}


def sized_prompt(maker: PromptMaker, task: Task, length: int) -> Prompt:
    """A prompt that leaves `ANSWER_ROOM` of `length` tokens free; `ValueError` if none can."""
    longest = length - ANSWER_ROOM
    for wanted in range(longest, 0, -8):
        prompt = maker.prompt(task, wanted)
        if len(maker.encode(prompt.text)) <= longest:
            return prompt
    raise ValueError(f"no prompt of {task} fits a length of {length} tokens")


def matched_share(prompt: Prompt, output: str) -> float:
    """RULER's `string_match_all` of one prompt, 0 to 1."""
    values = prompt.first.values
    return sum(value.lower() in output.lower() for value in values) / len(values)


@torch.no_grad()
def generate(
    model: DeepseekV2ForCausalLM, tokenizer: Tokenizer, inputs: list[str], batch: int = 64
) -> list[str]:
    """Greedy continuations of at most `NEW_TOKENS` tokens, inputs padded on the left."""
    outputs = []
    for start in range(0, len(inputs), batch):
        rows = [
            tokenizer.encode(text, add_special_tokens=False).ids for text in inputs[start : start + batch]
        ]
        width = max(map(len, rows))
        ids = torch.tensor([[END_OF_TEXT_ID] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        new = model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )[:, width:]
        outputs += tokenizer.decode_batch(new.tolist())
    return outputs
