"""OSCAR's rotation for MLA: R0 = Rcov · P · H (covariance basis, bit-reversed ranks, block Hadamard).

Follows OSCAR's public code for the shared latent: the covariance is uncentred and unweighted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rolaq.common.errors import RolaqError
from rolaq.quant.hadamard import block_hadamard

GAIN = 1.16


def bit_reversal(size: int) -> Tensor:
    """`[size]` int64 with each index's bits reversed; raises `RolaqError` unless size is a power of two."""
    bits = size.bit_length() - 1
    if size != 1 << bits:
        raise RolaqError(f"OSCAR's permutation needs a latent dimension that is a power of two, got {size}")
    index = torch.arange(size)
    return sum(((index >> b) & 1) << (bits - 1 - b) for b in range(bits)) + torch.zeros_like(index)


def oscar_rotation(sigma: Tensor, block: int = 128) -> Tensor:
    """R0 `[d, d]` fp32 from the latent's uncentred covariance `sigma [d, d]` fp64.

    The eigenvector of descending rank i becomes column bitrev(i), which deals the ranks round-robin
    over the groups; then each block is mixed by a Hadamard matrix. Products in fp64.
    """
    sigma = sigma.double()
    _, vectors = torch.linalg.eigh((sigma + sigma.T) / 2)
    descending = vectors.flip(-1)
    dealt = torch.empty_like(descending)
    dealt[:, bit_reversal(sigma.shape[-1]).to(sigma.device)] = descending
    return (dealt @ block_hadamard(sigma.shape[-1], block, torch.float64).to(sigma.device)).float()
