"""`python -m rolaq.serve model=ds-v2-lite`: SGLang's OpenAI-compatible server on the packed INT2 cache."""

from __future__ import annotations

import signal
import sys
from typing import Any

from omegaconf import DictConfig

from rolaq.common.cli import run_hydra
from rolaq.common.config import resolve
from rolaq.common.errors import RolaqError
from rolaq.quant.artifact import Artifact
from rolaq.quant.spec import bf16_bytes_per_token
from rolaq.serve import identity
from rolaq.serve.arguments import check_arguments
from rolaq.serve.config import ServeConfig
from rolaq.serve.launch import Plan, check_machine, ended, running

GIB = 2**30


def plan(cfg: ServeConfig) -> tuple[Plan, str]:
    """What to start, after every check that needs no running server, and how the weights were checked.

    Raises:
        RolaqError: something that cannot be served; says what to do.
    """
    check_arguments(cfg.server)
    folder = cfg.artifact_folder()
    settings = cfg.settings(folder)
    artifact = Artifact.load(folder)
    config = identity.read_config(cfg.model)
    model = identity.identify(config, cfg.model)
    weights = identity.stored_fingerprint(cfg.model, model.layers)
    identity.verify(artifact, model, weights, str(folder))
    if (heads := config["num_attention_heads"]) % cfg.server.tp:
        raise RolaqError(
            f"server.tp={cfg.server.tp} does not divide the {heads} attention heads of {cfg.model.name}"
        )
    check_machine(cfg.server)
    return Plan(cfg, settings, artifact, config["vocab_size"]), "match" if weights else "not checked"


def table(ready: Plan, blocks: list[dict[str, Any]], weights: str, seconds: float) -> str:
    """What is served, in a few lines."""
    cfg, first, model = ready.cfg, blocks[0], ready.artifact.config.model
    bf16 = model.layers * bf16_bytes_per_token(model.latent_dim, model.rope_dim)
    tokens = " + ".join(f"{block['tokens']:,}" for block in blocks)
    rows = {
        "model": f"{cfg.model.name} (weights: {weights})",
        "artifact": f"{first['artifact']} ({first['method']})",
        "bytes per token": f"{first['bytes_per_token']:,} over {first['layers']} layers "
        f"({first['bytes_per_token_layer']} a layer); BF16 {bf16:,}, {bf16 / first['bytes_per_token']:.2f} ×",
        "tokens that fit": f"{tokens} ({first['pool_bytes'] / GIB:.2f} GiB, "
        f"{first['fixed_bytes'] / GIB:.2f} of them fixed)",
        "budget": f"{first['budget']} tokens in BF16; {first['slots']} requests, {first['sink_entries']} sinks",
        "prefill": first["prefill"],
        "API key": "needed" if cfg.server.api_key() else "none",
        "url": f"{cfg.server.url}/v1 (ready after {seconds:.0f} s; Ctrl-C stops)",
    }
    return "\n".join(f"{name:<16} {value}" for name, value in rows.items())


class _Stop(BaseException):
    """A signal asked this process to end."""


def _stop(number: int, frame: Any) -> None:
    raise _Stop(signal.Signals(number).name)


def run(raw: DictConfig) -> None:
    """One server, from its configuration to its end."""
    cfg = resolve(raw, ServeConfig)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    try:
        ready, weights = plan(cfg)
        print(f"artifact: {ready.settings.artifact} ({ready.artifact.id})")
        with running(ready) as (child, blocks, seconds):
            print(f"\n{table(ready, blocks, weights, seconds)}\n", flush=True)
            status = child.wait()
            assert status is not None
            raise ended(child, status)
    except _Stop as stop:
        print(f"stopped by {stop}: no process is left", file=sys.stderr)


if __name__ == "__main__":
    run_hydra("serve", run)
