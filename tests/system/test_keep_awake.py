"""Sleep is held off while there is work and a little longer, and nothing about it is an error."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import until

from splitinfer.system import apple, keep_awake
from splitinfer.system.keep_awake import LINGER, VARIABLE, KeepAwake


class Power:
    """Counts the assertions that are held; refuses while ``error`` is set."""

    def __init__(self) -> None:
        self.held = 0
        self.error: OSError | None = None

    def prevent(self) -> Callable[[], None]:
        if self.error is not None:
            raise self.error
        self.held += 1
        return self.release

    def release(self) -> None:
        self.held -= 1


@pytest.fixture
def power(monkeypatch: pytest.MonkeyPatch) -> Power:
    found = Power()
    monkeypatch.setattr(keep_awake, "prevent_idle_sleep", found.prevent)
    return found


@given(st.lists(st.tuples(st.booleans(), st.floats(0.1, 100)), max_size=30))
def test_it_is_held_exactly_while_the_last_work_is_younger_than_the_pause(steps: list):
    with pytest.MonkeyPatch.context() as patch:
        found = Power()
        patch.setattr(keep_awake, "prevent_idle_sleep", found.prevent)
        one, now, busy_at = KeepAwake(), 0.0, None
        for is_busy, seconds in steps:
            now += seconds
            busy_at = now if is_busy else busy_at
            one.update(is_busy, now)
            held = busy_at is not None and busy_at + LINGER - now > 0
            assert found.held == held
            assert one.until_update(now) == (busy_at + LINGER - now if held else None)
        one.close()
        one.close()
        assert found.held == 0


def test_a_refusal_is_one_line_and_is_tried_again_with_the_next_work(power: Power, caplog: pytest.LogCaptureFixture):
    power.error = OSError("no caffeinate")
    awake = KeepAwake()
    for now in range(0, 1000, 40):
        awake.update(now % 200 < 80, now)
    awake.update(False, 2000)
    assert [record.message for record in caplog.records] == [
        "this machine may go to sleep while it is needed: no caffeinate"
    ]
    power.error = None
    awake.update(True, 2001)
    assert power.held == 1


def test_caffeinate_waits_for_this_process_and_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script, said = tmp_path / "caffeinate", tmp_path / "said"
    monkeypatch.setattr(keep_awake, "_CAFFEINATE", str(script))
    keep_awake.prevent_idle_sleep()()  # not on macOS: nothing is started
    monkeypatch.setattr(apple, "is_macos", lambda: True)
    monkeypatch.setenv(VARIABLE, "0")
    keep_awake.prevent_idle_sleep()()
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(OSError, match="caffeinate"):
        keep_awake.prevent_idle_sleep()
    write = f"open({str(said)!r}, 'w').write(' '.join(sys.argv[1:]))"
    script.write_text(f"#!{sys.executable}\nimport sys, time\n{write}\ntime.sleep(60)\n")
    script.chmod(0o755)
    release = keep_awake.prevent_idle_sleep()
    until(lambda: said.exists() and said.read_text(), "it runs", 30)
    release()
    assert said.read_text() == f"-i -w {os.getpid()}"
