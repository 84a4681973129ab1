"""KVarN on MLA latents: variance-balanced tiles, quantized per channel (RoLaQ, Eq. 12)."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rolaq.common.errors import RolaqError
from rolaq.quant.hadamard import hadamard
from rolaq.quant.methods.base import Uncalibrated, register
from rolaq.quant.minmax import affine, rtn
from rolaq.quant.spec import QuantizerSpec

_STD_RANGE = (1e-3, 1e3)
_LOG_SCALE_TOP = 10.0
_TINY = 1e-8


class Balance(NamedTuple):
    """Scales of a batch of tiles, and what they were found from."""

    token: Tensor
    """`[T, t]`: D_t."""
    channel: Tensor
    """`[T, d]`: D_c."""
    token_std: Tensor
    """`[T, t]`: each token's std over channels before any scaling."""


class Tiles:
    """Standard deviations of scaled tiles along both axes, without building the scaled tiles.

    With `x = z / (s_t s_c)` the sums of x and x² over one axis are matrix-vector products of
    z and z² with the other axis's inverse scales, which is what makes 16 rounds cheap.

    Args:
        z: `[T, t, d]` with padding set to 0; `valid`: `[T, t]` bool.
    """

    def __init__(self, z: Tensor, valid: Tensor) -> None:
        self.z, self.squares, self.valid = z, z.square(), valid
        self.count = valid.sum(-1, keepdim=True).to(z.dtype)

    def token_std(self, log_token: Tensor, log_channel: Tensor) -> Tensor:
        """`[T, t]`: unbiased std over channels."""
        weight = (-log_channel).exp().unsqueeze(-1)
        total = (self.z @ weight).squeeze(-1)
        power = (self.squares @ weight.square()).squeeze(-1)
        return _std(total, power, self.z.shape[-1]) * (-log_token).exp()

    def channel_std(self, log_token: Tensor, log_channel: Tensor) -> Tensor:
        """`[T, d]`: unbiased std over the tile's real tokens."""
        weight = (-log_token).exp().unsqueeze(-2)
        total = (weight @ self.z).squeeze(-2)
        power = (weight.square() @ self.squares).squeeze(-2)
        return _std(total, power, self.count) * (-log_channel).exp()

    def imbalance(self, token: Tensor, channel: Tensor) -> Tensor:
        """`[T]`: max/min token std plus max/min channel std."""
        low = token.masked_fill(~self.valid, math.inf).amin(-1)
        high = token.masked_fill(~self.valid, -math.inf).amax(-1)
        return high / low.clamp_min(_TINY) + channel.amax(-1) / channel.amin(-1).clamp_min(_TINY)


def balance(z: Tensor, valid: Tensor, rounds: int = 16, clip: float = -0.3) -> Balance:
    """The scales that even out a tile's variance over tokens and channels.

    Args:
        z: `[T, t, d]` rotated tiles, padding set to 0; `valid`: `[T, t]` bool.
        rounds: alternations, the token axis first.
        clip: lower bound of the log scales.

    Returns:
        The best scales met, the unscaled tile included; ties go to the later round.
    """
    tiles = Tiles(z, valid)
    log_token, log_channel = z.new_zeros(z.shape[:2]), z.new_zeros(z.shape[0], z.shape[2])
    token = first = tiles.token_std(log_token, log_channel)
    channel = tiles.channel_std(log_token, log_channel)
    best = tiles.imbalance(token, channel)
    best_token, best_channel = log_token, log_channel
    for _ in range(rounds):
        log_token = _step(log_token, token, clip)
        log_channel = _step(log_channel, tiles.channel_std(log_token, log_channel), clip)
        token = tiles.token_std(log_token, log_channel)
        channel = tiles.channel_std(log_token, log_channel)
        found = tiles.imbalance(token, channel)
        better = (found <= best).unsqueeze(-1)
        best = torch.where(better.squeeze(-1), found, best)
        best_token = torch.where(better, log_token, best_token)
        best_channel = torch.where(better, log_channel, best_channel)
    return Balance(best_token.exp(), best_channel.exp(), first)


def _std(total: Tensor, power: Tensor, count: Tensor | int) -> Tensor:
    """Unbiased std from a sum, a sum of squares and a count (0 for fewer than two values)."""
    count = torch.as_tensor(count, dtype=total.dtype, device=total.device)
    spread = power - total.square() / count.clamp_min(1)
    return (spread.clamp_min(0) / (count - 1).clamp_min(1)).sqrt()


def _step(log_scale: Tensor, std: Tensor, clip: float) -> Tensor:
    return (log_scale + std.clamp(*_STD_RANGE).log()).clamp(clip, _LOG_SCALE_TOP)


