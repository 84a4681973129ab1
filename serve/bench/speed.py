"""Capacity, decode throughput and time to the first token of one implementation after the other."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rolaq.common.errors import RolaqError, lookup, one_line
from rolaq.common.files import find, write_json
from rolaq.quant.protection import Protection
from rolaq.serve.bench.client import Client, connect
from rolaq.serve.bench.config import BenchConfig, Implementation
from rolaq.serve.bench.measure import capacity, decode, ttft, warm_up
from rolaq.serve.bench.models import dummy
from rolaq.serve.bench.probe import Probe
from rolaq.serve.bench.results import Row
from rolaq.serve.bench.server import Server, launched
from rolaq.serve.settings import Settings


def run(cfg: BenchConfig, parts: Sequence[str]) -> list[Row]:
    """Rows of the speed ``parts``; raises as `Speed.run` does."""
    return Speed(cfg, parts).run()


class Speed:
    """The speed parts of a run: the same model, memory fraction and slot limit for every implementation."""

    def __init__(self, cfg: BenchConfig, parts: Sequence[str]) -> None:
        self.cfg, self.parts = cfg, parts
        self.folder = Path(cfg.output)
        shape = cfg.model
        self.real = shape.path is not None
        if shape.path and shape.artifact:
            self.model, self.artifact = find(shape.path), find(shape.artifact)
        else:
            self.model, self.artifact = map(
                str, dummy(find(shape.config), self.folder / "model" / shape.name)
            )
        self.limit = cfg.ttft.limit_s
        self.rows: list[Row] = []

    def run(self) -> list[Row]:
        """Rows of all parts; an implementation that does not start is reported and left out.

        Raises:
            RolaqError: none of them started.
        """
        failed = []
        for name in self._order():
            implementation = lookup("implementation", name, self.cfg.implementations)
            for parts, more in self._starts(implementation):
                try:
                    self._measure(name, implementation, parts, more)
                except RolaqError as error:
                    failed.append(name)
                    print(f"{name}: {one_line(error)}", file=sys.stderr, flush=True)
        if not self.rows:
            raise RolaqError(f"none of {', '.join(failed)} could be measured: see the logs in {self.folder}")
        return self.rows

    def _order(self) -> list[str]:
        """The implementations, the one that others' bursts are held against first."""
        against = self.cfg.ttft.against
        return sorted(self.cfg.use, key=lambda name: name != against)

    def _starts(self, implementation: Implementation) -> list[tuple[list[str], dict[str, Any]]]:
        """The starts of the server that an implementation needs, each with its parts and arguments."""
        if not implementation.ttft_args or "ttft" not in self.parts:
            return [(list(self.parts), {})]
        rest = [part for part in self.parts if part != "ttft"]
        return [*([(rest, {})] if rest else []), (["ttft"], implementation.ttft_args)]

    def _measure(
        self, name: str, implementation: Implementation, parts: list[str], more: dict[str, Any]
    ) -> None:
        began = time.monotonic()
        with self._server(name, implementation, more) as server:
            print(f"{name}: up after {time.monotonic() - began:.0f} s", flush=True)
            if "capacity" in parts:
                self._add(name, capacity(server, self.cfg, implementation))
            asyncio.run(self._drive(name, server, parts))

    def _server(
        self, name: str, implementation: Implementation, more: dict[str, Any]
    ) -> AbstractContextManager[Server]:
        common, dummy_weights = self.cfg.server, {} if self.real else {"load_format": "dummy"}
        arguments = {
            "model_path": self.model, "skip_tokenizer_init": True, "dtype": "bfloat16", **dummy_weights,
            **server_arguments(self.cfg), **implementation.args, **more,
        }  # fmt: skip
        environment = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
        if implementation.budget:
            environment |= settings(self.artifact, implementation.budget, common.slots, common.sink_entries)
        return launched(
            arguments, self.folder / "logs" / f"{name}.log", environment, Probe(skip=True), common.start_s
        )

    async def _drive(self, name: str, server: Server, parts: list[str]) -> None:
        async with connect(server.url) as client:
            await warm_up(client)
            if "decode" in parts:
                self._add(name, await decode(client, self.cfg))
                await client.flush()
            if "ttft" in parts:
                self._add(name, await self._burst(name, client))

    async def _burst(self, name: str, client: Client) -> list[Row]:
        rows = await ttft(client, self.cfg, self.limit)
        if name == self.cfg.ttft.against:
            slowest = max(row["value"] for row in rows if row["figure"] == "ttft_p99")
            self.limit = min(self.limit, self.cfg.ttft.factor * slowest)
        return rows

    def _add(self, name: str, rows: list[Row]) -> None:
        common = {
            "impl": name, "budget": self.cfg.implementations[name].budget, "model": self.cfg.model.name, "slots": self.cfg.server.slots,
            "mem_fraction": self.cfg.server.mem_fraction, "weights": "real" if self.real else "dummy",
        }  # fmt: skip
        for row in rows:
            self.rows.append({**common, **row})
            print(f"{name}: {row['figure']} {_about(row)} {row['value']:.6g} {row['unit']}", flush=True)
        write_json(self.folder / "partial.json", self.rows)  # what a stopped run leaves


def _about(row: Row) -> str:
    where = (
        f"{row['requests']} × {row['input_tokens']}" if row.get("input_tokens") else row.get("budget") or ""
    )
    return f"{where} {row.get('bound', '')}".strip()


def server_arguments(cfg: BenchConfig) -> dict[str, Any]:
    """SGLang's arguments that are the same for every implementation."""
    common = cfg.server
    return {
        "mem_fraction_static": common.mem_fraction, "max_running_requests": common.slots,
        "chunked_prefill_size": common.chunk, "context_length": common.context,
        "cuda_graph_bs_decode": common.graph_batches, **common.args,
    }  # fmt: skip


def settings(artifact: str, budget: str, slots: int, sink_entries: int) -> dict[str, str]:
    """The environment that turns the plugin on."""
    protection = Protection.parse(budget)
    return Settings(
        artifact=artifact, sink=protection.sink, recent=protection.recent, slots=slots, sink_entries=sink_entries
    ).environment()  # fmt: skip
