import io

import matplotlib.image
import pytest

from rolaq.common.figures import COLOURS, colour, figure, marker
from rolaq.common.progress import Progress, progress


def test_figure_saves_a_png_of_the_asked_size(tmp_path):
    path = tmp_path / "plots" / "a.png"
    with figure(path, width=4, height=2) as axes:
        axes.plot([0, 1], color=colour("rolaq"), marker=marker("rolaq"))
        assert not path.exists()
    assert matplotlib.image.imread(path).shape[:2] == (300, 600)


def test_figure_with_panels_and_after_an_error(tmp_path):
    with figure(tmp_path / "a.png", columns=2) as axes:
        assert axes.shape == (2,)
    with pytest.raises(ZeroDivisionError), figure(tmp_path / "b.png"):
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


def test_methods_keep_their_own_colours():
    assert len(set(COLOURS.values())) == len(COLOURS)
    assert colour("something else") == colour("something else")


def test_progress_in_a_log_is_whole_lines(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    with Progress(total=3, label="steps") as bar:
        for step in range(3):
            bar.postfix(loss=0.123456, step=step)
            bar.update()
    assert list(progress(range(2), "items")) == [0, 1]
    assert "\r" not in stream.getvalue()
    lines = stream.getvalue().splitlines()
    assert lines[-1].startswith("items: 100%")
    assert any("3/3" in line and "loss=0.123" in line for line in lines)
