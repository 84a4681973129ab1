"""Rows, ratios, tables and figures from made-up numbers."""

import pytest

from rolaq.common.errors import RolaqError
from rolaq.serve.bench.figures import draw
from rolaq.serve.bench.measure import figure
from rolaq.serve.bench.results import merge, ratio_table, ratios, read_rows, save, table


def rows():
    found = []
    for impl, speed in (("bf16-triton", 1.0), ("bf16-flashmla", 1.8), ("int2", 2.7)):
        common = {"impl": impl, "model": "m", "budget": "4+16" if impl == "int2" else None}
        found += [
            {**common, **figure("capacity", 1e6 * speed, "tokens")},
            *({**common, **figure("decode", 600 * speed / n, "tok/s", 4, 1024 * n, 128)} for n in (1, 2, 4)),
            {**common, **figure("decode_interval", 90 * speed, "tok/s", 4, 1024, 4096, output_from=2048)},
            *(
                {**common, **figure(f"ttft_p{q}", n / speed, "s", n, 512, 8)}
                for q in (50, 99)
                for n in (1, 8)
            ),
        ]
    found[-1] = {**found[-1], "bound": "at least"}
    return found


def test_rows_are_replaced_by_newer_ones_of_the_same_key(tmp_path):
    path = tmp_path / "serve.json"
    save(path, rows())
    newer = {**rows()[0], "value": 7.0}
    save(path, [newer])
    assert len(read_rows(path)) == len(rows()) and read_rows(path)[0]["value"] == 7.0
    other_budget = {**rows()[-1], "budget": "0+0"}
    assert len(merge(rows(), [other_budget])) == len(rows()) + 1


def test_a_foreign_file_is_not_overwritten(tmp_path):
    path = tmp_path / "serve.json"
    path.write_text('{"rows": 1}')
    with pytest.raises(RolaqError, match="no list of rows"):
        save(path, rows())


def test_ratios_are_above_one_where_int2_is_better():
    found = {
        (r["figure"], r["against"], r["requests"], r["input_tokens"]): r["ratio"] for r in ratios(rows())
    }
    assert found["decode", "bf16-triton", 4, 2048] == pytest.approx(2.7)
    assert found["ttft_p99", "bf16-flashmla", 8, 512] == pytest.approx(1.5)
    assert found["capacity", "bf16-triton", None, None] == pytest.approx(2.7)
    assert ratios([row for row in rows() if row["impl"] != "int2"]) == []


def test_tables_leave_empty_columns_out():
    text = table(rows())
    assert "| at least |" in text and "| mode |" not in text
    assert "against" in ratio_table(rows()) and ratio_table([]) == ""


@pytest.mark.parametrize("only", [None, "capacity", "decode", "ttft_p99"])
def test_figures_of_all_rows_or_of_one_kind(tmp_path, only):
    mine = [row for row in rows() if only in (None, row["figure"])]
    drawn = draw(mine, tmp_path)
    assert [path.name for path in drawn] == ["serve_m.png"]
    assert drawn[0].read_bytes()[:4] == b"\x89PNG"


def test_rows_without_a_panel_draw_nothing(tmp_path):
    assert draw([{"figure": "parity_kl", "model": "tiny", "impl": "int2", "value": 1.0}], tmp_path) == []
