"""Sleep is held off while there is work and a little longer, and nothing about it is an error."""

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import until

from splitinfer.system import apple, keep_awake
from splitinfer.system.keep_awake import VARIABLE, KeepAwake, assert_by_caffeinate, prevent_idle_sleep
from splitinfer.system.wakefulness import Wakefulness


def test_it_is_held_from_the_first_work_until_the_pause_is_long_enough():
    one = Wakefulness(linger=60)
    assert not one.update(False, 0)
    assert one.until_release(0) is None
    assert one.update(True, 10)
    assert one.until_release(10) == 60
    assert one.update(False, 69)
    assert one.update(True, 69.5), "work has come within the pause"
    assert one.update(False, 129)
    assert one.until_release(129) == 0.5
    assert not one.update(False, 129.5)
    assert one.until_release(200) is None


@given(st.lists(st.tuples(st.booleans(), st.floats(0.1, 100)), max_size=30), st.floats(1, 120))
def test_it_is_held_exactly_while_the_last_work_is_younger_than_the_pause(steps: list, linger: float):
    one, now, busy_at = Wakefulness(linger), 0.0, None
    for is_busy, seconds in steps:
        now += seconds
        busy_at = now if is_busy else busy_at
        held = one.update(is_busy, now)
        assert held == (busy_at is not None and busy_at + linger - now > 0)
        assert (one.until_release(now) is not None) == held


class Power:
    """Counts the assertions that are held; refuses while ``error`` is set."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.held = 0
        self.error: OSError | None = None

    def prevent(self, why: str) -> Callable[[], None]:
        if self.error is not None:
            raise self.error
        self.made.append(why)
        self.held += 1
        return self.release

    def release(self) -> None:
        self.held -= 1
        if self.error is not None:
            raise self.error


def test_one_assertion_serves_many_requests_and_is_released_after_the_last():
    power = Power()
    awake = KeepAwake("answers", power.prevent, linger=60)
    awake.update(False, 0)
    assert power.made == []
    for now in range(1, 50, 5):
        awake.update(True, now)
        awake.update(False, now + 1)
    assert (power.made, power.held) == (["answers"], 1)
    awake.update(False, 46 + 60)
    assert power.held == 0
    awake.update(True, 200)
    awake.close()
    awake.close()
    assert (len(power.made), power.held) == (2, 0)


def test_a_refusal_is_one_line_and_is_tried_again_with_the_next_work(caplog: pytest.LogCaptureFixture):
    power = Power()
    power.error = OSError("no power daemon")
    awake = KeepAwake("answers", power.prevent, linger=1)
    for now in range(20):
        awake.update(now % 5 < 2, now)
    awake.update(False, 100)
    assert [record.message for record in caplog.records] == [
        "this machine may go to sleep while it is needed: no power daemon"
    ]
    power.error = None
    awake.update(True, 101)
    assert power.held == 1
    power.error = OSError("gone")
    awake.close()  # raises nothing
    assert len(caplog.records) == 1


def test_only_macos_is_asked_and_the_owner_may_forbid_it(monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []
    monkeypatch.setattr(apple, "library", lambda path: asked.append(path))
    monkeypatch.setattr(keep_awake, "assert_by_iokit", lambda *_: lambda: asked.append("released"))
    monkeypatch.setattr(apple, "is_macos", lambda: False)
    prevent_idle_sleep("x")()
    monkeypatch.setattr(apple, "is_macos", lambda: True)
    monkeypatch.setenv(VARIABLE, "0")
    prevent_idle_sleep("x")()
    assert asked == []
    monkeypatch.setenv(VARIABLE, "1")
    prevent_idle_sleep("x")()
    assert asked == [apple.IOKIT, apple.CORE_FOUNDATION, "released"]


def test_where_iokit_is_not_reached_caffeinate_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(path: str) -> None:
        raise OSError(f"dlopen({path})")

    monkeypatch.setattr(apple, "is_macos", lambda: True)
    monkeypatch.setattr(apple, "library", refuse)
    monkeypatch.setattr(keep_awake, "assert_by_caffeinate", lambda: lambda: None)
    with caplog.at_level(logging.INFO):
        prevent_idle_sleep("x")()
    assert "dlopen" in caplog.text


def test_caffeinate_waits_for_this_process_and_is_ended(tmp_path: Path):
    script, said = tmp_path / "caffeinate", tmp_path / "said"
    write = f"open({str(said)!r}, 'w').write(' '.join(sys.argv[1:]))"
    script.write_text(f"#!{sys.executable}\nimport sys, time\n{write}\ntime.sleep(60)\n")
    script.chmod(0o755)
    release = assert_by_caffeinate(str(script))
    until(lambda: said.exists() and said.read_text(), "it runs", 30)
    release()
    assert said.read_text() == f"-i -w {os.getpid()}"
    with pytest.raises(OSError, match="missing"):
        assert_by_caffeinate(str(tmp_path / "missing"))
