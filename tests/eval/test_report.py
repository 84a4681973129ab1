"""The page, the recorded rows and the tables in Markdown files."""

import json
import re

import pytest

from rolaq.common.config import ModelConfig
from rolaq.common.errors import RolaqError
from rolaq.eval.material import recorded
from rolaq.eval.pages import TABLES, refresh
from rolaq.eval.report import ReportConfig, build, record, refresh_pages, suites
from rolaq.eval.results import Results

from .test_results import quality, ruler


@pytest.fixture
def folder(tmp_path):
    """results/m/quick.json with a few rows of every table."""
    results = Results(tmp_path / "results" / "m" / "quick.json")
    for kl, method in ((0.0, "bf16"), (0.4, "rtn"), (0.2, "rolaq")):
        for length in (512, 1024):
            results.add("quality", quality(method, kl=kl, length=length))
        results.add("ruler", ruler(method))
    for gain, kl in ((1.114, 0.7), (1.16, 1.0)):
        row = {"model": "m", "length": 512, "gain": gain, "kappa": 0.9 * gain, "kl": kl, "relative": kl}
        results.add("gain_sweep", row)
    results.add("selection", {"model": "m", "method": "rolaq", "seed": 42, "S": 0.7, "r_short": 0.6})
    line = {"mean": [0.5, 1.0], "std": [0.1, 0.0]}
    results.meta["energy"] = {"key": line, "value": line}
    results.save()
    return tmp_path


def config(folder, **more):
    return ReportConfig(
        model=ModelConfig(name="m", path="m"),
        output=str(folder / "results"),
        artifacts=str(folder),
        docs=str(folder / "docs"),
        **more,
    )


def test_page_is_self_contained(folder):
    cfg = config(folder)
    page, figures = build(cfg, suites(cfg))
    sources = re.findall(r'src="([^"]{0,30})', page)
    assert len(sources) >= len(figures) >= 6 and all(
        source.startswith("data:image/png;base64,") for source in sources
    )
    assert "width=device-width" in page and "color-scheme: light dark" in page
    assert 'class="ours"><td>rolaq</td>' in page
    assert not re.search(r"https?://", page)


def test_record_merges_rows(folder):
    cfg, docs = config(folder), folder / "docs" / "results"
    docs.mkdir(parents=True)
    old = [quality("rtn", kl=9.0), quality("rtn", kl=5.0, model="other")]
    (docs / "quality.json").write_text(json.dumps(old))
    record(suites(cfg), config(folder, record=True), docs)
    rows = recorded(docs)
    assert set(rows) == {"quality", "ruler", "selection", "gain_sweep"}
    assert [row["kl"] for row in rows["quality"][:2]] == [0.4, 5.0]
    assert len(rows["quality"]) == 7


def test_record_needs_one_suite(folder):
    cfg = config(folder)
    (folder / "results" / "m" / "full.json").write_text((folder / "results" / "m" / "quick.json").read_text())
    with pytest.raises(RolaqError, match="there are full, quick: give record="):
        record(suites(cfg), config(folder, record=True), folder)
    with pytest.raises(RolaqError, match="Unknown suite in the results 'quik'. Did you mean: quick"):
        record(suites(cfg), config(folder, record="quik"), folder)
    assert record(suites(cfg), cfg, folder) == []
    assert record(suites(cfg), config(folder, record="full"), folder / "docs")


def test_markers_are_filled_and_nothing_else_changes(folder):
    cfg = config(folder)
    record(suites(cfg), config(folder, record=True), folder / "docs" / "results")
    page = folder / "docs" / "page.md"
    text = "# Title\n\n<!-- results:start summary -->\nold\n<!-- results:end -->\n\nBetween.\n\n<!-- results:start ruler -->\n<!-- results:end -->\nEnd.\n"
    page.write_text(text)
    assert refresh_pages([str(folder / "docs"), str(folder / "missing.md")], folder / "docs" / "results") == [
        page
    ]
    new = page.read_text()
    assert "| rolaq | 144 | 0.2 |" in new and "old" not in new and "Budget 4+16" in new
    outside = re.sub(r"(?s)(results:start[^>]*-->).*?(<!-- results:end)", r"\1\2", new)
    assert outside == re.sub(r"(?s)(results:start[^>]*-->).*?(<!-- results:end)", r"\1\2", text)
    assert not refresh(page, recorded(folder / "docs" / "results"))  # a second time changes nothing


def test_unknown_table_is_an_error(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- results:start rulr -->\n<!-- results:end -->\n")
    with pytest.raises(RolaqError, match="Unknown table 'rulr'. Did you mean: ruler"):
        refresh(page, {})


@pytest.mark.parametrize("name", TABLES)
def test_tables_without_rows_say_so(tmp_path, name):
    page = tmp_path / "page.md"
    page.write_text(f"<!-- results:start {name} -->\n<!-- results:end -->\n")
    refresh(page, {})
    assert "No results are recorded yet." in page.read_text()
