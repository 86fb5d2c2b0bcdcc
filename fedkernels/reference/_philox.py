"""Philox4x32-10, the counter-based random numbers of Salmon et al. 2011.

Source: "Parallel random numbers: as easy as 1, 2, 3". A number is a function of a key and a counter and of nothing
else, so it can be drawn in any order, by any thread and on any device. Words of 32 bits are the values 0 to 2^32 - 1 of
int64 tensors: the products wrap as unsigned ones do.
"""

from collections.abc import Sequence

from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> list[Tensor]:
    """Four random words of each counter.

    Args:
        counter: four int64 tensors of one shape, words 0 to 2^32 - 1.
        key: two int64 tensors that broadcast to that shape, words 0 to 2^32 - 1.

    Returns:
        Four int64 tensors of that shape, words 0 to 2^32 - 1.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (second >> 32 & _WORD) ^ c1 ^ k0,
            second & _WORD,
            (first >> 32 & _WORD) ^ c3 ^ k1,
            first & _WORD,
        )
        k0, k1 = k0 + _KEY_STEPS[0] & _WORD, k1 + _KEY_STEPS[1] & _WORD
    return [c0, c1, c2, c3]
