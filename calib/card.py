"""Model cards: the README.md that lies in each artifact."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rolaq.common.files import markdown_table
from rolaq.quant.artifact import Artifact

FIGURES = {
    "training": "Loss by step, and S on validation text.",
    "thresholds": "Threshold and gain by layer; dashed: OSCAR's.",
    "energy": "Cumulative energy of the key and value projections in the joint eigenbasis, mean and deviation over layers.",
    "attention_error": "Relative error of each layer's attention output on validation text.",
}


def oscar_card(artifact: Artifact) -> str:
    """Card of OSCAR's artifact: what it is and which text it was fitted on."""
    config = artifact.config
    return (
        f"# OSCAR rotations for {config.model.name}\n\n"
        f"One `[{config.model.latent_dim}, {config.model.latent_dim}]` rotation for each of "
        f"{config.model.layers} layers, from the covariance of the content latents of {config.tokens} tokens "
        f"({config.data['name']}, fingerprint `{config.data['fit']['fingerprint'][:12]}`). "
        f"Threshold {config.threshold[0]:.6f} and gain {config.gain[0]} in every layer. "
        "This is the baseline that S is measured against, and the start of RoLaQ's rotations.\n"
    )


def rolaq_card(artifact: Artifact, summary: Mapping[str, Any]) -> str:
    """Card of RoLaQ's artifact with its numbers and figures."""
    config = artifact.config
    bytes_now = config.spec.bytes_per_token(config.model.latent_dim, config.model.rope_dim)
    bytes_bf16 = 2 * (config.model.latent_dim + config.model.rope_dim)
    parts = [
        f"# RoLaQ: 2-bit KV cache of {config.model.name}"
        + (", with error feedback" if config.spec.feedback_block else ""),
        f"Rotation, threshold and gain for each of {config.model.layers} MLA layers "
        f"({config.model.architecture}, d = {config.model.latent_dim}). A token takes {bytes_now} bytes a layer "
        f"instead of {bytes_bf16}. Identity `{artifact.id}`; loading checks that it belongs to the model.",
        "## Selection",
        "KL to the unquantized model on held-out text (nats a position, all tokens quantized), and its ratio r to "
        "OSCAR's. S is the weighted mean of r, short sequences counting half.",
        markdown_table(_lengths(summary), ["tokens", "oscar_kl", "kl", "r"]),
        f"**S = {summary['S']:.4f}** at step {summary['best_step']} of {summary['steps']} "
        f"(before training: {summary['S_start']:.4f}).",
        "## Layers",
        markdown_table(_layers(summary), ["layer", "T", "g", "error_oscar", f"error_{config.method}"]),
        *(f"![{name}](figures/{name}.png)\n\n{text}" for name, text in FIGURES.items()),
        "## How it was made",
        markdown_table(_making(summary), ["", " "]),
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _lengths(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    lengths = sorted(int(key) for key in summary["oscar_kl"])
    return [
        {
            "tokens": n,
            "oscar_kl": summary["oscar_kl"][str(n)],
            "kl": summary[f"kl_{n}"],
            "r": summary[f"r_{n}"],
        }
        for n in lengths
    ]


def _layers(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    errors = summary["attention_error"]
    method = summary.get("method", "rolaq")
    columns = zip(summary["threshold"], summary["gain"], errors["oscar"], errors[method], strict=True)
    return [
        {"layer": i, "T": t, "g": g, "error_oscar": before, f"error_{method}": after}
        for i, (t, g, before, after) in enumerate(columns)
    ]


def _making(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    data, settings, memory = summary["data"], summary["settings"], summary["peak_memory"]
    values = {
        "seed": summary["seed"],
        "training tokens": summary["tokens"],
        "text": data["name"],
        **{
            f"fingerprint of {name} text": f"`{data[name]['fingerprint'][:16]}`"
            for name in ("fit", "train", "val")
        },
        **{key: str(settings[f"quant.{key}"]) for key in ("rotation", "threshold", "spec.gain_rule")},
        **{
            key: settings[f"calib.{key}"]
            for key in ("objective", "lr_rotation", "lr_threshold", "attention_weight")
        },
        **{
            key: settings[f"quant.feedback.{key}"]
            for key in ("sensitivity", "start", "centre")
            if f"quant.feedback.{key}" in settings
        },
        **{key: summary[key] for key in ("eps", "whitening") if key in summary},
        "lengths": ", ".join(map(str, settings["calib.lengths"])),
        "minutes": summary["minutes"],
        "tokens a second": summary["tokens_per_s"],
        f"peak memory, GB ({memory['kind']})": memory["gb"],
        "device": summary["environment"]["device"],
        "commit": summary["environment"]["commit"],
    }
    return [{"": name, " ": value} for name, value in values.items()]
