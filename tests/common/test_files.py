import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest
import torch

from rolaq.common.errors import RolaqError
from rolaq.common.files import atomic_write, commit, environment, find, markdown_table, read_json, write_json


def test_atomic_write_replaces_only_on_success(tmp_path):
    target = tmp_path / "new" / "a.json"
    with atomic_write(target) as temporary:
        assert temporary.suffix == ".json"
        temporary.write_text("one")
        assert not target.exists()
    with pytest.raises(ZeroDivisionError), atomic_write(target) as temporary:
        temporary.write_text("two")
        raise ZeroDivisionError
    assert target.read_text() == "one"
    assert os.listdir(target.parent) == ["a.json"]
    assert stat.S_IMODE(target.stat().st_mode) & 0o044 == 0o044 & ~_umask()


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_json_keeps_order_and_plain_values(tmp_path):
    value = {"z": torch.tensor([1.5, 2.0]), "a": np.float32(0.5), "path": Path("x"), "text": "κ"}
    path = write_json(tmp_path / "a.json", value)
    assert path.read_text().startswith('{\n  "z": [')
    assert "κ" in path.read_text()
    assert read_json(path) == {"z": [1.5, 2.0], "a": 0.5, "path": "x", "text": "κ"}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), np.float32("nan"), object(), {1, 2}])
def test_json_refuses_what_it_cannot_hold(tmp_path, bad):
    with pytest.raises(RolaqError, match="cannot write"):
        write_json(tmp_path / "a.json", {"x": bad})
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "No such file"), ("{", "not valid JSON"), ("", "not valid")]
)
def test_read_json_names_the_file(tmp_path, content, message):
    path = tmp_path / "a.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RolaqError, match=message) as caught:
        read_json(path)
    assert str(path) in str(caught.value)


def test_markdown_table_formats_numbers_and_gaps():
    rows = [{"name": "a|b", "kl": 0.123456, "n": 3}, {"name": "c", "kl": 1234567.0}]
    assert markdown_table(rows, {"name": "Method", "kl": "KL", "n": "n"}) == (
        "| Method | KL | n |\n| --- | ---: | ---: |\n| a\\|b | 0.1235 | 3 |\n| c | 1.235e+06 | – |\n"
    )
    assert markdown_table([], ["x"]) == "| x |\n| --- |\n"


def test_find_resolves_package_paths_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Path(find("pkg://rolaq.conf/model/tiny.yaml")).is_file()
    assert find("some/folder") == "some/folder"
    assert find("~/x") == os.path.expanduser("~/x")
    with pytest.raises(RolaqError, match="no package 'rolaq.nothing'"):
        find("pkg://rolaq.nothing/x")


def test_environment_is_json_and_names_versions():
    record = environment()
    assert record["versions"]["torch"] == torch.__version__
    json.dumps(record, allow_nan=False)
    assert commit() is None or len(commit().rstrip("+")) == 40