def quantize_tiles(z: Tensor, valid: Tensor, scales: Balance, bits: int) -> Tensor:
    """`D_c RTN(D_c^-1 Z D_t^-1) D_t` with one min-max grid per channel over the real tokens."""
    token, channel = scales.token.unsqueeze(-1), scales.channel.unsqueeze(-2)
    balanced = z / token / channel
    padding = ~valid.unsqueeze(-1)
    low = balanced.masked_fill(padding, math.inf).amin(-2, keepdim=True)
    high = balanced.masked_fill(padding, -math.inf).amax(-2, keepdim=True)
    return affine(balanced, low, high, bits, floor=_TINY) * channel * token


class Kvarn(Uncalibrated):
    """KVarN for the shared latent (App. A.2).

    Tiles begin at absolute multiples of `tile`; a write event quantizes the part of each tile that it brings,
    once. Where that part is a single token it is rounded over groups of latent coordinates instead, as is every
    decoded token.

    Args:
        tile: tokens in a tile; `rounds`: alternations of the balancing.
        clip: lower bound of the log scales; part of the published method. At -0.3 no scale falls below .74, so
            latents much smaller than 1 are hardly balanced: compare `latent_std`.
    """

    name = "kvarn"

    def __init__(
        self, spec: QuantizerSpec | None = None, *, tile: int = 128, rounds: int = 16, clip: float = -0.3
    ) -> None:
        super().__init__(spec)
        if tile < 2 or rounds < 0 or clip > _LOG_SCALE_TOP:
            raise RolaqError(
                f"kvarn tile={tile} rounds={rounds} clip={clip}: needs tile >= 2, rounds >= 0, clip <= {_LOG_SCALE_TOP}"
            )
        self.tile, self.rounds, self.clip = tile, rounds, clip
        self._std: dict[int, Tensor] = {}

    def by_token(self, tokens: int) -> bool:
        """Only single tokens are; see `Uncalibrated.by_token`."""
        return tokens == 1

    def reconstruct(
        self, latent: Tensor, layer: int, *, start: int = 0, valid: Tensor | None = None
    ) -> Tensor:
        """`(D_c RTN(Z~) D_t)^T H^T`; see `Method.reconstruct`."""
        rotation = _full(latent.shape[-1], latent.device)
        rotated = latent.float() @ rotation
        if latent.shape[1] == 1:
            written = rtn(rotated, self.spec.group_size, self.spec.bits)
        else:
            written = self._tiled(rotated, layer, start, valid)
        return (written @ rotation.T).to(latent.dtype)

    def _tiled(self, rotated: Tensor, layer: int, start: int, valid: Tensor | None) -> Tensor:
        """`[B, n, d]` rotated latents, cut at absolute multiples of the tile and quantized."""
        batch, n, _ = rotated.shape
        lead = start % self.tile
        edge = (lead, -(lead + n) % self.tile)
        real = torch.ones(batch, n, dtype=torch.bool, device=rotated.device) if valid is None else valid
        real = F.pad(real, edge).unflatten(1, (-1, self.tile)).flatten(0, 1)
        z = F.pad(rotated, (0, 0, *edge)).unflatten(1, (-1, self.tile)).flatten(0, 1)
        # masked, not multiplied: whatever padding holds, NaN included, must not get through
        z = z.masked_fill(~real.unsqueeze(-1), 0)
        scales = balance(z, real, self.rounds, self.clip)
        self._observe(layer, scales.token_std, real)
        written = quantize_tiles(z, real, scales, self.spec.bits)
        lonely = real.sum(-1) == 1
        if lonely.any():
            written[lonely] = rtn(z[lonely], self.spec.group_size, self.spec.bits)
        return written.unflatten(0, (batch, -1)).flatten(1, 2)[:, lead : lead + n]

    def _observe(self, layer: int, std: Tensor, real: Tensor) -> None:
        seen = torch.stack([std.masked_fill(~real, 0).sum(), real.sum().to(std.dtype)])
        self._std[layer] = self._std[layer] + seen if layer in self._std else seen

    def latent_std(self) -> dict[int, float]:
        """Mean std over a tiled token's coordinates, per layer seen; compare with `exp(clip)`."""
        return {layer: float(total / count.clamp_min(1)) for layer, (total, count) in self._std.items()}


@lru_cache(maxsize=8)
@torch.inference_mode(False)  # kept for later, when gradients may be wanted
def _full(d: int, device: torch.device) -> Tensor:
    return hadamard(d).to(device)


@register("kvarn")
def build_kvarn(
    name: str, *, artifact: Any, d: int, layers: int, spec: QuantizerSpec | None, **options: Any
) -> Kvarn:
    """KVarN; `options` are `Kvarn`'s. Raises `RolaqError` unless `d` is a power of two and splits into groups."""
    try:
        method = Kvarn(spec, **options)
    except TypeError as error:
        raise RolaqError(f"method {name}: {error}") from None
    method.spec.check(d)
    hadamard(d)
    return method
