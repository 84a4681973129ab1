"""Training end to end on the CPU, and the training forward pass."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, DeepseekV2ForCausalLM

import rolaq
from rolaq.testbed import card
from rolaq.testbed.model import SIZES, TrainingForward, make_config, make_model

SOURCE = Path(rolaq.__file__).parents[1]


def write_corpus(folder: Path) -> None:
    for split in ("train", "val", "test"):
        (folder / split).mkdir(parents=True)
        lines = [
            json.dumps({"text": f"Sentence {n} of many. " * 40, "source": "s", "domain": "books"})
            for n in range(60 if split == "train" else 12)
        ]
        (folder / split / "books.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "adjectivelist.txt").write_text("\n".join(f"brave{n}" for n in range(50)))
    (folder / "nounlist.txt").write_text("\n".join(f"apple{n}" for n in range(50)))


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The output folder of three steps of training in a process of its own."""
    folder = tmp_path_factory.mktemp("run")
    write_corpus(folder / "corpus")
    options = (
        f"--size tiny --corpus {folder / 'corpus'} --words {folder / 'corpus'} --steps 3"
        f" --out {folder / 'out'} --rows 2 --retrieval-share 0.5 --synthetic-rows 4 --workers 1"
        " --context 512 --eval-prompts 1 --eval-lengths 640 --eval-windows 1"
    )
    subprocess.run(
        [sys.executable, "-m", "rolaq.testbed.train", *options.split()],
        check=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    return folder / "out"


def test_checkpoint_loads_with_the_same_logits(trained):
    model = DeepseekV2ForCausalLM.from_pretrained(trained, dtype=torch.float32).eval()
    ids = torch.randint(0, 4096, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, theirs = TrainingForward(model).logits(ids), model(ids).logits
    # FP32 sums of up to 1,024 terms in another order.
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_checkpoint_is_small_and_complete(trained):
    assert (trained / "model.safetensors").stat().st_size <= 26e6
    assert AutoTokenizer.from_pretrained(trained).eos_token_id == 0


def test_report_fills_the_card(trained, tmp_path, monkeypatch):
    report = json.loads((trained / "training.json").read_text())
    assert report["steps"] == 3 and len(report["corpus_sha256"]["train"]["books.jsonl"]) == 64
    path = tmp_path / "README.md"
    path.write_text(f"before\n{card.BEGIN}\nold\n{card.END}\nafter\n")
    monkeypatch.setattr(card, "CARD", path)
    monkeypatch.setattr(sys, "argv", ["card", str(trained / "training.json")])
    card.main()
    text = path.read_text()
    assert "niah_multikey_3" in text and "old" not in text and text.endswith("after\n")
    assert str(trained.parent) not in report["command"]


@pytest.mark.parametrize("size, least, most", [("tiny", 10e6, 13e6), ("small", 60e6, 100e6)])
def test_parameter_counts(size, least, most):
    with torch.device("meta"):
        model = DeepseekV2ForCausalLM(make_config(size, 4096))
    assert least <= sum(p.numel() for p in model.parameters()) <= most


def test_unknown_size_is_refused():
    with pytest.raises(ValueError, match="Available: tiny, small"):
        make_config("huge", 4096)


def test_losses_are_split_by_kind(monkeypatch):
    monkeypatch.setitem(SIZES["tiny"], "num_hidden_layers", 1)
    forward = TrainingForward(make_model("tiny", 4096))
    ids = torch.randint(0, 4096, (3, 9))
    answers = torch.zeros(1, 9, dtype=torch.bool)
    answers[0, 5] = True
    logits = forward.logits(ids[:, :-1]).float()
    expected = torch.nn.functional.cross_entropy(logits[2, 4], ids[2, 5])
    torch.testing.assert_close(forward(ids, answers)[1], expected)
