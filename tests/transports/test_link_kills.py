"""A few of the kills of `link_kills.py`; the campaign `deaths` has any number of them."""

from __future__ import annotations

from pathlib import Path

import link_kills
from effort import thorough


def test_kills_at_random_moments(tmp_path: Path) -> None:
    count = link_kills.campaign(thorough(3, 20), 5, tmp_path)
    assert count.faults == []
    assert sum(count.kills.values()) == thorough(3, 20)
    assert count.frames > 0
