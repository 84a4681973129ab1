import hashlib

import pytest
import torch

from rolaq.common.errors import RolaqError
from rolaq.common.text import Document, check_disjoint, crop, document_hashes, fingerprint, pack


class Letters:
    """A tokenizer with one token per character; 0 ends a text, 1 starts one where `bos` is set."""

    eos_token_id = 0

    def __init__(self, bos=False):
        self.bos_token_id = 1 if bos else None

    def __call__(self, text, add_special_tokens=True, **_):
        if isinstance(text, list):
            return {"input_ids": [self(item, add_special_tokens)["input_ids"] for item in text]}
        start = [1] if add_special_tokens and self.bos_token_id else []
        return {"input_ids": start + [ord(letter) for letter in text]}


def docs(*texts, domain="d"):
    return [Document(text, "s", domain) for text in texts]


def text_of(row):
    return "".join("." if token == 0 else chr(token) for token in row.tolist())


def test_fingerprint_ignores_order_case_and_space():
    assert document_hashes(docs("A  b\n")) == [hashlib.sha256(b"a b").hexdigest()]
    assert fingerprint(docs("A  b", "c")) == fingerprint(docs("C", "a b "))
    assert fingerprint(docs("ab")) != fingerprint(docs("a b"))
    assert fingerprint(docs("a", "a")) != fingerprint(docs("a"))
    assert fingerprint(docs("\ufb01ne")) == fingerprint(docs("fine"))  # the ligature fi, by NFKC


def test_check_disjoint_names_sets_and_count():
    check_disjoint(train=docs("a", "b"), val=docs("c"), test=[])
    with pytest.raises(RolaqError, match="train and val text share 2 documents"):
        check_disjoint(fit=docs("z"), train=docs("a", "b", "q"), val=docs("B ", "a"))


def test_pack_joins_documents_and_drops_the_rest():
    rows = pack(docs("abc", "de", "fghi"), Letters(), length=4)
    assert rows.dtype == torch.long
    assert rows.shape == (3, 4)
    joined = "".join(map(text_of, rows))
    assert sorted(joined) == sorted("abc.de.fghi.")
    assert all(part in joined + "." for part in ("abc.", "de.", "fghi."))


def test_pack_is_fixed_by_the_seed():
    many = docs(*(chr(97 + i) * 5 for i in range(20)))
    assert torch.equal(pack(many, Letters(), 8, seed=1), pack(many, Letters(), 8, seed=1))
    assert not torch.equal(pack(many, Letters(), 8, seed=1), pack(many, Letters(), 8, seed=2))


def test_pack_options():
    many = docs(*["abcdef"] * 10)
    assert pack(many, Letters(), 8, limit_tokens=35).shape == (4, 8)
    assert 0 not in pack(many, Letters(), 8, eos=False)
    rows = pack(many, Letters(bos=True), 8)
    assert rows.shape == (10, 8)
    assert (rows[:, 0] == 1).all()
    assert (rows[:, 1:] != 1).all()


@pytest.mark.parametrize(("length", "limit", "needed"), [(8, 80, 80), (8, None, 8), (100, 1000, 1000)])
def test_pack_says_what_is_needed(length, limit, needed):
    with pytest.raises(RolaqError, match=f"{needed} tokens needed, 7 available"):
        pack(docs("abcdef"), Letters(), length, limit)


def test_crop_takes_one_sequence_from_a_long_document():
    rows = crop(docs("abcdefgh", "ABCDEFGH"), Letters(), 4)["d"]
    assert [text_of(row) for row in rows] == ["abcd", "ABCD"]


def test_crop_joins_short_documents_of_one_domain():
    mixed = [*docs("ab", domain="x"), *docs("ZZZZZ", domain="y"), *docs("cd", "ef", "gh", domain="x")]
    result = {name: [text_of(row) for row in rows] for name, rows in crop(mixed, Letters(), 5).items()}
    assert result == {"x": ["ab.cd", "ef.gh"], "y": ["ZZZZZ"]}


def test_crop_returns_to_long_documents_only_when_it_must():
    texts = docs("abcdefghijkl", "ABCDEFGHI")
    for count, expected in [
        (1, ["abcd"]),
        (2, ["abcd", "ABCD"]),
        (4, ["abcd", "ABCD", "efgh", "EFGH"]),
        (5, ["abcd", "ABCD", "efgh", "EFGH", "ijkl"]),
    ]:
        assert [text_of(row) for row in crop(texts, Letters(), 4, count)["d"]] == expected
    with pytest.raises(RolaqError, match="too little d text: 24 tokens needed, 23 available"):
        crop(texts, Letters(), 4, 6)


def test_crop_starts_with_what_the_tokenizer_adds():
    rows = crop(docs("abcdefgh"), Letters(bos=True), 4, 2)["d"]
    assert rows.tolist() == [[1, 97, 98, 99], [1, 100, 101, 102]]
