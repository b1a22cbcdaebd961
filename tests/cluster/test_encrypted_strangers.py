"""A few of the strangers, and of admitted peers that send nonsense, of ``campaigns/strangers.py``."""

from pathlib import Path

import pytest
from campaigns import strangers

MOST_GROWTH = 30 * 2**20  # bytes


@pytest.mark.parametrize("number", [20, pytest.param(600, marks=pytest.mark.nightly)])
def test_who_has_no_key_gets_nothing(number: int, tmp_path: Path) -> None:
    with strangers.encrypted(tmp_path / "worker") as victim:
        knocks = strangers.strangers(victim, number, seed=1)
        assert number < 100 or len(knocks) >= 11, f"not all ways were tried: {knocks}"
        assert knocks["growth"] < MOST_GROWTH


@pytest.mark.nightly
@pytest.mark.parametrize("is_open", [True, False], ids=["in the open", "admitted"])
def test_damaged_frames_do_no_harm(is_open: bool, tmp_path: Path) -> None:
    with strangers.in_the_open() if is_open else strangers.encrypted(tmp_path / "worker") as victim:
        storm = strangers.storm(victim, 300, 4, strangers.PLAIN if is_open else strangers.ADMITTED)
        assert storm["growth"] < MOST_GROWTH
