"""What one process is about to take no other counts as free, and what a dead one wanted everybody does."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.system import ledger as ledgers
from splitinfer.system.ledger import CLAIM, Claim, Ledger, Others, left_over, merged, sum_up

GB = 10**9


# -- arithmetic ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claims", "held", "to_come"),
    [
        ([], 0, 0),
        ([Claim(7, 0, 30)], 0, 30),  # a worker of ours that is reading its weights
        ([Claim(7, 30, 4, 9)], 30, 4),  # ... and has: what KV may grow to is divided by the coordinator
        ([Claim(8, 30, 4, 9)], 30, 9),  # anybody else's
        ([Claim(8, 30, 4, 3)], 30, 4),
        ([Claim(8, 30, 4, 9), Claim(8, 20, 4, 7)], 50, 9),  # two that share: the larger
        ([Claim(8, 30, 40, 9), Claim(8, 20, 4, 7)], 50, 44),  # unless they will surely take more
        ([Claim(8, 30, 4, 9), Claim(9, 20, 4, 7), Claim(7, 1, 2, 99)], 51, 18),
    ],
)
def test_claims_of_others(claims: list[Claim], held: int, to_come: int):
    assert sum_up(claims, 7) == Others(held, to_come)


@pytest.mark.parametrize(
    ("available", "limit", "own", "others", "left"),
    [
        (700, None, 0, Others(), 700),
        (700, 500, 100, Others(), 400),
        (300, 500, 100, Others(), 300),
        (700, None, 0, Others(200, 300), 400),  # what they hold is not available any more
        (700, 800, 100, Others(200, 300), 200),  # but the GPU's share has it in it
        (700, 800, 100, Others(600, 300), 0),
    ],
)
def test_what_is_left(available: int, limit: int | None, own: int, others: Others, left: int):
    assert left_over(available, limit, own, others) == left


def test_what_was_taken_is_not_to_come_any_more():
    announced = Claim(7, held=10, load=30, growth=50)
    assert merged([announced], 10) == announced
    assert merged([announced], 25) == Claim(7, 25, 15, 35)
    assert merged([announced], 100) == Claim(7, 100, 0, 0)
    assert merged([announced], 5) == Claim(7, 5, 30, 50)
    assert merged([announced, Claim(7, 0, 1, 2)], 11) == Claim(7, 11, 30, 50), "the last one has taken its own"
    assert merged([Claim(7, 0, 5), announced], 25) == Claim(7, 25, 15 + 0, 35), "the first had been read before"
    assert merged([Claim(7, 10, 5), announced], 25) == Claim(7, 25, 15 + 5, 35), "the first has yet to be read"


@given(st.builds(Claim, *[st.integers(0, 2**62)] * 4))
def test_a_claim_is_read_as_it_was_written(claim: Claim):
    data = CLAIM.dump_json(claim)
    assert CLAIM.validate_json(data, strict=True) == claim
    assert len(data) <= ledgers._SIZE


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b'{"group":1,"held":0,"load":-1,"growth":0}',
        b'{"group":1,"held":0,"load":true,"growth":0}',
        b'{"group":1,"held":0,"load":1,"growth":0,"more":0}',
    ],
)
def test_what_is_no_claim_is_refused(data: bytes):
    with pytest.raises(ValueError, match=r".*"):
        CLAIM.validate_json(data, strict=True)


# -- files -----------------------------------------------------------------------------------------


CLAIMING = """
import sys
from pathlib import Path
from splitinfer.system.ledger import Ledger
folder, (group, held, load, growth) = Path(sys.argv[1]), map(int, sys.argv[2:])
Ledger(folder, group).claim("stage", held=held, load=load, growth=growth)
print("claimed", flush=True)
sys.stdin.read()
"""


@contextmanager
def another(folder: Path, group: int, *numbers: int) -> Iterator[subprocess.Popen[str]]:
    """Another process that has claimed memory."""
    command = [sys.executable, "-c", CLAIMING, str(folder), str(group), *map(str, numbers)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdout.readline() == "claimed\n"  # type: ignore[union-attr]
        try:
            yield child
        finally:
            child.kill()


def test_processes_see_each_others_claims_and_none_of_the_dead(tmp_path: Path):
    mine = Ledger(tmp_path, group=1)
    with another(tmp_path, 2, 5 * GB, 3 * GB, 7 * GB) as child:
        assert mine.others() == Others(5 * GB, 7 * GB)
        mine.claim("stage", held=GB, load=2 * GB)
        assert mine.others() == Others(5 * GB, 7 * GB), "not its own"
        assert Ledger(tmp_path, group=2).others() == Others(6 * GB, 5 * GB)
        child.kill()  # no goodbye
        child.wait()
        assert mine.others() == Others()
        mine.drop("stage", held=0)
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_parts_of_a_process_are_one_claim(tmp_path: Path):
    mine, other = Ledger(tmp_path, group=1), Ledger(tmp_path, group=2)
    mine.claim("draft", held=0, load=10)
    mine.claim("stage", held=0, load=30, growth=50)
    assert other.others() == Others(0, 50)
    mine.claim("stage", held=25, load=20)
    assert other.others() == Others(25, 30), "the draft's 10 are still to come"
    mine.refresh(35)
    assert other.others() == Others(35, 20)
    mine.drop("draft", held=45)
    assert other.others() == Others(45, 0)
    mine.drop("nothing", held=99)
    mine.drop("stage", held=0)
    assert other.others() == Others()
    mine.refresh(99)
    assert other.others() == Others(), "nothing is claimed"


def test_no_two_see_the_same_bytes_free(tmp_path: Path):
    mine, other = Ledger(tmp_path, group=1), Ledger(tmp_path, group=2)
    with mine.locked():
        with mine.locked():
            assert mine.others() == Others()
        descriptor = os.open(tmp_path / "lock", os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        mine.claim("stage", held=0, load=7)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)
    assert other.others() == Others(0, 7)


def test_two_stages_of_one_name_in_a_process_are_two_claims(tmp_path: Path):
    """As of two models; what the second takes is not taken from the first one's, which has its KV yet to fill."""
    mine, other, stages = Ledger(tmp_path, group=1), Ledger(tmp_path, group=2), (object(), object())
    mine.claim(stages[0], held=20, load=2)
    mine.claim(stages[1], held=20, load=30)
    assert other.others() == Others(20, 32)
    mine.refresh(40)
    assert other.others() == Others(40, 12)
    mine.claim(stages[1], held=50, load=3)
    assert other.others() == Others(50, 5)
    mine.drop(stages[0], held=50)
    assert other.others() == Others(50, 3)


