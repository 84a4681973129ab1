"""Options that must not be served, one by one, from plain objects and from command lines."""

from types import SimpleNamespace

import pytest

from rolaq.common.errors import RolaqError
from rolaq.serve.arguments import arguments, check_arguments, environment
from rolaq.serve.refusals import OFF, ONE, option, parse, refuse
from rolaq.serve.settings import Settings

GOOD = {"attention_backend": "rolaq", "page_size": 64, "max_running_requests": 256}
CASES = [
    *((field, True, option(field)) for field in OFF),
    *((field, 2, f"{option(field)} 2") for field in ONE),
    ("attention_backend", "flashmla", "--attention-backend flashmla"),
    ("prefill_attention_backend", "fa3", "--prefill-attention-backend fa3"),
    ("kv_cache_dtype", "fp8_e4m3", "supported: auto or bfloat16"),
    ("dtype", "float16", "--dtype float16"),
    ("disaggregation_mode", "prefill", "--disaggregation-mode prefill"),
    ("weight_cache_mode", "client", "--weight-cache-mode client"),
    ("startup_weight_load_mode", "overlap", "--startup-weight-load-mode overlap"),
    ("kv_canary", "log", "--kv-canary log"),
    ("model_impl", "transformers", "--model-impl transformers"),
    ("speculative_algorithm", "EAGLE", "--speculative-algorithm EAGLE is not supported on the packed cache"),
    ("cpu_offload_gb", 4, "--cpu-offload-gb 4"),
]


@pytest.mark.parametrize(("field", "value", "says"), CASES)
def test_each_option_is_refused_by_name_in_one_line(field, value, says):
    with pytest.raises(RolaqError) as error:
        refuse(SimpleNamespace(**{**GOOD, field: value}))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("fields", [{}, {"pp_size": None, "lora_paths": []}, {"dp_size": 2, "tp_size": 2}])
def test_what_is_supported_passes(fields):
    refuse(SimpleNamespace(**GOOD, **fields), Settings(artifact="a"))


@pytest.mark.parametrize(
    ("targets", "allowed"),
    [(None, False), (["all"], False), (["q_proj", "kv_b_proj"], False), ({"q_proj"}, True)],
)
def test_lora_may_not_touch_what_is_folded(targets, allowed):
    given = SimpleNamespace(**GOOD, lora_paths=["x"], lora_target_modules=targets)
    if allowed:
        refuse(given)
    else:
        with pytest.raises(RolaqError, match="LoRA on kv_b_proj"):
            refuse(given)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"page_size": 1}, "--page-size 1: the packed pool was laid out for pages of 64"),
        ({"max_running_requests": 300}, "has rows for 256 requests"),
        ({"max_running_requests": None}, "has rows for 256 requests"),
    ],
)
def test_the_pool_must_fit_what_sglang_was_told(fields, says):
    with pytest.raises(RolaqError, match=says):
        refuse(SimpleNamespace(**{**GOOD, **fields}), Settings(artifact="a"))


def test_command_lines_are_read():
    given = parse(["--a-b", "1", "--flag", "--list", "x", "y", "--eq=v=w"])
    assert vars(given) == {"a_b": "1", "flag": True, "list": ["x", "y"], "eq": "v=w"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--enable-hierarchical-cache"], "--enable-hierarchical-cache is not supported"),
        (["--pp-size", "2"], "--pp-size 2 is not supported"),
        (["--kv-cache-dtype=fp8_e5m2"], "--kv-cache-dtype fp8_e5m2"),
        (["--port", 1], "--port is set by this command; use server.port"),
        (["--tp", "2"], "use server.tp"),
        (["--api-key", "k"], "set ROLAQ_API_KEY or server.api_key_file"),
        (["--config", "x.yaml"], "give other options one by one"),
        (["word"], "server.args starts with 'word'"),
    ],
)
def test_extra_arguments_are_checked_before_anything_starts(make_config, words, says):
    with pytest.raises(RolaqError, match=says):
        check_arguments(make_config(args=words).server)


def test_supported_extra_arguments_pass(make_config):
    check_arguments(make_config(args=["--pp-size", "1", "--log-level", "warning"]).server)


def test_a_key_and_several_tokenizers_do_not_go_together(make_config, tmp_path):
    (tmp_path / "key").write_text("s3cret\n")
    words = ["--tokenizer-worker-num", "2"]
    check_arguments(make_config(args=words).server)
    with pytest.raises(RolaqError, match="one worker only"):
        check_arguments(make_config(args=words, api_key_file=str(tmp_path / "key")).server)


def test_what_sglang_is_started_with(make_config):
    cfg = make_config(memory_fraction=0.8, dp=2, prefix_cache=False, args=["--log-level", "warning"], slots=8)
    given = parse(arguments(cfg, cfg.settings(cfg.artifact_folder())))
    wanted = {
        "attention_backend": "rolaq",
        "page_size": "64",
        "max_running_requests": "8",
        "dtype": "bfloat16",
        "mem_fraction_static": "0.8",
        "dp_size": "2",
        "host": "127.0.0.1",
        "served_model_name": "tiny",
        "disable_radix_cache": True,
        "disable_prefill_cuda_graph": True,
        "enable_metrics": True,
        "log_level": "warning",
    }
    assert {key: vars(given)[key] for key in wanted} == wanted
    assert not hasattr(given, "context_length")
    assert given.model_path.endswith("testbed/tiny")


def test_the_environment_carries_settings_and_no_key(monkeypatch):
    monkeypatch.setenv("ROLAQ_API_KEY", "s3cret")
    settings = Settings(artifact="a", sink=0, recent=8)
    given = environment(settings)
    assert "s3cret" not in given.values()
    assert Settings.from_environment(given) == settings
    assert given["SGLANG_PLUGINS"] == "rolaq"
