"""What other programs compute is counted once."""

from collections import namedtuple

import pytest

from splitinfer.engine.profiling import load


def test_what_guests_compute_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch):
    """Linux counts it in user and nice, too."""
    times = namedtuple("times", "user nice system idle iowait guest guest_nice")
    monkeypatch.setattr(load.psutil, "cpu_times", lambda: times(10, 5, 2, 100, 7, 3, 4))
    assert load._busy_seconds() == 17
