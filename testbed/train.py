"""Train a model of either size on a corpus and on synthetic retrieval prompts.

python -m rolaq.testbed.train --size tiny --corpus DIR --out testbed/tiny
"""

import argparse
import copy
import json
import os
import platform
import random
import shlex
import shutil
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers import __version__ as tokenizers_version
from transformers import DeepseekV2ForCausalLM

from rolaq.testbed.batches import Batches
from rolaq.testbed.data import encode_documents, file_hashes, read_documents, shard_paths
from rolaq.testbed.evaluate import load_model, perplexities, retrieval_accuracy
from rolaq.testbed.loop import History, Plan, train
from rolaq.testbed.model import CONTEXT, SIZES, TrainingForward, make_model
from rolaq.testbed.retrieval import Words, load_words, split_sentences
from rolaq.testbed.synthetic import LONGEST_SENTENCE, Source, make_rows

TOKENIZER = Path(__file__).parent / "tiny"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
DEFAULTS = {"tiny": (4.5, 1.5e-3), "small": (5.5, 8e-4)}
# English prose, as the essays of the evaluation are; code and tables make poor sentences.
ESSAY_DOMAINS = {"books", "web", "wikipedia", "europarl", "forum"}


def parse_arguments() -> argparse.Namespace:
    """The command line; minutes and learning rate default by size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=list(SIZES), default="tiny")
    parser.add_argument("--corpus", type=Path, required=True, help="with train/, val/, test/")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--words", type=Path, help="folder of word lists, else wonderwords")
    parser.add_argument("--minutes", type=float, help="of training, without preparing data")
    parser.add_argument("--steps", type=int, help="stop after this many steps instead")
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--answer-weight", type=float, default=0.5)
    parser.add_argument("--prompt-weight", type=float, default=0.1)
    parser.add_argument("--rows", type=int, default=32, help="sequences per batch")
    parser.add_argument("--context", type=int, default=CONTEXT, help="their length in tokens")
    parser.add_argument("--retrieval-share", type=float, default=0.25)
    parser.add_argument("--synthetic-rows", type=int, default=49_152)
    parser.add_argument("--eval-prompts", type=int, default=50, help="per task and length")
    parser.add_argument("--eval-lengths", type=int, nargs="+", default=[1024, CONTEXT])
    parser.add_argument("--eval-windows", type=int, default=64, help="per domain")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    minutes, rate = DEFAULTS[args.size]
    args.minutes = args.minutes or minutes
    args.learning_rate = args.learning_rate or rate
    return args


def make_batches(args: argparse.Namespace, words: Words, device: str) -> Batches:
    """Tokenize the corpus, make the retrieval rows and move both to the device."""
    documents = [document for path in shard_paths(args.corpus / "train") for document in read_documents(path)]
    tokenizer_file = TOKENIZER / "tokenizer.json"
    texts = [document["text"] for document in documents]
    stream = encode_documents(texts, tokenizer_file, args.workers)
    prose = [d["text"] for d in documents if d["domain"] in ESSAY_DOMAINS]
    random.Random(args.seed).shuffle(prose)
    source = Source(words, sentences(prose))
    ids, answers = make_rows(
        source, tokenizer_file, args.synthetic_rows, args.context + 1, args.seed, args.workers
    )
    prompt_rows = round(args.rows * args.retrieval_share)
    return Batches(
        stream=torch.from_numpy(stream.astype(np.int32)).to(device),
        prompts=torch.from_numpy(ids.astype(np.int32)).to(device),
        answers=torch.from_numpy(answers).to(device),
        length=args.context,
        text_rows=args.rows - prompt_rows,
        prompt_rows=prompt_rows,
        rng=np.random.default_rng(args.seed),
    )


def sentences(texts: list[str]) -> list[str]:
    """The sentences of texts, in order, without overlong ones."""
    return [s for text in texts for s in split_sentences(text) if len(s) <= LONGEST_SENTENCE]


def save(model: DeepseekV2ForCausalLM, out: Path) -> None:
    """Write BF16 weights, configuration and tokenizer."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(out)
    for name in TOKENIZER_FILES:
        if (out / name).resolve() != (TOKENIZER / name).resolve():
            shutil.copyfile(TOKENIZER / name, out / name)


def measure(args: argparse.Namespace, words: Words, device: str) -> dict[str, Any]:
    """Held-out perplexity and retrieval accuracy of the saved model."""
    model = load_model(args.out, device)
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    results: dict[str, Any] = {}
    for split in ("val", "test"):
        folder = args.corpus / split
        if folder.is_dir():
            results[f"{split}_perplexity"] = perplexities(model, tokenizer, folder, args.eval_windows)
    held_out = [d for path in shard_paths(args.corpus / "val") for d in read_documents(path)]
    prose = [d["text"] for d in held_out if d["domain"] in ESSAY_DOMAINS]
    source = Source(words, sentences(prose))
    # Prompts of the training rows come from streams "seed/job"; these use other streams.
    for length in args.eval_lengths:
        results[f"retrieval_{length}"] = retrieval_accuracy(
            model, tokenizer, source, length, args.eval_prompts, args.seed + 1
        )
    return results


def command_line(args: argparse.Namespace) -> str:
    """The command of this run, with its folders by name only."""
    folders = {str(path): path.name for path in (args.corpus, args.words, args.out) if path}
    words = [folders.get(word, word) for word in sys.argv[1:]]
    return shlex.join(["python", "-m", "rolaq.testbed.train", *words])


def describe(
    args: argparse.Namespace, model: DeepseekV2ForCausalLM, plan: Plan, history: History
) -> dict[str, Any]:
    """What a reader needs to repeat the run."""
    corpus = {
        split: file_hashes(args.corpus / split)
        for split in ("train", "val", "test")
        if (args.corpus / split).is_dir()
    }
    return {
        "size": args.size,
        "parameters": sum(p.numel() for p in model.parameters()),
        "command": command_line(args),
        "seed": args.seed,
        "plan": asdict(plan),
        "rows": args.rows,
        "context": args.context,
        "retrieval_share": args.retrieval_share,
        "synthetic_rows": args.synthetic_rows,
        "steps": history.step,
        "tokens": history.tokens,
        "seconds": round(history.seconds, 1),
        "interrupted": history.interrupted,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers_version,
        },
        "corpus_sha256": corpus,
        "loss_curve": history.points,
    }


def main() -> None:
    """Prepare data, train, save, measure and write `training.json`."""
    args = parse_arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    start = time.perf_counter()
    words = load_words(args.words)
    batches = make_batches(args, words, device)
    print(
        f"{len(batches.stream):,} tokens of text, {batches.prompts.numel():,} of prompts,"
        f" ready after {time.perf_counter() - start:.0f} s",
        flush=True,
    )
    # After the worker processes, which a pool ends with SIGTERM.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    vocabulary = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json")).get_vocab_size()
    model = make_model(args.size, vocabulary)
    forward = TrainingForward(model).to(device)
    weights = (args.answer_weight, args.prompt_weight)
    plan = Plan(args.minutes, args.steps, args.learning_rate, *weights)
    history = train(forward, batches, plan, device)
    save(model, args.out)
    report = describe(args, model, plan, history)
    write_json(args.out / "training.json", report)
    report |= measure(args, words, device)
    write_json(args.out / "training.json", report)
    print(json.dumps({k: v for k, v in report.items() if "retrieval_1" in k or "val_p" in k}))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace a file by indented JSON, whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", "utf8")
    partial.replace(path)


if __name__ == "__main__":
    main()
