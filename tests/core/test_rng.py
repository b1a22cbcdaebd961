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
