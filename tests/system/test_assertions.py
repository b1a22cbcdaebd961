"""Who keeps a Mac awake is read from what pmset prints."""

from pathlib import Path

from splitinfer.system.assertions import Assertion, parse_assertions

RECORDED = Path(__file__).parent / "recorded" / "pmset_assertions.txt"


def test_assertions_of_processes_are_read():
    found = parse_assertions(RECORDED.read_text())
    assert [(one.pid, one.program, one.kind) for one in found] == [
        (366, "Google Chrome", "NoDisplaySleepAssertion"),
        (94, "hidd", "UserIsActive"),
        (143, "coreaudiod", "PreventUserIdleSystemSleep"),
    ]
    assert found[0].name == "Video Wake Lock"
    assert [one.program for one in found if one.prevents_idle_sleep] == ["coreaudiod"], "a display is no machine"


def test_a_program_may_be_called_anything():
    line = '   pid 7(a (b) c): [0x00] 01:02:03 NoIdleSleepAssertion named: "x "y""'
    assert parse_assertions(line) == (Assertion(7, "a (b) c", "NoIdleSleepAssertion", 'x "y"'),)
    assert parse_assertions("nothing of the kind") == ()
