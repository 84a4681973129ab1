import gzip
import json
import lzma
import sys
import types

import pytest

from rolaq.common.errors import RolaqError
from rolaq.common.sources import _lines
from rolaq.common.text import read_documents

ENTRY = {"text": "one\u2028two\x85three", "source": "s", "domain": "d"}


def jsonl(*entries):
    return "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", jsonl(ENTRY, {"text": "b"}), [("one\u2028two\x85three", "d"), ("b", "a")]),
        ("web-00.jsonl", jsonl({"text": "b"}), [("b", "web")]),
        ("00.jsonl", jsonl({"text": "b"}), [("b", "00")]),
        ("a.jsonl", jsonl({"content": "c"}, "plain", {"text": "  "}) + "\n\n", [("c", "a"), ("plain", "a")]),
        ("a.jsonl", jsonl({"text": "p", "meta": {"pile_set_name": "ArXiv"}}), [("p", "ArXiv")]),
        ("a.jsonl", '{"text": "no newline at the end"}', [("no newline at the end", "a")]),
        ("a.json", json.dumps([{"text": "x"}, {"page": "y"}]), [("x", "a"), ("y", "a")]),
        ("a.json", json.dumps({"text": "x"}), [("x", "a")]),
        ("a.txt", "line\r\nline", [("line\r\nline", "folder")]),
        ("a.md", "# t", [("# t", "folder")]),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".xz", ".gz"])
def test_formats(tmp_path, name, content, expected, suffix):
    folder = tmp_path / "folder"
    folder.mkdir()
    data = content.encode()
    packed = {"": data, ".xz": lzma.compress(data), ".gz": gzip.compress(data)}[suffix]
    (folder / (name + suffix)).write_bytes(packed)
    for source in (folder / (name + suffix), folder):
        assert [(item.text, item.domain) for item in read_documents(str(source))] == expected


def test_folders_are_read_in_order_without_hidden_files(tmp_path):
    for name in ("b/2.txt", "a/1.txt", ".cache/3.txt", "a/.hidden.txt", "a/notes.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [item.text for item in read_documents(str(tmp_path))] == ["a/1.txt", "b/2.txt"]
    both = [str(tmp_path / "b"), str(tmp_path / "a" / "1.txt")]
    assert [item.text for item in read_documents(both)] == ["b/2.txt", "a/1.txt"]
    assert len(read_documents(both, limit=1)) == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{broken\n', "cannot read .*a.jsonl"),
        ("a.jsonl", b'{"title": "x"}\n', "a.jsonl:0 has no text"),
        ("a.jsonl", b"[1]\n", "has no text"),
        ("a.jsonl", b"", "no text found"),
        ("a.jsonl.xz", b"not xz", "cannot read"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 1000, mtime=0)[:-9], "cannot read"),
        ("a.txt", b"\xff\xfe\xfa", "cannot read"),
        ("a.csv", b"x", "only .jsonl, .json, .txt, .md"),
    ],
)
def test_damaged_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RolaqError, match=message):
        read_documents(str(tmp_path / name))


def test_missing_and_empty_sources(tmp_path):
    with pytest.raises(RolaqError, match="there is no text at"):
        read_documents(str(tmp_path / "nowhere"))
    for empty in (str(tmp_path), []):
        with pytest.raises(RolaqError, match="no text found"):
            read_documents(empty)


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_lines_end_at_newline_alone(tmp_path, size):
    (tmp_path / "x").write_bytes("a\u2028b\n\r\nlast".encode())
    with open(tmp_path / "x", encoding="utf-8", newline="") as file:
        assert list(_lines(file, size)) == ["a\u2028b", "\r", "last"]


@pytest.mark.parametrize(
    ("source", "call"),
    [
        ("hf:me/data", ("me/data", None, "train")),
        ("hf:me/data:en", ("me/data", "en", "train")),
        ("hf:me/data:en:test", ("me/data", "en", "test")),
        ("hf:me/data::test", ("me/data", None, "test")),
    ],
)
def test_streaming(monkeypatch, source, call):
    def load_dataset(name, config, *, split, streaming):
        assert streaming
        assert (name, config, split) == call
        return iter({"text": str(number)} for number in range(10**9))

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    documents = read_documents(source, limit=3)
    assert [(item.text, item.domain) for item in documents] == [("0", "data"), ("1", "data"), ("2", "data")]
    with pytest.raises(RolaqError, match="needs a limit"):
        read_documents(source)


def test_stream_failure_is_one_line(monkeypatch):
    def load_dataset(*_, **__):
        raise ConnectionError("no\nroute")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(RolaqError, match="cannot stream hf:x: check name and network"):
        read_documents("hf:x", limit=1)
