"""Flat rows, merging, resuming; tables made from them."""

import json

import pytest

from rolaq.common.errors import RolaqError
from rolaq.eval.results import KEYS, Results, merge
from rolaq.eval.tables import pivot, sections, summary


def quality(method, budget="0+0", domain="web", length=512, kl=0.1, seed=None, **more):
    row = {"model": "m", "method": method, "seed": seed, "budget": budget, "reading": "per_query"}
    row |= {"domain": domain, "length": length, "kl": kl, "ppl": 8.0, "bytes_per_token": 144}
    return {**row, "method_id": "a", "fingerprint": "f", **more}


def ruler(method, task="niah_single_1", score=50.0, budget="4+16", seed=None):
    row = {"model": "m", "method": method, "seed": seed, "budget": budget, "reading": "per_query"}
    return {
        **row,
        "length": 1024,
        "task": task,
        "score": score,
        "n": 2,
        "through": "simulated",
        "method_id": "a",
    }


def test_rows_survive_and_carry_their_origin(tmp_path):
    path = tmp_path / "m" / "quick.json"
    results = Results(path)
    results.add("quality", quality("rtn"))
    results.meta["note"] = 1
    results.save()
    again = Results(path)
    (row,) = again.rows("quality")
    assert {"commit", "gpu", "command", "date"} <= set(row)
    assert again.meta == {"note": 1}
    assert set(json.loads(path.read_text())) == {"format_version", "meta", *KEYS}


def test_a_row_is_found_only_with_its_fingerprint(tmp_path):
    results = Results(tmp_path / "r.json")
    results.add("quality", quality("rtn"))
    assert results.find("quality", quality("rtn"))
    assert not results.find("quality", quality("rtn", fingerprint="other"))
    assert not results.find("quality", quality("rtn", length=1024))


def test_rows_of_other_tensors_are_forgotten(tmp_path):
    results = Results(tmp_path / "r.json")
    for seed, mark in ((42, "old"), (43, "old"), (42, "new")):
        results.add(
            "quality", quality("rolaq", seed=seed, method_id=mark, length=512 if mark == "old" else 1024)
        )
    results.forget("rolaq", 42, "new")
    assert [(row["seed"], row["method_id"]) for row in results.rows("quality")] == [(43, "old"), (42, "new")]


def test_another_format_is_refused(tmp_path):
    (tmp_path / "r.json").write_text('{"format_version": 0}')
    with pytest.raises(RolaqError, match="another version"):
        Results(tmp_path / "r.json")


def test_two_processes_keep_each_others_rows(tmp_path):
    start = Results(tmp_path / "r.json")
    start.add("quality", quality("rolaq", method_id="old"))
    start.add("quality", quality("rtn", kl=1.0))
    start.save()
    one, two = Results(start.path), Results(start.path)
    one.forget("rolaq", None, "new")
    one.add("quality", quality("oscar", kl=2.0))
    one.save()
    two.add("quality", quality("oscar", kl=3.0))
    two.add("ruler", ruler("rtn"))
    two.save()
    assert {row["method"]: row["kl"] for row in Results(start.path).rows("quality")} == {"rtn": 1, "oscar": 3}
    one.save()
    again = Results(start.path)
    assert {row["method"]: row["kl"] for row in again.rows("quality")} == {"rtn": 1, "oscar": 2}
    assert len(again.rows("ruler")) == 1


def test_a_forgotten_row_stays_away_but_not_its_successor(tmp_path):
    start = Results(tmp_path / "r.json")
    start.add("quality", quality("rolaq", method_id="old"))
    start.save()
    mine, other = Results(start.path), Results(start.path)
    mine.forget("rolaq", None, "new")
    mine.save()
    assert Results(start.path).rows("quality") == []
    other.add("quality", quality("rolaq", method_id="new"))
    other.save()
    mine.save()
    assert [row["method_id"] for row in Results(start.path).rows("quality")] == ["new"]


