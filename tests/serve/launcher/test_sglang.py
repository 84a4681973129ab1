"""Against the installed SGLang: options, hooks and answers that this package names are there."""

import argparse
import pkgutil
from types import SimpleNamespace

import pytest

from rolaq.common.errors import RolaqError
from rolaq.serve import watch
from rolaq.serve.arguments import OURS, arguments
from rolaq.serve.refusals import OFF, ONE, ONLY, option, parse, refuse
from rolaq.serve.settings import Settings

pytest.importorskip("sglang")
# since 0.5.18 to 0.5.23
LATER = {
    "attn_dp_size",
    "enable_kv_cache_sharding",
    "enable_nvidia_megakernel",
    "enable_pd_role_switch",
    "enable_unified_cache_external_linker",
    "startup_weight_load_mode",
}


@pytest.fixture(scope="module")
def parser():
    from sglang.srt.server_args import ServerArgs, add_attention_backend_choices

    add_attention_backend_choices(["rolaq"])
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


@pytest.fixture(scope="module")
def defaults(parser):
    """What SGLang's own command line says when it says nothing."""
    return vars(parser.parse_args(["--model-path", "m"]))


def test_every_refused_option_exists(defaults):
    """A renamed option would no longer be refused."""
    assert {*OFF, *ONE, *ONLY} - LATER <= set(defaults)


def test_sglangs_defaults_are_not_refused(defaults):
    refuse(SimpleNamespace(**{**defaults, "attention_backend": "rolaq"}))


def test_sglang_takes_the_arguments(parser, make_config):
    cfg = make_config(
        tp=2, dp=2, memory_fraction=0.7, context=1024, chunked_prefill=512, prefix_cache=False,
        model={"trust_remote_code": True, "revision": "main"}, args=["--cuda-graph-max-bs-decode", "16"],
    )  # fmt: skip
    settings = cfg.settings(cfg.artifact_folder())
    given = parser.parse_args(arguments(cfg, settings))
    refuse(given, settings)
    found = {field: getattr(given, field) for field in ("tp_size", "dp_size", "page_size", "context_length")}
    assert found == {"tp_size": 2, "dp_size": 2, "page_size": 64, "context_length": 1024}
    assert given.disable_radix_cache and given.disable_prefill_cuda_graph and given.enable_metrics
    assert given.host == "127.0.0.1"


def test_the_settings_that_replace_options_are_of_real_options(parser):
    known = {word for action in parser._actions for word in action.option_strings}
    short = {"tp", "dp"}  # SGLang takes any unambiguous beginning
    assert {option(field) for field in OURS if field not in short} <= known


@pytest.mark.parametrize(
    "words",
    [
        ["--enable-hierarchical-cache"],
        ["--speculative-algorithm", "EAGLE"],
        ["--kv-cache-dtype", "fp8_e4m3"],
        ["--disaggregation-mode", "decode"],
        ["--pp-size", "2"],
        ["--enable-two-batch-overlap"],
        ["--enable-deterministic-inference"],
        ["--lora-paths", "a=b"],
    ],
)
def test_sglangs_reading_of_a_refused_option_is_refused_as_ours(parser, words):
    given = parser.parse_args(["--model-path", "m", "--attention-backend", "rolaq", *words])
    with pytest.raises(RolaqError) as theirs:
        refuse(given)
    ours = parse(words)
    if hasattr(ours, "pp_size"):
        ours.pp_size = int(ours.pp_size)
    with pytest.raises(RolaqError) as early:
        refuse(ours)
    assert str(theirs.value) == str(early.value)


def test_hooks_have_their_places():
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.reset()
    try:
        watch.hook(Settings(artifact="a"))
        targets = set(HookRegistry._hooks)
        assert {f"{watch.UPDATER}.{name}" for name in watch.UPDATES} < targets
        assert watch.missing_hooks() == sorted(targets)  # nothing is applied yet
        for target in targets:
            owner, _, name = target.rpartition(".")
            assert callable(getattr(pkgutil.resolve_name(owner), name))
    finally:
        HookRegistry.reset()


@pytest.mark.parametrize("name", sorted(watch.UPDATES))
def test_weight_updates_are_answered_with_a_refusal(name):
    answer = watch._unchanged(watch.UPDATES[name])(None, SimpleNamespace())
    assert answer.success is False
    assert "may not change after the rotation is folded" in answer.message