def test_a_stopped_process_keeps_nobody_from_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(ledgers, "_PATIENCE", 0.01)
    mine, other = Ledger(tmp_path, group=1), Ledger(tmp_path, group=2)
    mine.claim("stage", held=0, load=7)
    with mine.locked():
        assert other.others() == Others()
        other.claim("stage", held=0, load=8)
        other.drop("stage", held=0)
        assert other.others() == Others()
    assert [record.message.rpartition(": ")[0] for record in caplog.records] == [
        "memory is counted as if no other splitinfer ran on this machine"
    ]
    assert other.others() == Others(0, 7), "the next time it can be asked"


def test_who_cannot_read_what_others_claim_announces_no_growth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ledgers, "_PATIENCE", 0.01)
    mine, other, third = (Ledger(tmp_path, group) for group in (1, 2, 3))
    mine.claim("stage", held=0, load=7, growth=50)
    with other.locked():  # its process was stopped while it held the lock
        mine.claim("stage", held=1, load=6, growth=100)
    assert third.others() == Others(1, 6), "half of what is free might be another's"
    mine.claim("stage", held=1, load=6, growth=40)
    assert third.others() == Others(1, 40)


def test_a_folder_that_cannot_be_made_is_one_line_and_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").touch()
    mine = Ledger(tmp_path / "file" / "memory", group=1)
    for _ in range(3):
        mine.claim("stage", held=0, load=7)
        assert mine.others() == Others()
        mine.refresh(3)
    mine.drop("stage", held=0)
    assert len(caplog.records) == 1


def test_files_of_somebody_else_are_left_out(tmp_path: Path):
    mine = Ledger(tmp_path, group=1)
    with mine.locked():
        pass
    strange = os.open(tmp_path / "123-aa", os.O_RDWR | os.O_CREAT)
    fcntl.flock(strange, fcntl.LOCK_EX)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "123-aa")
    assert mine.others() == Others()
    os.close(strange)
    assert mine.others() == Others()
    assert not (tmp_path / "123-aa").exists()
    assert (tmp_path / "folder").exists()
