"""A few of the strangers of ``campaigns/strangers.py``, which sends any number of them, and nonsense by those who have
a key."""

from pathlib import Path

from campaigns import strangers

MOST_GROWTH = 30 * 2**20  # bytes


def test_who_has_no_key_gets_nothing(tmp_path: Path) -> None:
    with strangers.encrypted(tmp_path / "worker") as victim:
        knocks = strangers.strangers(victim, 20, seed=1)
        assert len(knocks) > 5, f"hardly any ways were tried: {knocks}"
        assert int(str(knocks["growth"])) < MOST_GROWTH
