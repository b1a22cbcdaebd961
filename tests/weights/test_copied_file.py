"""A copy survives whatever ends its writer, and believes nothing that it finds."""

import errno
import os
import stat
from pathlib import Path

import pytest
from stored import FILE, TOTAL, bytes_in, described, spans_of, written

from splitinfer.errors import ModelError
from splitinfer.weights.copied_file import CopiedFile, copied, header_of, write_whole
from splitinfer.weights.manifest import Manifest
from splitinfer.weights.ranges import PIECE, Span, missing, pieces
from splitinfer.weights.source import Source

ALL = [(0, TOTAL)]
RECORD = 20  # bytes of the journal


@pytest.fixture
def told() -> Manifest:
    return described()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture
def source(model: Path, told: Manifest) -> Source:
    return written(model, told)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store" / FILE


def fill(file: CopiedFile, source: Source, wanted: list[Span] = ALL, most: int = 10**6) -> int:
    """Write up to ``most`` missing pieces; how many."""
    coming = list(pieces(missing(wanted, file.here)))[:most]
    for begin, end in coming:
        file.write(begin, source.read(FILE, begin, end))
    return len(coming)


def kill(file: CopiedFile) -> None:
    """What is left of a writer that is killed."""
    file._written.clear()
    file.close()


def journal(path: Path) -> Path:
    return path.with_name(f"{FILE}.ranges")


def test_some_tensors_leave_holes_that_take_no_room(path: Path, told: Manifest, source: Source):
    with CopiedFile(path, told.tensors) as file:
        fill(file, source, spans_of(told, 2))
        file.finish()
    assert copied(path, told.tensors) == tuple(spans_of(told, 2))
    assert path.stat().st_size == len(header_of(told.tensors)) + TOTAL
    assert path.stat().st_blocks * 512 < PIECE
    assert bytes_in(path, "layers.2.weight") == source.read(FILE, *spans_of(told, 2)[0])


def test_only_what_was_forced_to_the_disk_is_here_after_a_kill(
    path: Path, told: Manifest, source: Source, model: Path, monkeypatch: pytest.MonkeyPatch
):
    file, real = CopiedFile(path, told.tensors), os.fsync
    fill(file, source, most=2)

    def slow(number: int) -> None:
        real(number)
        if number == file._file:  # another thread writes meanwhile
            fill(file, source, [(3 * PIECE, 4 * PIECE)])

    monkeypatch.setattr("splitinfer.weights.copied_file.os.fsync", slow)
    file.sync()
    monkeypatch.undo()
    kill(file)
    assert copied(path, told.tensors) == ((0, 2 * PIECE),)
    with CopiedFile(path, told.tensors) as file:
        assert fill(file, source) == 4
        file.finish()
    assert path.read_bytes() == (model / FILE).read_bytes()


@pytest.mark.parametrize("tail", [b"", bytes(RECORD), b"x" * 7, b"\xfe" + b"\xff" * (RECORD - 1)])
@pytest.mark.parametrize("length", [0, 1, RECORD, RECORD + 7])
def test_records_that_were_lost_or_are_nonsense_are_asked_for(
    path: Path, told: Manifest, source: Source, length: int, tail: bytes
):
    with CopiedFile(path, told.tensors) as file:
        for span in pieces(ALL):
            fill(file, source, [span])
            file.sync()
    os.truncate(journal(path), length)
    with journal(path).open("ab") as records:
        records.write(bytes(-length % RECORD) + tail)
    with CopiedFile(path, told.tensors) as file:
        assert fill(file, source) == 6 - length // RECORD
        file.finish()
    assert copied(path, told.tensors) == tuple(ALL)


@pytest.mark.parametrize("nbytes", [0, 20, 3 * PIECE])
def test_a_file_that_was_cut_short_is_copied_anew(path: Path, told: Manifest, source: Source, nbytes: int):
    with CopiedFile(path, told.tensors) as file:
        fill(file, source)
        file.finish()
    os.truncate(path, nbytes)
    assert copied(path, told.tensors) == ()
    with CopiedFile(path, told.tensors) as file:
        assert file.here == ()


def test_a_full_disk_is_one_sentence_and_the_next_try_continues(
    path: Path, told: Manifest, source: Source, monkeypatch: pytest.MonkeyPatch
):
    real, room = os.pwrite, [5]

    def write(file: int, data: bytes, offset: int) -> int:
        room[0] -= 1
        if room[0] < 0 and len(data) > RECORD:  # the journal's block has room
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data, offset)

    monkeypatch.setattr("splitinfer.weights.copied_file.os.pwrite", write)
    with (
        CopiedFile(path, told.tensors) as file,
        pytest.raises(ModelError, match="is full; what was copied stays") as raised,
    ):
        fill(file, source)
    assert "\n" not in str(raised.value)
    monkeypatch.undo()
    with CopiedFile(path, told.tensors) as file:
        assert fill(file, source) == 2


@pytest.mark.parametrize("suffix", ["", ".ranges"])
def test_a_link_is_not_followed(path: Path, told: Manifest, tmp_path: Path, suffix: str):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    CopiedFile(path, told.tensors).close()
    path.with_name(path.name + suffix).unlink()
    path.with_name(path.name + suffix).symlink_to(victim)
    with pytest.raises(ModelError, match="is a symbolic link"):
        CopiedFile(path, told.tensors)
    assert victim.read_text() == "mine"


def test_a_small_file_replaces_a_link(tmp_path: Path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "config.json").symlink_to(victim)
    write_whole(tmp_path, "config.json", b"{}")
    assert victim.read_text() == "mine"
    assert (tmp_path / "config.json").read_bytes() == b"{}"
    assert stat.S_ISREG((tmp_path / "config.json").lstat().st_mode)
