"""Two-bit codes in 16-bit words, in the order the attention kernel unpacks them.

A latent of d coordinates takes W = d / 8 little-endian 16-bit words. Bits 2j and 2j+1 of word w hold
the code of coordinate j * W + w (j = 0..7). So every bit plane j lies within one group of 128
(d = 512: group g is planes 2g and 2g+1; d = 256: planes 4g..4g+3), and one AND with `0x3 << 2j`
unpacks W coordinates that are neighbours in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

PLANES = 8


def pack_codes(codes: Tensor) -> Tensor:
    """Pack `codes [..., d]` uint8 in 0..3 into `[..., d / 4]` uint8, d a multiple of 8.

    Raises ValueError for another dtype or d; the value range is the caller's contract.
    """
    if codes.dtype != torch.uint8 or codes.shape[-1] % PLANES:
        raise ValueError(
            f"codes must be uint8 with a multiple of 8 values, got {codes.dtype} {tuple(codes.shape)}"
        )
    planes = codes.unflatten(-1, (PLANES, -1)).int()
    shifts = 2 * torch.arange(PLANES, dtype=torch.int32, device=codes.device).unsqueeze(-1)
    words = (planes << shifts).sum(-2)
    return torch.stack((words & 0xFF, words >> 8), -1).to(torch.uint8).flatten(-2)


def unpack_codes(packed: Tensor) -> Tensor:
    """Inverse of `pack_codes`: `[..., d / 4]` uint8 → codes `[..., d]` uint8."""
    low, high = packed.unflatten(-1, (-1, 2)).int().unbind(-1)
    words = (low | (high << 8)).unsqueeze(-2)
    shifts = 2 * torch.arange(PLANES, dtype=torch.int32, device=packed.device).unsqueeze(-1)
    return ((words >> shifts) & 0x3).to(torch.uint8).flatten(-2)
