"""A few of the strangers, and of admitted peers that send nonsense, of ``campaigns/strangers.py``."""

from pathlib import Path

from campaigns import strangers
from effort import thorough

MOST_GROWTH = 30 * 2**20  # bytes


def test_who_has_no_key_gets_nothing_and_who_has_one_does_no_harm(tmp_path: Path) -> None:
    with strangers.encrypted(tmp_path / "worker") as victim:
        knocks = strangers.strangers(victim, thorough(45, 600), seed=1)
        assert len(knocks) >= 13, f"not all ways were tried: {knocks}"
        admitted = strangers.storm(victim, thorough(8, 300), 1, strangers.ADMITTED)
        for found in (knocks, admitted):
            assert isinstance(found["growth"], int)
            assert found["growth"] < MOST_GROWTH
