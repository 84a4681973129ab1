"""The command: its settings, what it refuses, and what is left when a part fails."""

from types import SimpleNamespace

import pytest

from rolaq.common.errors import RolaqError
from rolaq.serve.bench import __main__ as command


def test_the_settings_compose_and_name_known_things(settings):
    cfg = settings("soak.url=http://x")
    command.check(cfg)
    assert cfg.ttft.against in cfg.use
    assert set(cfg.decode.interval) <= set(cfg.decode.inputs)
    assert max(cfg.decode.inputs) + cfg.decode.tokens <= cfg.server.context
    assert len(cfg.parity.lengths) * cfg.parity.per_length == 50


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["run=[sok]"], "Unknown part 'sok'. Did you mean: soak"),
        (["use=[int3]"], "Did you mean: int2"),
        (["decode.inputs=[2048,1024]"], "must rise"),
        (["decode.tokens=32"], "leaves less than 8"),
        (["model.path=x"], "belong together"),
        (["ttft.factor=0.5"], "ttft.factor=0.5"),
        (["run=[capacity]"], "SGLang is not installed"),
    ],
)
def test_wrong_settings_are_named(settings, monkeypatch, overrides, words):
    with pytest.raises(RolaqError) as error:
        cfg = settings(*overrides)
        monkeypatch.setattr(command.importlib.util, "find_spec", lambda _: None)
        command.check(cfg)
    assert words in str(error.value)


def test_a_failing_part_leaves_the_others_results(settings, monkeypatch):
    def module(name):
        def run(cfg, parts=()):
            if name.endswith("soak"):
                raise RolaqError("no answer")
            return [{"figure": name.rpartition(".")[2], "parts": list(parts)}]

        return SimpleNamespace(run=run)

    cfg = settings("run=[decode,soak,compare,capacity]")
    monkeypatch.setattr(command.importlib, "import_module", module)
    rows, failed = command.measure(cfg)
    assert rows == [{"figure": "speed", "parts": ["decode", "capacity"]}, {"figure": "compare", "parts": []}]
    assert failed == ["soak: no answer"]
