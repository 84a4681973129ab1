"""What the bench does inside SGLang's scheduler processes; the server is otherwise as installed.

- Requests whose id starts with `SKIP` are prefilled without attention: the latents are written, the attention
  output is zero. That reaches long contexts quickly, in the same way for every cache and backend.
- `logits`: each forward's last-position logits go to a file, with the request and the tokens it covered.
- `codes`: after each write to the packed pool, the stored rows are compared with the reference quantizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

SKIP = "skip-"


@dataclass(frozen=True)
class Probe:
    """What to do; paths are without the rank that is appended to them."""

    skip: bool = False
    logits: str | None = None
    codes: str | None = None

    def text(self) -> str:
        """As one command line argument."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Probe:
        """The inverse of `text`."""
        return cls(**json.loads(text))

    def at_rank(self, rank: int) -> Probe:
        """With the files of one tensor-parallel rank."""
        logits, codes = (path and f"{path}.{rank}" for path in (self.logits, self.codes))
        return replace(self, logits=logits, codes=codes)


def run_scheduler(
    probe: Probe, server_args: Any, port_args: Any, gpu_id: int, tp_rank: int, *rest: Any
) -> None:
    """SGLang's scheduler process, probed. The plugins load first, so that the probe sees what they leave."""
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.plugins import load_plugins

    load_plugins()
    install(probe.at_rank(tp_rank))
    run_scheduler_process(server_args, port_args, gpu_id, tp_rank, *rest)


def install(probe: Probe) -> None:
    """Put the probe's parts in place, in this process."""
    if probe.skip:
        skip_attention()
    if probe.logits:
        record_logits(Path(probe.logits))
    if probe.codes:
        from rolaq.serve.bench.codes import compare_codes

        compare_codes(Path(probe.codes))


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by ``wrapper(original, …)``."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))


def skipped(batch: Any) -> bool:
    """Whether a forward is a prefill of nothing but requests that skip attention."""
    return bool(batch.rids) and batch.forward_mode.is_extend() and all(r.startswith(SKIP) for r in batch.rids)


def skip_attention() -> None:
    """Let prefills of `SKIP` requests write their latents and attend to nothing.

    They take the expanded (MHA) path, which stores latents before attention and apart from it.
    """
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_context import get_attn_backend, get_token_to_kv_pool
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    def handler(original: Callable[..., Any], name: str) -> Callable[..., Any]:
        usual = original(name)
        return lambda attn, batch: AttnForwardMethod.MHA if skipped(batch) else usual(attn, batch)

    def forward(
        original: Callable[..., Any], layer: Any, q: Any, k: Any, v: Any, batch: Any, *args: Any, **more: Any
    ):
        if not skipped(batch):
            return original(layer, q, k, v, batch, *args, **more)
        pool = get_token_to_kv_pool()
        if getattr(
            pool, "pending", None
        ):  # the packed pool holds latents back until the backend has attended
            pool.flush(layer.layer_id, get_attn_backend().chunk.exact_row)
        return q.new_zeros(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)

    wrap(AttentionBackendRegistry, "get_handler", handler)
    wrap(RadixAttention, "forward", forward)


def record_logits(path: Path) -> None:
    """Append every forward's logits to ``path`` (fp32 rows) and what they belong to to ``path.jsonl``.

    A line names the request, ``start`` and ``end`` of the tokens this forward computed, and the row.
    """
    from sglang.srt.model_executor.model_runner import ModelRunner

    path.parent.mkdir(parents=True, exist_ok=True)
    rows, index, written = path.open("wb"), path.with_name(path.name + ".jsonl").open("w"), [0]

    def sample(original: Callable[..., Any], runner: Any, output: Any, batch: Any) -> Any:
        logits = output.next_token_logits
        if batch.rids and logits is not None:
            rows.write(logits[: len(batch.rids)].float().cpu().numpy().tobytes())
            for rid, start, end in spans(batch):
                line = {"rid": rid, "start": start, "end": end, "row": written[0], "width": logits.shape[-1]}
                index.write(json.dumps(line) + "\n")
                written[0] += 1
            rows.flush()
            index.flush()
        return original(runner, output, batch)

    wrap(ModelRunner, "sample", sample)


def spans(batch: Any) -> list[tuple[str, int, int]]:
    """(request, start, end) of the tokens that a forward computes for each of its requests."""
    ends = batch.seq_lens[: len(batch.rids)].tolist()
    if batch.forward_mode.is_decode():
        starts = [end - 1 for end in ends]
    else:
        starts = [end - length for end, length in zip(ends, batch.extend_seq_lens_cpu, strict=False)]
    return list(zip(batch.rids, starts, ends, strict=True))
