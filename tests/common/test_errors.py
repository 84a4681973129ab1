import pytest

from rolaq.common.errors import RolaqError, lookup, main, one_line


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rolac", "Unknown method 'rolac'. Did you mean: rolaq? Available: oscar, rolaq, rtn"),
        ("zzzzz", "Unknown method 'zzzzz'. Available: oscar, rolaq, rtn"),
        ("", "Unknown method ''. Available: oscar, rolaq, rtn"),
    ],
)
def test_lookup_names_the_options_and_the_nearest(name, expected):
    with pytest.raises(RolaqError) as caught:
        lookup("method", name, {"rtn": 1, "rolaq": 2, "oscar": 3})
    assert str(caught.value) == expected


def test_lookup_finds_and_survives_an_empty_table():
    assert lookup("method", "rtn", {"rtn": None}) is None
    with pytest.raises(RolaqError, match="Available: none"):
        lookup("method", "rtn", {})


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (RolaqError("what\n  to do"), 1, "error: what to do\n"),
        (
            OSError(28, "No space left on device", "x"),
            1,
            "error: [Errno 28] No space left on device: 'x': free space, or choose another folder\n",
        ),
        (KeyboardInterrupt(), 130, "stopped: interrupted\n"),
        (KeyboardInterrupt("kept the checkpoint"), 130, "stopped: kept the checkpoint\n"),
    ],
)
def test_main_prints_one_line_and_exits(monkeypatch, capsys, error, code, text):
    monkeypatch.delenv("ROLAQ_DEBUG", raising=False)

    @main
    def command():
        raise error

    with pytest.raises(SystemExit) as caught:
        command()
    assert caught.value.code == code
    assert capsys.readouterr().err == text


def test_main_returns_values_and_lets_defects_through():
    assert main(lambda x: x + 1)(1) == 2
    with pytest.raises(ZeroDivisionError):
        main(lambda: 1 / 0)()


def test_main_keeps_the_traceback_when_debugging(monkeypatch):
    monkeypatch.setenv("ROLAQ_DEBUG", "1")

    @main
    def command():
        raise RolaqError("x")

    with pytest.raises(RolaqError):
        command()


def test_one_line_cuts_and_names_empty_errors():
    assert one_line(ValueError()) == "ValueError"
    assert one_line("a\n b\t c") == "a b c"
    assert len(one_line("x" * 1000, limit=50)) == 50
