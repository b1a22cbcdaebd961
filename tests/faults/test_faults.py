"""The tables of faults fit the code as it is."""

from collections import Counter
from pathlib import Path

import pytest
from faults import ROOT, Fault, StaleFault, load, load_rooms
from trial import planted, read_outcomes

FAULTS = load()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault: Fault):
    sound = (ROOT / fault.file).read_text()
    planted = fault.planted(sound)
    assert planted != sound
    compile(planted, fault.file, "exec")


def test_names_are_unique():
    assert [name for name, count in Counter(fault.name for fault in FAULTS).items() if count > 1] == []


def test_the_documentation_counts_them():
    assert f"plants {len(FAULTS)} faults" in (ROOT / "docs" / "development.md").read_text()


def test_rooms_and_tests_are_there():
    rooms = load_rooms()
    paths = {path for fault in FAULTS for tier in rooms.tiers(fault) for path in tier}
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_a_text_that_is_gone_or_not_unique_is_refused():
    fault = Fault("some-name", "core", "Something is wrong.", "file.py", old="a = 1", new="a = 2")
    assert fault.planted("a = 1\n") == "a = 2\n"
    for text in ("b = 1\n", "a = 1\na = 1\n"):
        with pytest.raises(StaleFault):
            fault.planted(text)


def test_tests_are_tried_from_near_to_far_and_once():
    fault = Fault("some-name", "wire", "Something is wrong.", "file.py", "a", "b", near=("tests/wire",))
    assert load_rooms().tiers(fault) == [("tests/wire",), ("tests/engine",), ("tests/cluster",)]


def test_a_tree_is_sound_again_after_a_fault(tmp_path: Path):
    file = tmp_path / "file.py"
    file.write_text("a = 1\n")
    fault = Fault("some-name", "core", "Something is wrong.", "file.py", old="a = 1", new="a = 2")
    before, seen = file.stat().st_mtime_ns, set[int]()
    for number in (1, 2):
        with planted(fault, tmp_path, number):
            assert file.read_text() == "a = 2\n"
            seen.add(int(file.stat().st_mtime))  # what a compiled file is known by, with the size
        assert (file.read_text(), file.stat().st_mtime_ns) == ("a = 1\n", before)
    assert len(seen | {before // 10**9}) == 3


def test_a_test_that_ended_its_process_has_failed(tmp_path: Path):
    log = tmp_path / "outcomes.jsonl"
    log.write_text('["begun", "a"]\n["ended", "a"]\n["begun", "b"]\n')
    assert read_outcomes(log, is_complete=True).failed == ("b",)
    assert read_outcomes(log, is_complete=False).failed == ()  # it was running when the time was over


def test_a_run_without_a_test_is_no_answer(tmp_path: Path):
    log = tmp_path / "outcomes.jsonl"
    log.touch()
    with pytest.raises(RuntimeError, match="no test"):
        read_outcomes(log, is_complete=True)
