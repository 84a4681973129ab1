"""The artifact: what calibration writes, and evaluation and serving read.

A folder with `rolaq_config.json` (metadata, the whole spec, T and g per layer) and
`rolaq.safetensors` (`rotation [L, d, d]`, `threshold [L]`, `gain [L]`, all fp32; with error feedback,
format 2, those of `methods.shaped.ShapedMethod`), beside a model card and the calibration history.
Every load verifies it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from rolaq.common.errors import RolaqError
from rolaq.quant.metadata import FEEDBACK_METHOD, FORMAT_VERSIONS, ArtifactConfig, ModelIdentity
from rolaq.quant.methods.grouped import FourLevelMethod
from rolaq.quant.methods.shaped import ShapedMethod
from rolaq.quant.spec import QuantizerSpec
from rolaq.quant.verify import checksum, tensor_kinds, verify_checksum, verify_model, verify_tensors

CONFIG_NAME, TENSORS_NAME = "rolaq_config.json", "rolaq.safetensors"


class Artifact:
    """Tensors by name, on the CPU, and their metadata; all have rotation, threshold and gain."""

    def __init__(self, config: ArtifactConfig, **tensors: Tensor) -> None:
        self.config, self.tensors = config, tensors

    @property
    def rotation(self) -> Tensor:
        """R of each layer, `[L, d, d]` fp32, orthogonal.

        Raises `RolaqError` where errors are fed back: such a row is written and read through `method()`.
        """
        if self.config.method == FEEDBACK_METHOD:
            raise RolaqError(
                f"a {FEEDBACK_METHOD} artifact has no rotation to fold and write with: take its method()'s "
                "quantize, read_matrix and mean, or calibrate without quant=feedback"
            )
        return self.tensors["rotation"]

    @property
    def threshold(self) -> Tensor:
        """T of each layer, `[L]` fp32."""
        return self.tensors["threshold"]

    @property
    def gain(self) -> Tensor:
        """g of each layer, `[L]` fp32."""
        return self.tensors["gain"]

    @classmethod
    def create(
        cls, method: str, model: ModelIdentity, spec: QuantizerSpec, tensors: dict[str, Tensor], **about: Any
    ) -> Artifact:
        """A verified artifact from the method's `tensors`; `about` fills the metadata."""
        kinds = tensor_kinds(model, method)
        tensors = {
            name: tensors[name].detach().to("cpu", dtype).contiguous() for name, (_, dtype) in kinds.items()
        }
        config = ArtifactConfig(
            format_version=2 if method == FEEDBACK_METHOD else 1,
            method=method,
            spec=spec,
            model=model,
            threshold=tensors["threshold"].tolist(),
            gain=tensors["gain"].tolist(),
            tensors_sha256=hashlib.sha256(save(tensors)).hexdigest(),
            **about,
        )
        config = config.model_copy(update={"checksum": checksum(config)})
        verify_tensors(config, tensors, where=method)
        return cls(config, **tensors)

    @property
    def id(self) -> str:
        """Short identity: the first 12 digits of the tensors' SHA-256."""
        return self.config.tensors_sha256[:12]

    def method(self) -> FourLevelMethod | ShapedMethod:
        """The quantization method these tensors define."""
        if self.config.method == FEEDBACK_METHOD:
            return ShapedMethod(self.config.method, self.tensors, self.config.spec)
        return FourLevelMethod(self.config.method, self.rotation, self.threshold, self.gain, self.config.spec)

    def save(self, folder: str | os.PathLike[str], extra: dict[str, str | bytes] | None = None) -> Path:
        """Write the folder so that a reader sees the old artifact or the new one, never a mixture.

        `extra` maps further file names (README.md, history.jsonl, figures/x.png) to their content.
        Raises `RolaqError` when `folder` is there and holds something else than an artifact.
        """
        folder = Path(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        files: dict[str, str | bytes] = {
            CONFIG_NAME: self.config.model_dump_json(indent=2) + "\n",
            TENSORS_NAME: save(self.tensors),
        }
        staged = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            for name, content in {**(extra or {}), **files}.items():
                path = staged / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.encode() if isinstance(content, str) else content)
            staged.chmod(0o755)
            _swap(staged, folder)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
        return folder

    @classmethod
    def load(cls, folder: str | os.PathLike[str], model: ModelIdentity | None = None) -> Artifact:
        """Read and verify a folder; with `model`, also that it belongs to that model.

        Raises `RolaqError` for a missing or damaged file, another format, shapes that disagree,
        a rotation that is not orthogonal (or not undone by its inverse), thresholds out of bounds, a checksum that does not fit, or
        another model.
        """
        folder = Path(folder)
        config, tensors = _read_together(folder)
        verify_tensors(config, tensors, where=str(folder))
        verify_checksum(config, where=str(folder))
        if model is not None:
            verify_model(config.model, model, where=str(folder))
        return cls(config, **tensors)


def _refuse_foreign(folder: Path) -> None:
    """Never replace what is not an artifact: the folder is removed when the new one stands."""
    if not folder.exists() or (folder / CONFIG_NAME).is_file():
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise RolaqError(
            f"{folder} is there and holds no {CONFIG_NAME}: it would be replaced; choose another folder"
        )


def _read_together(folder: Path, attempts: int = 5) -> tuple[ArtifactConfig, dict[str, Tensor]]:
    """Config and tensors of one save: read again when another process replaced the folder meanwhile."""
    for left in reversed(range(attempts)):
        try:
            config = _read_config(folder / CONFIG_NAME)
            return config, _read_tensors(folder / TENSORS_NAME, config)
        except RolaqError:
            if not left or not folder.parent.is_dir():
                raise
            time.sleep(0.02)
    raise AssertionError("unreachable")


def _read_config(path: Path) -> ArtifactConfig:
    if not path.is_file():
        raise RolaqError(f"no artifact at {path.parent}: {path.name} is missing; run `make calibrate` first")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        version = raw.get("format_version") if isinstance(raw, dict) else None
        if version not in FORMAT_VERSIONS:
            known = " and ".join(map(str, FORMAT_VERSIONS))
            raise RolaqError(f"{path}: format_version is {version}, this release reads {known}")
        return ArtifactConfig.model_validate(raw)
    except (ValueError, RecursionError, OSError) as error:
        raise RolaqError(f"{path} is damaged: {_first_line(error)}; calibrate again") from error


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error).splitlines()[0]


def _read_tensors(path: Path, config: ArtifactConfig) -> dict[str, Tensor]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RolaqError(f"artifact {path.parent}: {path.name} cannot be read ({error.strerror})") from error
    digest = hashlib.sha256(data).hexdigest()
    if digest != config.tensors_sha256:
        raise RolaqError(
            f"{path} is damaged: tensors_sha256 is {digest[:12]}, {CONFIG_NAME} says {config.tensors_sha256[:12]}"
        )
    try:
        return load(data)
    except SafetensorError as error:
        raise RolaqError(f"{path} is damaged: {_first_line(error)}") from error


def _swap(staged: Path, folder: Path) -> None:
    """Put `staged` in `folder`'s place; the old folder is removed only after the new one stands."""
    lock = os.open(folder.parent, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two savers take turns
        _refuse_foreign(folder)
        retired = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
        if folder.exists():
            folder.rename(retired / folder.name)
        staged.rename(folder)
        shutil.rmtree(retired, ignore_errors=True)
    finally:
        os.close(lock)
