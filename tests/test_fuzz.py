"""Thirty thousand of the mutated frames of ``fuzz.py``."""

import fuzz


def test_mutated_frames_are_refused_or_read() -> None:
    found = fuzz.run(30_000, seed=1)
    assert isinstance(found["memory_growth"], int)
    assert found["memory_growth"] < 20 * 2**20
    refused = sum(count for name, count in found.items() if "refused" in name and isinstance(count, int))
    assert refused > 10_000, "mutations that nobody notices test nothing"
