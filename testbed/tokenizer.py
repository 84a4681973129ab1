"""Train the byte-level BPE that both model sizes share.

python -m rolaq.testbed.tokenizer --corpus DIR --out testbed/tiny
"""

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rolaq.testbed.data import read_documents, shard_paths

END_OF_TEXT = "<|endoftext|>"
VOCABULARY = 4096
CONTEXT = 2048

# Share of the sample per domain: English prose first, as the model's own text is.
DOMAIN_SHARES = {
    "books": 0.26,
    "web": 0.15,
    "docs": 0.15,
    "science": 0.10,
    "europarl": 0.08,
    "wikipedia": 0.08,
    "reference": 0.05,
    "multilingual": 0.05,
    "forum": 0.03,
    "dialog": 0.03,
    "chinese": 0.02,
}


def sample_text(corpus: Path, total_bytes: int, seed: int) -> Iterator[str]:
    """Yield pieces of at most 20,000 characters, `total_bytes` long, by `DOMAIN_SHARES`."""
    rng = random.Random(seed)
    pieces: dict[str, list[str]] = {domain: [] for domain in DOMAIN_SHARES}
    for path in shard_paths(corpus / "train"):
        for document in read_documents(path):
            text = document["text"]
            cuts = range(0, len(text), 20_000)
            pieces[document["domain"]] += [text[start : start + 20_000] for start in cuts]
    for domain, share in DOMAIN_SHARES.items():
        rng.shuffle(pieces[domain])
        left = int(total_bytes * share)
        for piece in pieces[domain]:
            if left <= 0:
                break
            left -= len(piece.encode())
            yield piece


def train_tokenizer(texts: Iterator[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """Byte-level BPE whose digits stay single tokens, so that numbers are copied digit by digit.

    Id 0 is `END_OF_TEXT`; no token is added to an encoded text automatically.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    """Write `tokenizer.json` and its configuration as a Transformers fast tokenizer."""
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
        padding_side="left",
    ).save_pretrained(out)


def main() -> None:
    """Command line: sample the corpus, train, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="folder with train/")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--megabytes", type=float, default=40)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    texts = sample_text(args.corpus, int(args.megabytes * 1e6), args.seed)
    save_tokenizer(train_tokenizer(texts), args.out)


if __name__ == "__main__":
    main()
