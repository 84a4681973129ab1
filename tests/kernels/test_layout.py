"""What the kernels' assembly assumes of the packed words, checked without it."""

import torch

from rolaq.kernels.reference import pack_rows, unpack_rows
from rolaq.quant.packing import pack_codes
from rolaq.quant.quantizer import decode, encode
from rolaq.quant.spec import QuantizerSpec

MASKS = (0x0003, 0x000C, 0x0030, 0x00C0)


def test_a_masked_word_is_a_bf16_subnormal_linear_in_the_code():
    codes = torch.randint(0, 4, (50, 512), dtype=torch.uint8)
    words = pack_codes(codes).view(torch.int16).int()
    for j in range(8):
        plane = ((words >> (8 * (j // 4))) & MASKS[j % 4]).to(torch.int16).view(torch.bfloat16)
        value = plane.double() * 2.0**133 / 4 ** (j % 4)
        assert torch.equal(value, codes[:, 64 * j : 64 * (j + 1)].double())


def test_a_shift_of_two_words_leaves_low_bytes_that_the_masks_isolate():
    words = torch.randint(-(2**31), 2**31, (1000,), dtype=torch.int64)
    pair = (words & 0xFFFFFFFF) >> 8
    for mask in MASKS:
        low, high = pair & mask, (pair >> 16) & mask
        assert torch.equal(low, (words >> 8) & mask) and torch.equal(high, (words >> 24) & mask)


def test_rows_follow_the_spec():
    codes = encode(torch.randn(9, 256), 0.9, 1.1)
    rope = torch.randn(9, 32).bfloat16()
    rows = pack_rows(codes, rope)
    assert rows.shape[1] == QuantizerSpec().bytes_per_token(256, 32)
    latents, key = unpack_rows(rows, 256, 32)
    assert torch.equal(latents, decode(codes)) and torch.equal(key, rope)
