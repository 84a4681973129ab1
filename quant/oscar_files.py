"""OSCAR's own format for rotations: a folder of `layer_<i>.pt`, each a bare fp32 `[d, d]` tensor."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from rolaq.common.errors import RolaqError

PATTERN = re.compile(r"layer_(\d+)\.pt")


def import_rotations(folder: str | Path) -> Tensor:
    """Read `[L, d, d]` fp32; raises `RolaqError` on gaps, unequal shapes or unreadable files.

    Files are loaded as weights only: nothing in them is executed.
    """
    found = {
        int(m[1]): path for path in Path(folder).glob("layer_*.pt") if (m := PATTERN.fullmatch(path.name))
    }
    if sorted(found) != list(range(len(found))) or not found:
        raise RolaqError(
            f"{folder} must hold layer_0.pt, layer_1.pt, … without gaps; found layers {sorted(found)}"
        )
    tensors = [_read(found[i]) for i in range(len(found))]
    shapes = {tuple(t.shape) for t in tensors}
    if len(shapes) != 1 or len(shape := shapes.pop()) != 2 or shape[0] != shape[1]:
        raise RolaqError(
            f"{folder}: every layer must be one square matrix of the same size, found {shapes or shape}"
        )
    return torch.stack(tensors)


def export_rotations(rotation: Tensor, folder: str | Path) -> None:
    """Write `rotation [L, d, d]` as OSCAR's `layer_<i>.pt` files."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for layer, matrix in enumerate(rotation.float().cpu()):
        torch.save(matrix.clone(), Path(folder) / f"layer_{layer}.pt")


def _read(path: Path) -> Tensor:
    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise RolaqError(f"{path} cannot be read as a tensor: {str(error).splitlines()[0]}") from error
    if not isinstance(value, Tensor):
        raise RolaqError(f"{path} holds a {type(value).__name__}, expected a bare tensor")
    return value.float()
