"""A few of the strangers, and of the admitted who send nonsense, of ``storm.py``, which takes any number of them."""

from pathlib import Path

import storm
from effort import thorough

MOST_GROWTH = 30 * 2**20  # bytes


def test_who_has_no_key_gets_nothing_and_who_has_one_does_no_harm(tmp_path: Path) -> None:
    with storm.encrypted(tmp_path / "worker") as victim:
        knocks = storm.strangers(victim, thorough(150, 600), seed=1)
        assert len(knocks) >= 13, f"not all ways were tried: {knocks}"
        admitted = storm.storm(victim, thorough(60, 300), 1, storm.ADMITTED)
        for found in (knocks, admitted):
            assert isinstance(found["growth"], int)
            assert found["growth"] < MOST_GROWTH
