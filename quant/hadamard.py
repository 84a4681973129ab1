"""Normalised Hadamard matrices (Sylvester order, no random signs; symmetric)."""

from __future__ import annotations

import torch
from scipy.linalg import block_diag
from scipy.linalg import hadamard as sylvester
from torch import Tensor

from rolaq.common.errors import RolaqError


def hadamard(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Orthonormal `[size, size]`; raises `RolaqError` unless size is a power of two."""
    if size < 1 or size & (size - 1):
        raise RolaqError(f"a Hadamard matrix needs a power of two, got {size}")
    return torch.from_numpy(sylvester(size, dtype=float) / size**0.5).to(dtype)


def block_hadamard(latent_dim: int, block: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Block-diagonal `[d, d]` of `d / block` Hadamard matrices (QuaRot's H_128, Eq. 11)."""
    if latent_dim % block:
        raise RolaqError(f"latent dimension {latent_dim} is not a multiple of the Hadamard block {block}")
    return torch.from_numpy(block_diag(*[hadamard(block, torch.float64).numpy()] * (latent_dim // block))).to(
        dtype
    )
