"""Sampling keys: 64-bit numbers from which the draws of one response follow, whoever draws them."""

GOLDEN = 0x9E3779B97F4A7C15
MIXERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MASK = 2**64 - 1


def mix64(value: int) -> int:
    """A bijection of the 64-bit numbers that scatters neighbours.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014), the finaliser of splitmix64.
    """
    value &= _MASK
    value = (value ^ (value >> 30)) * MIXERS[0] & _MASK
    value = (value ^ (value >> 27)) * MIXERS[1] & _MASK
    return value ^ (value >> 31)


def sampling_key(seed: int, step: int, row: int, sample: int) -> int:
    """Key in 0..2**64-1 of response `sample` to data-set row `row` at `step`.

    Each argument goes through a bijection of its own, so a change of one of them always changes the key.
    """
    key = 0
    for part in (seed, step, row, sample):
        key = mix64((key + GOLDEN) ^ (part & _MASK))
    return key
