"""KVarN against a float64 implementation in NumPy, and its tiling."""

from itertools import pairwise

import numpy as np
import pytest
import reference
import torch

from rolaq.quant.methods import build_method
from rolaq.quant.methods.kvarn import Kvarn, balance

WIDTH = 256


def latents(*shape, seed=0, scale=1.0):
    """Latents with uneven channels and tokens."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp(rng.standard_normal(shape[-1]) * 0.7)
    return (x * np.exp(rng.standard_normal(shape[:-1])[..., None] * 0.5) * scale).astype(np.float32)


def numpy_scales(z, rounds=16, clip=-0.3):
    """(token, channel) scales of one tile z [d, t], the way the published code goes about it."""

    def imbalance(x):
        token, channel = x.std(0, ddof=1), x.std(1, ddof=1)
        return token.max() / max(token.min(), 1e-8) + channel.max() / max(channel.min(), 1e-8)

    log_t, log_c = np.zeros((1, z.shape[1])), np.zeros((z.shape[0], 1))
    current, best, kept = z, imbalance(z), (log_t, log_c)
    for _ in range(rounds):
        log_t = np.clip(log_t + np.log(np.clip(current.std(0, ddof=1, keepdims=True), 1e-3, 1e3)), clip, 10)
        current = z / np.exp(log_t) / np.exp(log_c)
        log_c = np.clip(log_c + np.log(np.clip(current.std(1, ddof=1, keepdims=True), 1e-3, 1e3)), clip, 10)
        current = z / np.exp(log_t) / np.exp(log_c)
        if imbalance(current) <= best:
            best, kept = imbalance(current), (log_t, log_c)
    return np.exp(kept[0][0]), np.exp(kept[1][:, 0])


def numpy_tile(x, **options):
    """KVarN of one tile of tokens x [t, d]."""
    hadamard = reference.sylvester(x.shape[1])
    z = (x.astype(np.float64) @ hadamard).T
    if x.shape[0] == 1:
        groups = z.T.reshape(-1, 128)
        low, step = groups.min(1, keepdims=True), np.ptp(groups, axis=1, keepdims=True) / 3
        return (low + step * np.clip(np.rint((groups - low) / step), 0, 3)).reshape(1, -1) @ hadamard.T
    token, channel = numpy_scales(z, **options)
    balanced = z / channel[:, None] / token
    low = balanced.min(1, keepdims=True)
    step = np.maximum(np.ptp(balanced, axis=1, keepdims=True) / 3, 1e-8)
    restored = low + step * np.clip(np.rint((balanced - low) / step), 0, 3)
    return (restored * channel[:, None] * token).T @ hadamard.T


def numpy_kvarn(x, start=0, **options):
    """Tiles at absolute multiples of 128, each quantized by itself."""
    cuts = list(range(128 - start % 128, x.shape[0], 128))
    return np.concatenate([numpy_tile(part, **options) for part in np.split(x, cuts) if len(part)])


def assert_close(restored, expected):
    """Equal up to the few codes that fall on the other side of a boundary in fp32."""
    error = np.abs(np.asarray(restored, np.float64) - expected)
    size = np.abs(expected).max()
    # one flipped code moves all of its token's coordinates by about step / sqrt(d)
    assert (error > 1e-4 * size).any(-1).mean() < 0.1
    assert error.max() < 0.2 * size


@pytest.mark.parametrize(("clip", "rounds"), [(-0.3, 16), (-5.0, 16), (-0.3, 0), (0.2, 3)])
@pytest.mark.parametrize("scale", [0.2, 1.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_scales(clip, rounds, scale, dtype):
    z = np.stack([latents(128, WIDTH, seed=s, scale=scale) for s in range(3)]).astype(np.float64)
    found = balance(torch.from_numpy(z).to(dtype), torch.ones(3, 128, dtype=torch.bool), rounds, clip)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    for tile, *scales in zip(z, found.token, found.channel, strict=True):
        for scale, expected in zip(scales, numpy_scales(tile.T, rounds, clip), strict=True):
            # a common factor passes freely between the axes, and rounds that only move it tie up to rounding
            error = scale.double().log().numpy() - np.log(expected)
            assert np.ptp(error) < tolerance


def test_later_rounds_win_ties_and_worse_ones_lose():
    z = torch.from_numpy(latents(1, 64, WIDTH)).double()
    valid = torch.ones(1, 64, dtype=torch.bool)
    tied = balance(z, valid, rounds=1, clip=3.0)
    assert torch.allclose(tied.token.log(), torch.tensor(3.0).double()) or (tied.token == 1).all()
    worse = [balance(z, valid, rounds=r, clip=-0.3) for r in range(1, 9)]
    spread = [_imbalance(z[0] / b.token[0, :, None] / b.channel[0]) for b in worse]
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise([_imbalance(z[0]), *spread]))


def _imbalance(x):
    token, channel = x.std(1), x.std(0)
    return float(token.max() / token.min() + channel.max() / channel.min())


@pytest.mark.parametrize("offset", [3.0, 30.0])
def test_scales_where_the_mean_outweighs_the_spread(offset):
    z = latents(1, 128, WIDTH).astype(np.float64)
    z[..., ::5] += offset
    found = balance(torch.from_numpy(z).float(), torch.ones(1, 128, dtype=torch.bool))
    for scale, expected in zip((found.token[0], found.channel[0]), numpy_scales(z[0].T), strict=True):
        assert np.ptp(scale.double().log().numpy() - np.log(expected)) < 2e-3


@pytest.mark.parametrize(
    ("start", "tokens"),
    [(0, 128), (0, 300), (5, 40), (100, 200), (127, 2), (126, 3), (0, 129), (0, 1), (77, 1), (128, 2)],
)
def test_reconstruction(start, tokens):
    x = latents(2, tokens, WIDTH, seed=tokens)
    restored = build_method("kvarn", d=WIDTH, layers=1).reconstruct(torch.from_numpy(x), 0, start=start)
    for row in range(2):
        assert_close(restored[row], numpy_kvarn(x[row], start))


def test_options_reach_the_arithmetic():
    x = latents(1, 128, WIDTH, scale=0.1)
    method = build_method("kvarn", d=WIDTH, layers=1, clip=-6.0, rounds=4)
    assert_close(method.reconstruct(torch.from_numpy(x), 0)[0], numpy_kvarn(x[0], clip=-6.0, rounds=4))


@pytest.mark.parametrize("garbage", [0.0, 1e4, float("nan"), float("inf")])
@pytest.mark.parametrize("holes", [[0, 1, 2], [40], [149], list(range(1, 150)), list(range(128, 149))])
def test_padding_stays_out_of_every_statistic(garbage, holes):
    x = latents(1, 150, WIDTH)
    valid = torch.ones(1, 150, dtype=torch.bool)
    valid[0, holes] = False
    padded = torch.from_numpy(x).clone()
    padded[0, holes] = garbage
    restored = build_method("kvarn", d=WIDTH, layers=1).reconstruct(padded, 0, valid=valid)[0]
    for begin in (0, 128):
        keep = [t for t in range(begin, min(begin + 128, 150)) if t not in holes]
        if keep:
            assert_close(restored[keep], numpy_tile(x[0, keep]))


def test_rows_and_tiles_do_not_touch_each_other():
    x = torch.from_numpy(latents(3, 256, WIDTH))
    method = Kvarn()
    whole = method.reconstruct(x, 0)
    alone = torch.cat(
        [method.reconstruct(x[1:2, :128], 0), method.reconstruct(x[1:2, 128:], 0, start=128)], 1
    )
    assert torch.allclose(whole[1:2], alone, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtype_is_kept(dtype):
    x = torch.from_numpy(latents(1, 9, WIDTH)).to(dtype)
    assert build_method("kvarn", d=WIDTH, layers=1).reconstruct(x, 0).dtype == dtype


def test_constant_and_zero_latents():
    for value in (0.0, 2.5):
        x = torch.full((1, 130, WIDTH), value)
        assert torch.allclose(Kvarn().reconstruct(x, 0), x, atol=1e-5)


def test_std_is_reported_by_layer():
    x = torch.from_numpy(latents(2, 128, WIDTH))
    method = Kvarn()
    assert method.latent_std() == {}
    method.reconstruct(x, 3)
    method.reconstruct(x[:, :60], 3)
    parts = [
        (part.double() @ torch.from_numpy(reference.sylvester(WIDTH))).std(-1).flatten()
        for part in (x, x[:, :60])
    ]
    assert method.latent_std() == {3: pytest.approx(float(torch.cat(parts).mean()), rel=1e-5)}
