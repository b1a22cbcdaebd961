"""The key of a token: the same for ever, and unlike every other."""

import pytest

from splitinfer.core.rng import position_key

SEEDS = (*range(40), 2**32 - 1, 2**32, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15)
POSITIONS = (*range(500), 2**20, 2**31, 2**32)


@pytest.mark.parametrize(
    ("seed", "position", "key"),
    [
        (0, 0, (0xA706DD2F, 0x4D197E6F)),
        (0, 1, (0x08B4FDA8, 0xC892B50E)),
        (7, 0, (0xB8B4C297, 0x7EABCE45)),
        (7, 1000, (0x5E2C964F, 0x7D55A4B6)),
        (2**32, 5, (0xFA0F43EF, 0xCF20A2BE)),
        (2**64 - 1, 2**20, (0xEEF17D18, 0xB0F87212)),
    ],
)
def test_keys_never_change(seed: int, position: int, key: tuple[int, int]):
    """A change here changes what every seed of every user gives."""
    assert position_key(seed, position) == key


def test_all_keys_are_different_words_of_32_bits():
    keys = [position_key(seed, position) for seed in SEEDS for position in POSITIONS]
    assert len(set(keys)) == len(SEEDS) * len(POSITIONS)
    assert all(type(word) is int and 0 <= word < 2**32 for key in keys for word in key)


def test_seeds_and_positions_do_not_mirror_each_other():
    assert all(position_key(a, b) != position_key(b, a) for a in range(60) for b in range(a))


def _bits(seed: int, position: int) -> int:
    high, low = position_key(seed, position)
    return high << 32 | low


def test_every_bit_is_set_half_of_the_time():
    samples = [_bits(seed, position) for seed in range(100) for position in range(100)]
    for bit in range(64):
        ones = sum(sample >> bit & 1 for sample in samples)
        assert abs(ones - 5000) < 250, f"bit {bit}: five standard deviations off"


@pytest.mark.parametrize(("by_seed", "by_position"), [(0, 1), (1, 0)])
def test_neighbours_differ_in_half_of_their_bits(by_seed: int, by_position: int):
    grid = [(seed, position) for seed in range(50) for position in range(50)]
    changed = [_bits(s, p) ^ _bits(s + by_seed, p + by_position) for s, p in grid]
    assert abs(sum(x.bit_count() for x in changed) / len(changed) - 32) < 0.4
    assert min(x.bit_count() for x in changed) >= 10
