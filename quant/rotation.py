"""Learnable orthogonal rotations, all starting at R0 (paper §3.1, App. B.2).

Parameters and results are batched over layers: base R0 `[L, d, d]`, generators `[L, d/2, d/2]` per
subspace or `[L, d, d]`, `forward() -> R [L, d, d]`, all fp32.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from rolaq.common.errors import lookup


def skew(generator: Tensor) -> Tensor:
    """`A - A^T` over the last two dimensions."""
    return generator - generator.mT


class Rotation(nn.Module):
    """A rotation per layer; subclasses turn generators (zero at the start) into `R`."""

    base: Tensor

    def __init__(self, base: Tensor) -> None:
        super().__init__()
        self.register_buffer("base", base.float())

    def forward(self) -> Tensor:
        """R `[L, d, d]` fp32; the base itself when nothing is learned."""
        return self.base

    @torch.no_grad()
    def export(self) -> Tensor:
        """R `[L, d, d]` fp32 computed in fp64, so that it is orthogonal to fp32 rounding."""
        return copy.deepcopy(self).double()().float()


class SubspaceRotation(Rotation):
    """`R0 U diag(e^{S1}, e^{S2}) U^T`, `S_i = A_i - A_i^T` (Eq. 4): `d^2 / 2` parameters a layer.

    `basis` U is `[L, d, d]` orthogonal; its first d/2 columns are the first subspace.
    """

    basis: Tensor

    def __init__(self, base: Tensor, basis: Tensor) -> None:
        super().__init__(base)
        self.register_buffer("basis", basis.float())
        layers, dim, _ = base.shape
        self.generators = nn.Parameter(torch.zeros(layers, 2, dim // 2, dim // 2, device=base.device))

    def forward(self) -> Tensor:
        """R `[L, d, d]` fp32."""
        first, second = torch.linalg.matrix_exp(skew(self.generators)).unbind(1)
        half = first.shape[-1]
        mixed = torch.cat((self.basis[..., :half] @ first, self.basis[..., half:] @ second), -1)
        return self.base @ (mixed @ self.basis.mT)


class FullRotation(Rotation):
    """`R0 e^Ω`, `Ω = A - A^T` (Eq. 16): `d^2` parameters a layer."""

    def __init__(self, base: Tensor) -> None:
        super().__init__(base)
        self.generators = nn.Parameter(torch.zeros_like(self.base))

    def forward(self) -> Tensor:
        """R `[L, d, d]` fp32."""
        return self.base @ torch.linalg.matrix_exp(skew(self.generators))


class CayleyRotation(FullRotation):
    """`R0 (I - Ω)(I + Ω)^{-1}` (Eq. 17), about `R0 e^{-2Ω}`: halve the learning rate of `full`."""

    def forward(self) -> Tensor:
        """R `[L, d, d]` fp32."""
        omega = skew(self.generators)
        eye = torch.eye(omega.shape[-1], dtype=omega.dtype, device=omega.device)
        return self.base @ torch.linalg.solve(eye + omega, eye - omega, left=False)


def spectral_basis(base: Tensor, geometry: Tensor) -> Tensor:
    """Eigenvectors U `[L, d, d]` of `R0^T H R0`, eigenvalues descending (Eq. 18–19)."""
    rotated = base.mT.double() @ geometry.double() @ base.double()
    return torch.linalg.eigh((rotated + rotated.mT) / 2)[1].flip(-1).float()


def random_basis(base: Tensor, seed: int = 42) -> Tensor:
    """One random orthogonal basis per layer, `[L, d, d]`, fixed by `seed` (Eq. 20)."""
    generator = torch.Generator().manual_seed(seed)
    q, r = torch.linalg.qr(torch.randn(base.shape, generator=generator, dtype=torch.float64))
    return (q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).float().to(base.device)


KINDS = {
    "joint": lambda base, e, seed: SubspaceRotation(base, spectral_basis(base, e[:, 0] + e[:, 1])),
    "contrast": lambda base, e, seed: SubspaceRotation(base, spectral_basis(base, e[:, 0] - e[:, 1])),
    "random": lambda base, e, seed: SubspaceRotation(base, random_basis(base, seed)),
    "full": lambda base, e, seed: FullRotation(base),
    "cayley": lambda base, e, seed: CayleyRotation(base),
    "fixed": lambda base, e, seed: Rotation(base),
}


def build_rotation(kind: str, base: Tensor, energies: Tensor, seed: int = 42) -> Rotation:
    """A rotation of `kind` from R0 `base [L, d, d]` and `energies [L, 2, d, d]` (H_K, H_V).

    Kinds: joint (H_K + H_V, the method), contrast (H_K - H_V), random, full, cayley, fixed.
    Raises `RolaqError` with a suggestion for any other name.
    """
    return lookup("rotation", kind, KINDS)(base, energies.to(base.device), seed)
