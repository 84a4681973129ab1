"""Proof, through the running server, that every copy of the model uses the packed pool as it was asked to."""

from __future__ import annotations

from typing import Any

from rolaq.common.errors import RolaqError
from rolaq.quant.artifact import Artifact
from rolaq.serve.client import Client
from rolaq.serve.settings import PLUGIN, Settings
from rolaq.serve.sizing import Sizing

PROMPT, NEW = 80, 8  # tokens: more than a page and than any window, then a few decoded ones


def sizing_of(artifact: Artifact, settings: Settings) -> Sizing:
    """The bytes that the pool must report."""
    config, s = artifact.config, settings
    model = config.model
    return Sizing(
        model.layers, model.latent_dim, model.rope_dim, s.slots, s.sink, s.recent, s.sink_entries, s.page_size,
        config.spec, config.feedback,
    )  # fmt: skip


def expected(artifact: Artifact, settings: Settings) -> dict[str, Any]:
    """What every copy's internal state must say."""
    sizing, model = sizing_of(artifact, settings), artifact.config.model
    return {
        "pool": "packed",
        "artifact": artifact.id,
        "model": model.name,
        "layers": model.layers,
        "folded_layers": model.layers,
        "bytes_per_token_layer": sizing.per_token_layer,
        "bytes_per_token": sizing.per_token,
        "fixed_bytes": sizing.fixed,
        "budget": settings.budget,
        "sink_entries": settings.sink_entries,
        "slots": settings.slots,
        "page_size": settings.page_size,
        "missing_hooks": [],
    }


def check_states(info: dict[str, Any], wanted: dict[str, Any], copies: int) -> list[dict[str, Any]]:
    """The `rolaq` block of each copy, checked against `wanted`.

    Raises:
        RolaqError: a copy is missing, has no block (the plugin did not load), or another value somewhere.
    """
    states = info.get("internal_states") or []
    if len(states) != copies:
        raise RolaqError(
            f"the server has {len(states)} copies of the model, {copies} were asked for (server.dp)"
        )
    for number, state in enumerate(states):
        block, where = state.get(PLUGIN), f"copy {number} of the model" if copies > 1 else "the server"
        if not block:
            raise RolaqError(
                f"{where} does not use the packed cache: the plugin did not load, see the log above"
            )
        for key, value in wanted.items():
            if block.get(key) != value:
                raise RolaqError(f"{where} has {key}={block.get(key)!r}, {value!r} was asked for")
        _check_tokens(block, state, where)
    return [state[PLUGIN] for state in states]


def _check_tokens(block: dict[str, Any], state: dict[str, Any], where: str) -> None:
    """The pool's own count of tokens is SGLang's, and its bytes are that many tokens."""
    tokens, total = block.get("tokens", 0), block.get("fixed_bytes", 0)
    sglang = (state.get("memory_usage") or {}).get("token_capacity", tokens)
    if tokens <= 0 or tokens != sglang:
        raise RolaqError(f"{where} holds {tokens} tokens in the packed pool, SGLang counts {sglang}")
    if block.get("pool_bytes") != total + tokens * block["bytes_per_token"]:
        raise RolaqError(
            f"{where} takes {block.get('pool_bytes')} bytes for {tokens} tokens: not what was planned"
        )


def generate(client: Client, copies: int, vocabulary: int) -> None:
    """One tiny generation on each copy: a prompt longer than a page, then decoding.

    Raises:
        RolaqError: it fails or gives nothing.
    """
    prompt = [1 + i % min(97, vocabulary - 1) for i in range(PROMPT)]
    sampling = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
    for number in range(copies):
        body: dict[str, Any] = {"input_ids": prompt, "sampling_params": sampling}
        if copies > 1:
            body["routed_dp_rank"] = number
        answer = client.post("/generate", body)
        made = (answer.get("meta_info") or {}).get("completion_tokens") if isinstance(answer, dict) else None
        if made != NEW:
            raise RolaqError(f"a test generation gave {made} tokens in place of {NEW}, see the log above")


def check_written(blocks: list[dict[str, Any]]) -> None:
    """Raise `RolaqError` unless what was generated has left its protected rows in every copy's pool."""
    for number, block in enumerate(blocks):
        if block["sink"] + block["recent"] and not block["protected_rows_used"]:
            raise RolaqError(f"copy {number} of the model generated text without writing to the packed pool")


def check_key(client: Client) -> None:
    """Raise `RolaqError` when the server answers without the key."""
    status = client.status("/model_info", key=False)
    if status != 401:
        raise RolaqError(f"the server answers {status} to a request without the API key, 401 was expected")
