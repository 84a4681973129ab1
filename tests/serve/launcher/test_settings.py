"""The pool's settings, its bytes, and the configuration they come from."""

import pytest

from rolaq.common.errors import RolaqError
from rolaq.quant.spec import QuantizerSpec
from rolaq.serve.config import ServerConfig, pool_settings
from rolaq.serve.settings import Settings
from rolaq.serve.sizing import Sizing


def test_settings_travel_through_the_environment():
    settings = Settings(artifact="/x y/é", sink=2, recent=0, sink_entries=3, slots=5, page_size=128)
    assert Settings.from_environment(settings.environment()) == settings
    assert Settings.from_environment({}) is None
    assert settings.budget == "2+0"


@pytest.mark.parametrize(
    "text", ["{", "{}", '{"artifact": "a", "sinks": 1}', '{"artifact": "a", "page_size": 16}']
)
def test_damaged_settings_are_refused(text):
    with pytest.raises(RolaqError, match="ROLAQ_SERVE holds no settings"):
        Settings.from_environment({"ROLAQ_SERVE": text})


@pytest.mark.parametrize(
    ("budget", "says"),
    [
        ("4+61", "protects 65 tokens a sequence"),
        ("65+0", "at most 64"),
        ("4", "write sinks+recent"),
        ("-1+4", "write"),
    ],
)
def test_budgets_that_cannot_be_served(budget, says):
    with pytest.raises(RolaqError, match=says.replace("+", r"\+")):
        pool_settings("a", budget, ServerConfig())


@pytest.mark.parametrize("budget", ["0+0", "4+60", "64+0"])
def test_budgets_that_can(budget):
    assert pool_settings("a", budget, ServerConfig()).budget == budget


@pytest.mark.parametrize("size", [1, 32, 63, 96])
def test_pages_are_multiples_of_64(size):
    with pytest.raises(ValueError, match="page_size"):
        ServerConfig(page_size=size)


CASES = [(27, 512, 64, 288), (62, 256, 32, 144), (6, 256, 32, 144), (61, 512, 64, 288)]


@pytest.mark.parametrize(("layers", "d", "d_r", "row"), CASES)
@pytest.mark.parametrize("page", [64, 128])
def test_bytes_of_the_pool(layers, d, d_r, row, page):
    sizing = Sizing(layers, d, d_r, slots=7, sink=4, recent=16, sink_entries=5, page_size=page)
    rows = 5 * 4 + 8 * 16
    assert sizing.per_token_layer == row
    assert sizing.per_token == layers * row + 4
    protected = rows * layers * d * 2 + 4 * (rows + 1) + 4 * 5 + 4
    assert sizing.fixed == protected + layers * 6 * d * d + page * (layers * row + 4)
    tokens = sizing.tokens(10**10)
    assert tokens % page == 0
    assert sizing.bytes(tokens) <= 10**10 < sizing.bytes(tokens + page)
    assert sizing.tokens(sizing.bytes(page)) == page
    assert sizing.tokens(sizing.bytes(page) - 1) == 0
    assert sizing.tokens(0) == 0


def test_without_sinks_their_places_cost_nothing():
    some, none = (Sizing(2, 256, 32, 1, 0, 8, entries).fixed for entries in (1000, 1))
    assert some == none


def test_half_precision_statistics_make_smaller_rows():
    spec = QuantizerSpec(stats_dtype="float16")
    assert Sizing(27, 512, 64, 1, 0, 0, 1, spec=spec).per_token_layer == 272


@pytest.mark.parametrize(
    ("host", "args", "url"),
    [
        ("127.0.0.1", [], "http://127.0.0.1:30000"),
        ("0.0.0.0", [], "http://127.0.0.1:30000"),
        ("::", [], "http://[::1]:30000"),
        ("localhost", ["--ssl-certfile", "x"], "https://localhost:30000"),
    ],
)
def test_where_the_server_is_reached(host, args, url):
    assert ServerConfig(host=host, args=args).url == url


def test_where_the_key_comes_from(monkeypatch, tmp_path):
    monkeypatch.delenv("ROLAQ_API_KEY", raising=False)
    assert ServerConfig().api_key() is None
    monkeypatch.setenv("ROLAQ_API_KEY", "one")
    assert ServerConfig().api_key() == "one"
    path = tmp_path / "key"
    path.write_text("two\n")
    assert ServerConfig(api_key_file=str(path)).api_key() == "two"
    path.write_text("\n")
    with pytest.raises(RolaqError, match="is empty"):
        ServerConfig(api_key_file=str(path)).api_key()
    with pytest.raises(RolaqError, match="cannot be read"):
        ServerConfig(api_key_file=str(tmp_path / "none")).api_key()
