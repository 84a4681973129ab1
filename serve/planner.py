"""`python -m rolaq.serve.planner model=ds-v2-lite gpu_gb=141`: tokens that fit in BF16, FP8 and INT2, without a GPU.

Memory is counted as SGLang counts it: a fraction of a GPU for weights and cache, the rest for activations and
CUDA graphs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from omegaconf import DictConfig

from rolaq.common.cli import run_hydra
from rolaq.common.config import Geometry, resolve
from rolaq.common.errors import RolaqError
from rolaq.common.files import markdown_table, write_json
from rolaq.quant.spec import bf16_bytes_per_token
from rolaq.serve.config import PlanConfig, pool_settings
from rolaq.serve.shape import check_heads, geometry_of, weight_bytes
from rolaq.serve.sizing import Sizing

GIB = 2**30
# GiB between fraction x memory - weights and what the cache gets: CUDA's context, workspaces, the absorbed
# projections. On an H200 (140.4 GiB, fraction .8, DeepSeek-V2-Lite) SGLang 0.5.17 had 81.75 GiB for the cache.
OVERHEAD = 1.3


class Memory(NamedTuple):
    """One GPU, in GiB: total, the share for weights and cache, weights, overhead, and what the cache gets."""

    total: float
    static: float
    weights: float
    overhead: float
    cache: float


def default_fraction(total: float, tp: int) -> float:
    """SGLang 0.5.17's own memory fraction for a GPU of `total` GiB (`ServerArgs._handle_gpu_memory_settings`)."""
    small, larger = (24, 80) if total < 35 else (32, 160) if total < 60 else (256, 512)
    graphs = 8 if total < 20 else small if tp < 4 else larger
    chunk = 2048 if total < 35 else 4096 if total < 60 else 8192 if total < 160 else 16384
    reserved = 512 + 1.5 * chunk + tp / 8 * 1024 + 2 * (512 if total >= 160 else graphs)
    if total > 60:
        reserved = max(reserved, 10 * 1024)
    return round((total * 1024 - reserved) / (total * 1024), 3)


def memory(cfg: PlanConfig, weights: int) -> Memory:
    """How one GPU's memory is spent.

    Raises:
        RolaqError: the weights leave nothing for the cache.
    """
    fraction = cfg.server.memory_fraction or default_fraction(cfg.gpu_gb, cfg.server.tp)
    static, share = fraction * cfg.gpu_gb, weights / GIB / cfg.server.tp
    cache = static - share - OVERHEAD
    if cache <= 0:
        raise RolaqError(
            f"{cfg.model.name}'s weights take {share:.1f} GiB of a GPU, {static:.1f} are there for weights and "
            "cache: raise server.tp, gpu_gb or server.memory_fraction"
        )
    return Memory(cfg.gpu_gb, static, share, OVERHEAD, cache)


def rows(cfg: PlanConfig, shape: Geometry, spent: Memory) -> list[dict[str, Any]]:
    """Capacity of one copy of the model in each format."""
    s = pool_settings("", cfg.budget, cfg.server)
    d, d_r, available = shape.latent_dim, shape.rope_dim, int(spent.cache * GIB)
    packed = Sizing(
        shape.layers, d, d_r, s.slots, s.sink, s.recent, s.sink_entries, s.page_size, feedback=cfg.feedback
    )
    formats = {
        "BF16": (shape.layers * bf16_bytes_per_token(d, d_r), 0),
        "FP8": (shape.layers * (d + d_r), 0),
        f"INT2 {s.budget}": (packed.per_token, packed.fixed),
    }
    table, base = [], 0
    for name, (per_token, fixed) in formats.items():
        page = s.page_size * per_token
        tokens = max((available - fixed) // page - (not fixed), 0) * s.page_size  # SGLang adds a padding page
        base = base or tokens
        table.append(
            {
                "cache": name,
                "bytes_per_token": per_token,
                "fixed_gib": fixed / GIB,
                "tokens": tokens,
                "times_bf16": tokens / base if base else None,
                "requests": min(tokens // cfg.tokens, s.slots),
            }
        )
    return table


def plan(cfg: PlanConfig) -> dict[str, Any]:
    """The whole plan as plain values."""
    shape = geometry_of(cfg.model)
    check_heads(shape.heads, cfg.server.tp, cfg.model.name)
    weights = weight_bytes(cfg.model, shape.parameters)
    spent = memory(cfg, weights)
    return {
        "model": cfg.model.name,
        "tp": cfg.server.tp,
        "slots": cfg.server.slots,
        "request_tokens": cfg.tokens,
        "parameters": shape.parameters,
        "memory_gib": spent._asdict(),
        "caches": rows(cfg, shape, spent),
    }


def report(found: dict[str, Any]) -> str:
    """The plan as text."""
    m, tokens = found["memory_gib"], found["request_tokens"]
    columns = {
        "cache": "cache",
        "bytes_per_token": "bytes/token",
        "fixed_gib": "fixed GiB",
        "tokens": "tokens that fit",
        "times_bf16": "× BF16",
        "requests": f"requests of {tokens}",
    }
    return (
        f"{found['model']} on {found['tp']} GPU{'s' if found['tp'] > 1 else ''} of {m['total']:g} GiB: "
        f"{m['static']:.1f} for weights and cache\n"
        f"= {m['weights']:.1f} weights + {m['overhead']:.1f} context and workspaces + {m['cache']:.1f} cache, "
        f"on each GPU; at most {found['slots']} requests at once\n\n{markdown_table(found['caches'], columns)}"
    )


def run(raw: DictConfig) -> None:
    """Print the plan, and write it where `output` says."""
    cfg = resolve(raw, PlanConfig)
    found = plan(cfg)
    print(report(found))
    if cfg.output:
        print(f"wrote {write_json(cfg.output, found)}")


if __name__ == "__main__":
    run_hydra("plan", run)
