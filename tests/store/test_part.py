"""A part survives whatever ends its writer, and believes nothing that it finds."""

import errno
import os
from pathlib import Path

import pytest
from weights import bytes_in, described, shorten_pieces, written

from splitinfer.errors import ModelError
from splitinfer.store.manifest import Manifest
from splitinfer.store.part import PartWriter, is_busy, write_whole
from splitinfer.store.parts import Part, parts_of
from splitinfer.store.pieces import check_of
from splitinfer.store.source import Source


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch):
    shorten_pieces(monkeypatch, 8)


@pytest.fixture
def told() -> Manifest:
    return described()


@pytest.fixture
def source(tmp_path: Path, told: Manifest) -> Source:
    return written(tmp_path / "model", told)


@pytest.fixture
def part(told: Manifest) -> Part:
    return parts_of(told, range(1, 6))[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


def fill(writer: PartWriter, source: Source, most: int = 10**6) -> int:
    """Write up to ``most`` missing pieces; how many."""
    coming = writer.missing()[:most]
    for piece, slot in coming:
        data = source.read(piece)
        writer.write(slot, data, check_of(data))
    return len(coming)


def partial(folder: Path, part: Part) -> Path:
    return folder / f".{part.name}.partial"


def test_a_part_in_one_go(folder: Path, part: Part, source: Source, tmp_path: Path):
    with PartWriter(folder, part) as writer:
        assert fill(writer, source) == part.num_pieces
        path = writer.finish()
    assert path.name == part.name
    assert sorted(path.name for path in folder.iterdir()) == [part.name, f"{part.name}.checks"]
    for info in part.tensors:
        assert bytes_in(path, info.name) == bytes_in(tmp_path / "model" / "model.safetensors", info.name)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_another_writer_goes_on(folder: Path, part: Part, source: Source, count: int):
    with PartWriter(folder, part) as writer:
        fill(writer, source, count)
    assert not (folder / part.name).exists()
    with PartWriter(folder, part) as writer:
        assert fill(writer, source) == part.num_pieces - count
        writer.finish()


def test_a_bit_that_flipped_on_the_disk_is_asked_for_again(folder: Path, part: Part, source: Source):
    with PartWriter(folder, part) as writer:
        fill(writer, source)
    data = bytearray(partial(folder, part).read_bytes())
    data[-1] ^= 4
    partial(folder, part).write_bytes(data)
    with PartWriter(folder, part) as writer:
        assert [piece.item for piece, _ in writer.missing()] == [5]
        assert fill(writer, source) == 1
        writer.finish()


@pytest.mark.parametrize("length", [0, 1, 7, 8, 28])
def test_checksums_that_were_lost_are_pieces_that_are_asked_for(folder: Path, part: Part, source: Source, length: int):
    with PartWriter(folder, part) as writer:
        fill(writer, source)
    os.truncate(folder / f".{part.name}.checks", length)
    with PartWriter(folder, part) as writer:
        assert len(writer.missing()) == part.num_pieces - length // 8


def test_data_that_were_lost_are_asked_for(folder: Path, part: Part, source: Source):
    with PartWriter(folder, part) as writer:
        fill(writer, source)
    os.truncate(partial(folder, part), len(part.header) + 20)
    with PartWriter(folder, part) as writer:
        missing = sum(piece.nbytes for piece, _ in writer.missing())
        assert missing >= sum(info.nbytes for info in part.tensors) - 20
        fill(writer, source)
        writer.finish()


def test_one_process_at_a_time(folder: Path, part: Part):
    with PartWriter(folder, part):
        assert is_busy(partial(folder, part))
        with pytest.raises(ModelError, match="another process"):
            PartWriter(folder, part)
    assert not is_busy(partial(folder, part))
    PartWriter(folder, part).close()


def test_who_waited_for_the_lock_does_not_write_into_the_finished_file(
    folder: Path, part: Part, source: Source, monkeypatch: pytest.MonkeyPatch
):
    """The other process finishes between this one's opening of the file and its taking of the lock."""
    first = PartWriter(folder, part)
    fill(first, source)
    flock = __import__("fcntl").flock

    def finish_before(file: int, how: int) -> None:
        monkeypatch.setattr("splitinfer.store.part.fcntl.flock", flock)
        first.finish()
        flock(file, how)

    monkeypatch.setattr("splitinfer.store.part.fcntl.flock", finish_before)
    with pytest.raises(ModelError, match="another process"):
        PartWriter(folder, part)
    assert bytes_in(folder / part.name, "layers.4.weight")


def test_a_full_disk_is_one_sentence_and_the_next_try_goes_on(
    folder: Path, part: Part, source: Source, monkeypatch: pytest.MonkeyPatch
):
    real, room = os.pwrite, [5]

    def write(file: int, data: bytes, offset: int) -> int:
        room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data, offset)

    monkeypatch.setattr("splitinfer.store.part.os.pwrite", write)
    with (
        PartWriter(folder, part) as writer,
        pytest.raises(ModelError, match="is full; what was copied stays") as raised,
    ):
        fill(writer, source)
    assert "\n" not in str(raised.value)
    monkeypatch.undo()
    shorten_pieces(monkeypatch, 8)
    with PartWriter(folder, part) as writer:
        assert fill(writer, source) == part.num_pieces - 2
        writer.finish()


@pytest.mark.parametrize("suffix", ["partial", "checks"])
def test_a_link_is_not_followed(folder: Path, part: Part, tmp_path: Path, suffix: str):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (folder / f".{part.name}.{suffix}").symlink_to(victim)
    with pytest.raises(ModelError, match="is a link"):
        PartWriter(folder, part)
    assert victim.read_text() == "mine"


def test_a_small_file_replaces_a_link(folder: Path, tmp_path: Path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (folder / "config.json").symlink_to(victim)
    (folder / ".config.json.partial").symlink_to(victim)
    write_whole(folder, "config.json", b"{}")
    assert victim.read_text() == "mine"
    assert (folder / "config.json").read_bytes() == b"{}"
    assert not (folder / "config.json").is_symlink()


# ----- the sender's side -------------------------------------------------------------------------------


def test_a_file_that_is_written_to_is_not_sent(source: Source, tmp_path: Path, told: Manifest, part: Part):
    piece = part.pieces()[0][0]
    source.read(piece)
    path = tmp_path / "model" / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    os.utime(path, (1, 1))
    with pytest.raises(ModelError, match="has changed while it was copied"):
        source.read(piece)


def test_a_file_that_was_replaced_before_it_was_read_is_not_sent(source: Source, tmp_path: Path, part: Part):
    path = tmp_path / "model" / "model.safetensors"
    data = path.read_bytes()
    path.unlink()
    path.with_name("another").write_bytes(data)
    path.with_name("another").rename(path)
    os.utime(path, (1, 1))
    with pytest.raises(ModelError, match="has changed while it was copied"):
        source.read(part.pieces()[0][0])


def test_a_file_that_became_shorter(source: Source, tmp_path: Path, part: Part):
    source.read(part.pieces()[0][0])
    os.truncate(tmp_path / "model" / "model.safetensors", 50)
    with pytest.raises(ModelError, match="has changed while it was copied"):
        source.read(part.pieces()[-1][0])