def test_rows_of_another_text_are_forgotten(tmp_path):
    results = Results(tmp_path / "r.json")
    for length, more in enumerate(({}, {"text": "a"}, {"text": "b"}, {"text": "a", "model": "other"})):
        results.add("quality", quality("rtn", length=length, **more))
    results.save()
    results.forget_text("m", "b")
    results.save()
    assert [row["length"] for row in Results(results.path).rows("quality")] == [0, 2, 3]


@pytest.mark.parametrize("content", ["[]", "{V, 'quality': {}}", "{V, 'ruler': [1]}", "{V, 'meta': []}"])
def test_a_damaged_file_is_one_line(tmp_path, content):
    path = tmp_path / "r.json"
    path.write_text(content.replace("V", "'format_version': 1").replace("'", '"'))
    with pytest.raises(RolaqError, match=r"r.json is damaged: move it away and run again"):
        Results(path)


def test_summary_averages_what_all_methods_have():
    rows = [quality("rtn", kl=1.0), quality("rtn", kl=9.0, length=1024), quality("rolaq", kl=0.5)]
    rows += [quality("rtn", kl=2.0, budget="4+8", length=1024)]
    rtn, rolaq = summary(rows, [])
    assert (rtn["kl 0+0"], rolaq["kl 0+0"]) == (1.0, 0.5)
    assert (rtn["kl 4+8"], rolaq["kl 4+8"]) == (2.0, None)


def test_merge_replaces_by_key():
    old = [quality("rtn", kl=1.0), quality("oscar", kl=2.0)]
    new = [quality("rtn", kl=3.0), quality("rtn", budget="4+8", kl=4.0)]
    assert [row["kl"] for row in merge("quality", old, new)] == [3.0, 2.0, 4.0]


def test_summary_averages_by_budget():
    rows = [quality("bf16", kl=0.0, ppl=2.0), quality("bf16", domain="books", kl=0.0, ppl=8.0)]
    rows += [quality("rolaq", kl=0.1, seed=42), quality("rolaq", kl=0.3, domain="books", seed=42)]
    rows += [quality("rolaq", kl=0.05, budget="4+16", seed=42)]
    scores = [ruler("rolaq", seed=42, score=40.0), ruler("rolaq", seed=42, score=60.0, task="niah_single_2")]
    bf16, rolaq = summary(rows, scores)
    assert (bf16["method"], rolaq["method"]) == ("bf16", "rolaq")
    assert bf16["ppl 0+0"] == pytest.approx(4.0)  # geometric
    assert rolaq["kl 0+0"] == pytest.approx(0.2) and rolaq["kl 4+16"] == pytest.approx(0.05)
    assert rolaq["ruler 4+16"] == 50.0 and rolaq["ruler 0+0"] is None and bf16["kl 4+16"] is None


def test_seeds_are_told_apart():
    rows = [quality("rolaq", seed=43, kl=0.2), quality("rolaq", seed=42), quality("rtn")]
    assert [row["method"] for row in summary(rows, [])] == ["rtn", "rolaq (seed 42)", "rolaq (seed 43)"]


def test_pivot_has_a_mean_only_of_complete_rows():
    rows = [quality("rtn", kl=1.0), quality("rtn", domain="books", kl=3.0), quality("rolaq", kl=0.5)]
    rtn, rolaq = pivot(rows, "domain", "kl")
    assert rtn == {"method": "rtn", "web": 1.0, "books": 3.0, "mean": 2.0}
    assert rolaq["books"] is None and rolaq["mean"] is None


def test_sections_of_what_is_there():
    assert sections({}) == {}
    found = sections({"quality": [quality("rtn")], "ruler": [ruler("rtn")]})
    assert list(found) == ["Summary", "KL by domain, 0+0", "KL by length, 0+0", "RULER by task, 4+16"]
    assert "| S1 |" in found["RULER by task, 4+16"]
