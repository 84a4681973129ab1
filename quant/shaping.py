"""Where rounding errors go: sensitivity, its block factor, and the basis in which all of it is equally small.

A layer's sensitivity M `[d, d]` says what an error e of its latent costs, `e M e^T`. Everything is
fp64 and batched over layers, `[..., d, d]`; derivations are in the folder's README.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rolaq.common.errors import RolaqError
from rolaq.quant.hadamard import hadamard

FLOOR = 1e-3  # of the largest variance: directions that hardly vary are not blown up further


def regularise(sensitivity: Tensor, eps: float) -> Tensor:
    """`M d / tr(M) + eps I`, symmetrised: eps bounds how much error insensitive directions are given."""
    scaled = sensitivity.double() / sensitivity.double().diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    eye = torch.eye(scaled.shape[-1], dtype=scaled.dtype, device=scaled.device)
    return (scaled + scaled.mT) / 2 + eps * eye


def upper_factor(sensitivity: Tensor) -> Tensor:
    """C upper triangular with `M = C C^T`: the Cholesky factor of the order-reversed matrix.

    Raises `RolaqError` when M is not positive definite.
    """
    try:
        return torch.linalg.cholesky(sensitivity.double().flip(-2, -1)).flip(-2, -1)
    except torch.linalg.LinAlgError as error:
        raise RolaqError("the sensitivity is not positive definite: use a larger eps") from error


def block_factor(sensitivity: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """U and D with `M = (I + U) D (I + U)^T`: U strictly block upper triangular, D block diagonal.

    `e M e^T = sum over blocks of f_B D_B f_B^T` with `f = e (I + U)`. With `block` 1 it is the LDL^T
    that GPTQ and LDLQ use.
    """
    factor = upper_factor(sensitivity)
    inside = factor * _same_block(factor, block)
    eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    return torch.linalg.solve_triangular(inside, factor, upper=True, left=False) - eye, inside @ inside.mT


def feedback_matrix(sensitivity: Tensor, block: int) -> Tensor:
    """`V = I - (I + U)^{-1}` `[..., d, d]` fp64: what coordinate k subtracts is `sum over earlier j of f_j V_jk`."""
    factor = upper_factor(sensitivity)
    inside = factor * _same_block(factor, block)
    eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    return (eye - torch.linalg.solve_triangular(factor, inside, upper=True, left=False)) * ~_same_block(
        factor, block
    )


def shaping_ratio(sensitivity: Tensor, block: int) -> Tensor:
    """`tr D / tr M` `[...]`: expected damage with feedback relative to nearest rounding's."""
    factor = upper_factor(sensitivity)
    inside = factor * _same_block(factor, block)
    return inside.square().sum((-2, -1)) / factor.square().sum((-2, -1))


def _same_block(like: Tensor, block: int) -> Tensor:
    """`[d, d]` bool: row and column in one block; raises `RolaqError` where blocks do not fit."""
    if block < 1 or like.shape[-1] % block:
        raise RolaqError(f"a feedback block of {block} does not divide the latent's {like.shape[-1]}")
    index = torch.arange(like.shape[-1], device=like.device) // block
    return index[:, None] == index


def whitening(covariance: Tensor, power: float) -> tuple[Tensor, Tensor]:
    """`A = Sigma^{-power/2}` and its inverse, symmetric `[..., d, d]` fp64, for a centred covariance.

    power 0 leaves the latent as it is, 1 gives every direction the same variance. Variances below
    `FLOOR` of the largest count as that.
    """
    values, vectors = torch.linalg.eigh((covariance + covariance.mT).double() / 2)
    root = (values / values[..., -1:]).clamp_min(FLOOR) ** (power / 2)
    return (vectors / root[..., None, :]) @ vectors.mT, (vectors * root[..., None, :]) @ vectors.mT


def equalising_rotation(sensitivity: Tensor, block: int) -> Tensor:
    """R `[d, d]` fp64 orthogonal in whose basis the block factor's D is nearly `det(M)^{1/d} I`.

    The trace of D can be no smaller than `d det(M)^{1/d}`; this rotation reaches it (geometric mean
    decomposition, Jiang, Hager & Li 2005), block by block and with D diagonal inside a block, where
    rounding to nearest loses nothing then. Hadamard matrices mix the coordinates of each block.
    """
    values, vectors = torch.linalg.eigh((sensitivity + sensitivity.mT).double() / 2)
    mean = values.log().mean().exp()
    blocks = []
    while len(values) > block:
        order = values.argsort(descending=True)
        values, vectors = values[order], vectors[:, order]
        high, low = _partners(values, mean, block)
        taken, values, vectors = _pair(values, vectors, high, low, mean)
        blocks.append(taken)
    mix = hadamard(block, torch.float64).to(vectors.device)
    return torch.cat([part @ mix for part in (vectors, *reversed(blocks))], 1)


def _partners(values: Tensor, mean: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`count` directions above the mean and as many below it, spread over both; values are descending."""
    above = int((values >= mean).sum())
    below, index = len(values) - above, torch.arange(count, device=values.device)
    if min(above, below) < count:  # as far apart as possible
        return index, len(values) - 1 - index
    return index * above // count, len(values) - 1 - index * below // count


def _pair(
    values: Tensor, vectors: Tensor, high: Tensor, low: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate each pair so that one direction has sensitivity `mean`; what is left has the pair's product over it.

    Returns the directions taken `[n, count]`, and values and vectors of all that remain.
    """
    large, small = values[high], values[low]
    cosine2 = ((mean - small) / (large - small).clamp_min(1e-300)).clamp(0, 1)
    cosine, sine = cosine2.sqrt(), (1 - cosine2).sqrt()
    taken = vectors[:, high] * cosine + vectors[:, low] * sine
    left = vectors[:, low] * cosine - vectors[:, high] * sine
    rest = torch.ones(len(values), dtype=torch.bool, device=values.device)
    rest[high] = rest[low] = False
    remaining = large * small / (large * cosine2 + small * (1 - cosine2))
    return taken, torch.cat((remaining, values[rest])), torch.cat((left, vectors[:, rest]), 1)
