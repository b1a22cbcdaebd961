"""The tables of faults fit the code as it is."""

from collections import Counter
from pathlib import Path

import pytest
from faults import ROOT, Fault, StaleFault, load, load_rooms
from trial import Copy, Limits

FAULTS = load()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault: Fault):
    sound = (ROOT / fault.file).read_text()
    planted = fault.planted(sound)
    assert planted != sound
    compile(planted, fault.file, "exec")


def test_names_are_unique():
    assert [name for name, count in Counter(fault.name for fault in FAULTS).items() if count > 1] == []


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


def test_a_copy_is_what_is_imported_and_is_sound_again_after_a_fault(tmp_path: Path):
    copy = Copy(tmp_path / "copy")
    try:
        where = copy.folder / "splitinfer" / "core" / "kv.py"
        sound = where.read_text()
        fault = Fault(
            "all",
            "core",
            "Nothing can be imported.",
            "splitinfer/core/kv/rewind.py",
            sound,
            'raise ImportError("planted")\n',
        )
        with copy.planted(fault):
            assert copy.run(["tests/core/kv/test_rewind.py"], Limits()).failed
        assert copy.run(["tests/core/kv/test_rewind.py"], Limits()).failed == ()
        assert where.read_text() == sound
    finally:
        copy.close()
