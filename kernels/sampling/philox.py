"""Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers" (SC 2011)."""

from __future__ import annotations

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
"""What the two key words grow by from round to round: the golden ratio and sqrt(3) - 1, times 2^32."""
ROUNDS = 10
WORD = 0xFFFFFFFF

Counter = tuple[int, int, int, int]


def philox4x32(counter: Counter, key: tuple[int, int]) -> Counter:
    """Four 32-bit random words of a 128-bit counter under a 64-bit key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product0, product1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1 = (product1 >> 32) ^ c1 ^ k0, product1 & WORD
        c2, c3 = (product0 >> 32) ^ c3 ^ k1, product0 & WORD
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


def uniform(*, seed: int, sample: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits that depends on its three arguments and nothing else.

    The key is the seed's 64 bits, the counter (position's 64 bits, sample's 64 bits).

    Raises:
        ValueError: an argument outside [0, 2^64).
    """
    for name, value in (("seed", seed), ("sample", sample), ("position", position)):
        if not 0 <= value < 1 << 64:
            raise ValueError(f"{name}={value}: random streams are numbered from 0 to 2^64 - 1")
    counter = (position & WORD, position >> 32, sample & WORD, sample >> 32)
    high, low, _, _ = philox4x32(counter, (seed & WORD, seed >> 32))
    return ((high << 21) | (low >> 11)) * 2.0**-53
