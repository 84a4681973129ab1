"""The packed order, bit for bit."""

import numpy as np
import pytest
import torch

from rolaq.quant.packing import pack_codes, unpack_codes


def reference_pack(codes):
    """Word w, bits 2j and 2j+1 = code of coordinate j * W + w; little-endian bytes."""
    words = np.zeros((*codes.shape[:-1], codes.shape[-1] // 8), np.uint16)
    count = words.shape[-1]
    for j in range(8):
        words |= codes[..., j * count : (j + 1) * count].astype(np.uint16) << np.uint16(2 * j)
    return words.astype("<u2").view(np.uint8)


@pytest.mark.parametrize("shape", [(8,), (1, 128), (3, 256), (2, 5, 512), (0, 512)])
def test_round_trip_and_layout(shape):
    codes = np.random.default_rng(1).integers(0, 4, shape).astype(np.uint8)
    packed = pack_codes(torch.from_numpy(codes))
    assert packed.shape == (*shape[:-1], shape[-1] // 4)
    assert np.array_equal(packed.numpy(), reference_pack(codes))
    assert torch.equal(unpack_codes(packed), torch.from_numpy(codes))


@pytest.mark.parametrize("latent_dim", [256, 512])
def test_every_plane_lies_within_one_group_of_128(latent_dim):
    width = latent_dim // 8
    groups = [{(j * width + w) // 128 for w in range(width)} for j in range(8)]
    assert all(len(group) == 1 for group in groups)


@pytest.mark.parametrize("codes", [torch.zeros(12, dtype=torch.uint8), torch.zeros(16)])
def test_refuses_what_it_cannot_pack(codes):
    with pytest.raises(ValueError, match="uint8"):
        pack_codes(codes)
