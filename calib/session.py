"""What a calibration works on: the frozen model, its MLA layers, the text, and the folders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rolaq.calib.capture import check_head, output_head
from rolaq.calib.checkpoint import flatten
from rolaq.calib.config import CalibConfig, CalibrateConfig
from rolaq.calib.data import CalibrationData, prepare
from rolaq.calib.losses import Head
from rolaq.common.models import load_model
from rolaq.quant.adapters.layers import MLALayer, find_mla_layers
from rolaq.quant.identity import model_identity, parameters_fingerprint
from rolaq.quant.metadata import ModelIdentity

NOT_IN_IDENTITY = ("calib.checkpointing",)  # changes memory, not results


@dataclass
class Session:
    """A loaded model with everything that calibrating it needs; `config` has its lengths filled in."""

    settings: CalibrateConfig
    config: CalibConfig
    model: PreTrainedModel
    layers: list[MLALayer]
    model_identity: ModelIdentity
    head: Head
    data: CalibrationData

    @property
    def device(self) -> torch.device:
        """Where token ids go."""
        return self.model.get_input_embeddings().weight.device

    @property
    def folder(self) -> Path:
        """Results: `oscar/` and the method's folder (artifacts), and `work`."""
        return Path(self.settings.folder)

    @property
    def work(self) -> Path:
        """State, history and summary: `calibration/`, or `calibration-feedback/` beside it."""
        return self.folder / self.method.replace("rolaq", "calibration")

    @property
    def method(self) -> str:
        """Name of the method that is calibrated: `rolaq` or `rolaq-feedback`."""
        return self.settings.quant.method

    def identity(self) -> dict[str, Any]:
        """Flat settings that determine the result; two runs may be mixed only when these agree."""
        flat = flatten(
            {
                "calib": self.config.model_dump(),
                "quant": self.settings.quant.model_dump(),
                "seed": self.settings.seed,
                "model": {
                    "name": self.model_identity.name,
                    "weights": self.model_identity.weights,
                    "parameters": parameters_fingerprint(self.model),
                    "dtype": str(self.model.dtype).removeprefix("torch."),
                    "device": self.device.type,
                },
                "data": {
                    **{name: self.data.about[name]["fingerprint"] for name in ("fit", "train", "val")},
                    "tokens": self.data.tokens_digest(),
                },
            }
        )
        return {key: value for key, value in flat.items() if key not in NOT_IN_IDENTITY}


def open_session(settings: CalibrateConfig) -> Session:
    """Check the settings, load model and text.

    Raises `RolaqError` for every mistake that can be told before calibration starts.
    """
    settings.quant.check()
    model, tokenizer = load_model(settings.model)
    layers = find_mla_layers(model)
    identity = model_identity(layers, model.config, settings.model.name, settings.model.revision)
    settings.quant.spec.check(identity.latent_dim, settings.model.name)
    context = settings.model.context or model.config.max_position_embeddings
    config = settings.calib.for_context(context)
    data = prepare(settings.data, tokenizer, config, settings.seed)
    session = Session(settings, config, model, layers, identity, output_head(model), data)
    check_head(model, data.fit[:1, :32].to(session.device))
    return session
