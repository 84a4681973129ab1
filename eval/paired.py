"""Two methods on the same items: right and wrong answers, and McNemar's exact test."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence


def packed(correct: Sequence[bool]) -> str:
    """Right and wrong answers as base64 of bits, first item in the highest bit."""
    bits = "".join("1" if item else "0" for item in correct)
    padded = bits.ljust(-(-len(bits) // 8) * 8, "0")
    return base64.b64encode(bytes(int(padded[i : i + 8], 2) for i in range(0, len(padded), 8))).decode()


def unpacked(text: str, n: int) -> list[bool]:
    """The inverse of `packed` for ``n`` items."""
    return [bool(byte >> (7 - i) & 1) for byte in base64.b64decode(text) for i in range(8)][:n]


def disagreements(first: Sequence[bool], second: Sequence[bool]) -> tuple[int, int]:
    """Items that only the first has right, and that only the second has right."""
    pairs = list(zip(first, second, strict=True))
    return sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided exact p-value that both are right equally often: a sign test on the items they differ in."""
    n, least = only_first + only_second, min(only_first, only_second)
    if n == 0:
        return 1.0
    tail = sum(math.comb(n, k) for k in range(least + 1))
    # whole numbers: exact also where 2^n is no float
    return min(1.0, 2 * tail / 2**n)
