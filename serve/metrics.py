"""What a server tells about its packed cache: a block of SGLang's internal state, and gauges on /metrics."""

from __future__ import annotations

import contextlib
import importlib.metadata
import time
from typing import Any

INTERVAL = 5.0  # seconds between two counts for the gauges: a count waits for the GPU
# Numbers of the internal state that are gauges `rolaq_<key>` too.
GAUGES = {
    "bytes_per_token": "bytes of one unprotected token over all layers",
    "bytes_per_token_layer": "bytes of one unprotected token in one layer",
    "tokens": "tokens that fit into the packed pool",
    "pool_bytes": "bytes of packed rows, protected rows, tags and rotations",
    "fixed_bytes": "bytes of the pool that do not grow with its tokens",
    "sink": "first tokens of a sequence that stay BF16",
    "recent": "last tokens of a sequence that stay BF16",
    "sink_entries": "sequences whose first tokens can be kept in BF16 at once",
    "slots": "requests that can run at once",
    "page_size": "tokens of a page",
    "layers": "layers with a packed cache in this process",
    "folded_layers": "layers whose projections have the rotation folded in",
    "sink_entries_used": "sequences whose first tokens are kept in BF16 now",
    "protected_rows": "BF16 rows that can be held",
    "protected_rows_used": "BF16 rows that stand for a token now",
    "tokens_used": "tokens that running requests and the prefix cache hold now",
}


def describe(backend: Any, allocator: Any = None) -> dict[str, Any]:
    """The `rolaq` block of a scheduler's internal state, from its attention backend (`backend.RolaqBackend`).

    `allocator` is SGLang's of the pool's slots; without it the tokens in use are left out.
    """
    pool = backend.pool
    settings, sizing, config = pool.settings, pool.sizing, pool.artifact.config
    return {
        "pool": "packed",
        "artifact": pool.artifact.id,
        "method": config.method,
        "model": config.model.name,
        "version": _version(),
        "bytes_per_token": sizing.per_token,
        "bytes_per_token_layer": sizing.per_token_layer,
        "tokens": pool.size,
        "pool_bytes": pool.get_kv_size_bytes() + sum(layer.nbytes for layer in pool.layers),
        "fixed_bytes": sizing.fixed,
        "budget": settings.budget,
        "sink": settings.sink,
        "recent": settings.recent,
        "sink_entries": settings.sink_entries,
        "slots": settings.slots,
        "page_size": pool.page_size,
        "layers": pool.layer_num,
        "folded_layers": sum(bool(getattr(m, "rolaq_folded", False)) for m in backend.modules.values()),
        "prefill": backend.name,
        **live(pool, allocator),
    }


def _version() -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("rolaq")
    return "source"


def live(pool: Any, allocator: Any = None) -> dict[str, int]:
    """Counts of this moment."""
    windows = pool.windows
    used = windows.in_use()
    counts = {
        "sink_entries_used": -(-used["sinks"] // windows.sink) if windows.sink else 0,
        "protected_rows": windows.rows,
        "protected_rows_used": used["sinks"] + used["recent"],
    }
    if allocator is not None:
        counts["tokens_used"] = pool.size - allocator.available_size()
    return counts


class Gauges:
    """Gauges `rolaq_<key>` with the labels of SGLang's own, written by one scheduler process."""

    def __init__(self, labels: dict[str, Any]) -> None:
        # SGLang sets prometheus_client's multi-process folder before it is imported
        from prometheus_client import Gauge

        self._labels, self._next = labels, 0.0
        self._gauges = {
            key: Gauge(f"rolaq_{key}", text, labelnames=list(labels), multiprocess_mode="mostrecent")
            for key, text in GAUGES.items()
        }

    def due(self) -> bool:
        """Whether it is time to count again."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + INTERVAL
        return True

    def set(self, values: dict[str, Any]) -> None:
        """Write the gauges that have a value."""
        for key, gauge in self._gauges.items():
            if key in values:
                gauge.labels(**self._labels).set(values[key])
