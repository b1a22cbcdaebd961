"""A few of the strangers, and of admitted peers that send nonsense, of ``campaigns/strangers.py``."""

from pathlib import Path

import pytest
from campaigns import strangers

MOST_GROWTH = 30 * 2**20  # bytes


@pytest.mark.parametrize(
    ("num_knocks", "num_frames"), [(15, 3), pytest.param(600, 300, marks=pytest.mark.nightly)], ids=["few", "many"]
)
def test_who_has_no_key_gets_nothing_and_who_has_one_does_no_harm(
    num_knocks: int, num_frames: int, tmp_path: Path
) -> None:
    with strangers.encrypted(tmp_path / "worker") as victim:
        knocks = strangers.strangers(victim, num_knocks, seed=1)
        assert num_knocks < 100 or len(knocks) >= 11, f"not all ways were tried: {knocks}"
        for found in (knocks, strangers.storm(victim, num_frames, 1, strangers.ADMITTED)):
            assert isinstance(found["growth"], int)
            assert found["growth"] < MOST_GROWTH


@pytest.mark.nightly
def test_damaged_frames_in_the_open_do_no_harm() -> None:
    with strangers.in_the_open() as victim:
        growth = strangers.storm(victim, 300, 4)["growth"]
        assert isinstance(growth, int)
        assert growth < MOST_GROWTH
