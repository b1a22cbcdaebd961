"""The limit of open files: as far up as it may go, and never down."""

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from splitinfer.system.open_files import raised

LIMITS = st.integers(-1, 50_000)


@given(LIMITS, LIMITS, st.integers(1, 50_000), st.booleans())
def test_it_never_falls_and_never_passes_its_bounds(soft: int, hard: int, wanted: int, on_macos: bool):
    found = raised(soft, hard, wanted, on_macos=on_macos)
    assert found == soft or soft < found <= wanted
    if found != soft:
        assert hard < 0 or found <= hard
        assert not on_macos or found <= 10_240
    elif soft >= 0:
        assert soft >= min(wanted, wanted if hard < 0 else hard, 10_240 if on_macos else wanted)


def test_this_machine_takes_it():
    code = """
import resource
from splitinfer.system.open_files import make_room
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 300))
print(make_room(200), resource.getrlimit(resource.RLIMIT_NOFILE))
print(make_room(1000), resource.getrlimit(resource.RLIMIT_NOFILE))
print(make_room(100), resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split("\n")[:3] == ["200 (200, 300)", "300 (300, 300)", "100 (300, 300)"]
