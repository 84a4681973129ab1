"""What a calibration leaves behind: two artifacts, history and summary in JSON, figures, tracking."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rolaq.calib.card import oscar_card, rolaq_card
from rolaq.calib.checkpoint import RunState
from rolaq.calib.machine import peak_memory
from rolaq.calib.report import draw
from rolaq.calib.session import Session
from rolaq.calib.shaped import ShapedParameters
from rolaq.calib.student import Parameters, StudentMethod
from rolaq.common.errors import RolaqError
from rolaq.common.files import atomic_write, environment, markdown_table, read_json, write_json
from rolaq.common.tracking import Tracker
from rolaq.quant.artifact import Artifact
from rolaq.quant.geometry import cumulative_energy, energies
from rolaq.quant.oscar import GAIN


def write_oscar(session: Session, rotation: Tensor, track: Tracker) -> StudentMethod:
    """Save OSCAR's artifact for R0 `rotation [L, d, d]`; returns OSCAR as a method on its device."""
    spec = session.settings.quant.spec.model_copy(update={"gain_rule": "fixed", "feedback_block": 0})
    threshold = torch.full(rotation.shape[:1], spec.threshold_init, device=rotation.device)
    parameters = Parameters(rotation, threshold, torch.full_like(threshold, GAIN))
    data = {key: session.data.about[key] for key in ("name", "fit")}
    artifact = Artifact.create(
        "oscar",
        session.model_identity,
        spec,
        parameters._asdict(),
        data=data,
        tokens=session.data.fit.numel(),
        environment=environment(),
    )
    folder = artifact.save(session.folder / "oscar", {"README.md": oscar_card(artifact)})
    track.artifact(f"{session.model_identity.name}-oscar", "kv-quantizer", folder)
    method = StudentMethod(parameters, spec)
    method.name = "oscar"
    return method


def write_results(
    session: Session,
    state: RunState,
    parameters: Parameters | ShapedParameters,
    errors: Mapping[str, list[float]],
    track: Tracker,
) -> None:
    """Save history, summary, figures and RoLaQ's artifact with its card, and hand all to `track`.

    errors: relative attention-output error per layer, by method.
    """
    summary = summarise(session, state, parameters, errors)
    figures = draw(session.work / "figures", state.history, summary, _energy(session))
    history = "".join(json.dumps(entry, allow_nan=False) + "\n" for entry in state.history)
    with atomic_write(session.work / "history.jsonl") as temporary:
        temporary.write_text(history, encoding="utf-8")
    artifact = Artifact.create(
        session.method,
        session.model_identity,
        session.settings.quant.spec,
        parameters._asdict(),
        data=summary["data"],
        tokens=summary["tokens"],
        seed=summary["seed"],
        selection=selection(summary),
        environment=summary["environment"],
    )
    summary["artifact"] = artifact.id
    extra: dict[str, str | bytes] = {"README.md": rolaq_card(artifact, summary), "history.jsonl": history}
    extra |= {f"figures/{path.name}": path.read_bytes() for path in figures}
    folder = artifact.save(session.folder / session.method, extra)
    write_json(session.work / "summary.json", summary)
    track.table("layers", layer_rows(summary))
    for path in figures:
        track.figure(path.stem, path)
    track.artifact(f"{session.model_identity.name}-{session.method}", "kv-quantizer", folder)


def summarise(
    session: Session,
    state: RunState,
    parameters: Parameters | ShapedParameters,
    errors: Mapping[str, list[float]],
) -> dict[str, Any]:
    """All numbers of a run: S and parts, T and g by layer, memory, throughput, data."""
    validations = [entry for entry in state.history if entry["kind"] == "validation"]
    best = min(validations, key=lambda entry: entry["S"])
    tokens = state.step * session.config.tokens_per_step
    return {
        "model": session.model_identity.name,
        "method": session.method,
        "seed": session.settings.seed,
        **{key: value for key, value in best.items() if key not in ("kind", "step")},
        "S_start": validations[0]["S"],
        **_chosen(state),
        "oscar_kl": {str(length): kl for length, kl in state.reference.items()},
        "steps": state.step,
        "best_step": best["step"],
        "tokens": tokens,
        "threshold": parameters.threshold.tolist(),
        "gain": parameters.gain.tolist(),
        "attention_error": dict(errors),
        "minutes": state.minutes,
        "training_seconds": state.seconds,
        "tokens_per_s": tokens / state.seconds,
        "peak_memory": peak_memory(session.device),
        "data": session.data.about,
        "settings": state.identity,
        "environment": environment(),
    }


def _chosen(state: RunState) -> dict[str, Any]:
    """The regulariser and whitening that error feedback started from."""
    tried = [entry for entry in state.history if entry["kind"] == "basis"]
    best = min(tried, key=lambda entry: entry["kl"], default={})
    return {key: best[key] for key in ("eps", "whitening") if key in best}


def selection(summary: Mapping[str, Any]) -> dict[str, Any]:
    """S and its parts, as the artifact stores them."""
    chosen = ("S", "S_start", "steps", "best_step", "eps", "whitening")
    return {key: value for key, value in summary.items() if key in chosen or key.startswith(("r_", "kl_"))}


def layer_rows(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per layer: T, g, attention-output error of each method."""
    columns = {"T": summary["threshold"], "g": summary["gain"]}
    columns |= {f"error_{name}": values for name, values in summary["attention_error"].items()}
    return [
        {"layer": i, **{name: column[i] for name, column in columns.items()}}
        for i in range(len(columns["T"]))
    ]


def _energy(session: Session) -> Tensor:
    """Cumulative K and V energy by rank of every layer, `[L, 2, d]` (Figure 7)."""
    pairs = [cumulative_energy(h_k, h_v) for h_k, h_v in energies(session.layers)]
    return torch.stack([torch.stack(pair) for pair in pairs])


def finished(session: Session, state: RunState) -> bool:
    """Whether this very run is complete on disk, its artifact intact."""
    try:
        summary = read_json(session.work / "summary.json")
        artifact = Artifact.load(session.folder / session.method, session.model_identity)
        Artifact.load(session.folder / "oscar", session.model_identity)
    except RolaqError:
        return False
    return state.step == session.config.steps and summary.get("artifact") == artifact.id


def print_summary(session: Session) -> None:
    """The table and paths that a calibration ends with."""
    summary = read_json(session.work / "summary.json")
    lengths = sorted(int(key) for key in summary["oscar_kl"])
    rows = [
        {"method": "oscar", "S": 1.0, **{f"kl_{n}": summary["oscar_kl"][str(n)] for n in lengths}},
        {
            "method": session.method,
            **{key: summary[key] for key in summary if key == "S" or key.startswith(("r_", "kl_"))},
        },
    ]
    rows[0] |= {f"r_{n}": 1.0 for n in lengths}
    columns = ["method", "S", *(f"r_{n}" for n in lengths), *(f"kl_{n}" for n in lengths)]
    print("\n" + markdown_table(rows, columns))
    print(markdown_table(layer_rows(summary), list(layer_rows(summary)[0])))
    memory = summary["peak_memory"]
    print(
        f"best step {summary['best_step']} of {summary['steps']}; {summary['tokens']} tokens in "
        f"{summary['minutes']:.1f} min, {summary['tokens_per_s']:.0f} tokens/s in training; "
        f"peak memory {memory['gb']:.2f} GB ({memory['kind']}); "
        f"training text {summary['data']['train']['fingerprint'][:12]}"
    )
    for path in (session.folder / "oscar", session.folder / session.method):
        print(f"wrote {path}")
    for name in ("summary.json", "history.jsonl"):
        print(f"wrote {session.work / name}")
