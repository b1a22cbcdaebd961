"""The folder as a person sees it: what there is, taking something out, cleaning up; and the commands for it."""

import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from kv_samples import GROUP, LAYERS, OTHER_GROUP, block, buffers, chain, flip, flush, name_of
from typer.testing import CliRunner

from splitinfer.cli import app
from splitinfer.kvstore.files import Folder, default_folder
from splitinfer.kvstore.maintenance import Cleaned, clean, look, remove
from splitinfer.kvstore.record import Record
from splitinfer.kvstore.store import Disk, KVStore

LARGE = 10**9


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def fill(
    path: Path,
    records: Sequence[Record],
    group: str = GROUP,
    model: str | None = "models/tiny",
    layers: tuple[int, int] = LAYERS,
    used: float | None = None,
) -> int:
    """Write blocks; their bytes."""
    folder, nbytes = Folder(path), 0
    for record in records:
        nbytes += folder.write(group, name_of(record, layers), record, buffers(record))
        if used is not None:
            os.utime(path / group / str(name_of(record, layers)), (used, used))
    if model is not None:
        folder.describe(group, {"model": model, "dtype": "float32", "device": "a device"})
    return nbytes


@pytest.mark.parametrize("about", [None, "", "7", "[]", "[" * 100_000, '{"dtype": [1]}', '{"model": null}'])
def test_what_nobody_has_described_is_listed_too(path: Path, about: str | None):
    fill(path, [block()], model=None if about is None else "models/tiny")
    for file in (path / GROUP).glob("*.json"):
        file.write_text(about or "")
    (found,) = look(path)
    assert found.group == GROUP
    assert found.num_blocks == 1
    assert remove(path, GROUP) == (1, found.nbytes)


def test_all_is_removed_but_what_is_not_ours(path: Path):
    """Someone may name a folder in which there is more than KV."""
    nbytes = fill(path, chain(2)) + fill(path, chain(3), OTHER_GROUP, None)
    others = [path / "thesis" / name for name in ("thesis.tex", "thesis.tmp", ".thesis.123-4.tmp", "about.json")]
    others.append(path / GROUP / "notes.tmp")
    for file in others:
        file.parent.mkdir(exist_ok=True)
        file.write_text("{}")
        os.utime(file, (1000, 1000))
    assert clean(path, LARGE) == Cleaned(0, 0, 0, 0, 0)
    assert remove(path, None) == (5, nbytes)
    assert sorted(file for file in path.rglob("*") if file.is_file()) == sorted(others)
    assert remove(path, None) == (0, 0)


def test_a_stage_at_work_survives_that_all_is_removed(path: Path):
    store, records = KVStore(Disk(path, LARGE), GROUP, LAYERS, {}), chain(3)
    for _ in range(2):
        for record in records:
            store.put(record, buffers(record))
        assert flush(store)
        assert store.written() == tuple(record.key for record in records)
        assert all(store.get(record.key) for record in records)
        assert flush(store)
        assert remove(path, None)[0] == 3
        assert not any(store.get(record.key) for record in records)
    assert store.offer() == ()
    store.close(30)


def command(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["cache", *map(str, words)])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def test_ls_says_what_there_is_by_model_and_layers_the_last_used_first(path: Path):
    day = 86_400
    fill(path, chain(2), OTHER_GROUP, "org/other", layers=(4, 20), used=time.time() - 9 * day)
    fill(path, chain(3), layers=(4, 9), used=time.time() - 4 * day)
    fill(path, chain(3, size=600_000))
    said = re.sub(r"\d+ s ago", "now", command("ls", "--kv-dir", path))
    assert said == (
        "model layers blocks tokens size last used computed in group "
        f"tiny 0-3 3 12 3.6 MB now float32, a device {GROUP} "
        f"tiny 4-8 3 12 6.46 kB 4 days ago float32, a device {GROUP} "
        f"other 4-19 2 8 4.3 kB 9 days ago float32, a device {OTHER_GROUP} "
        f"3.61 MB in {path}"
    )


def test_ls_writes_names_as_they_are(path: Path):
    """Brackets and colons mean colours and pictures to the library that prints the table, or an error."""
    path = path / "[bold]"
    fill(path, [block()], model="models/[red]:cat:[end]")
    fill(path, [block()], OTHER_GROUP, model="[/models]")
    said = command("ls", "--kv-dir", path)
    assert "[red]:cat:[end] 0-3" in said
    assert "models] 0-3" in said
    assert said.endswith(f"in {path}")


def test_an_empty_folder_is_said_to_be_empty(path: Path):
    assert command("rm", "--all", "--kv-dir", path) == "removed 0 files, 0 B"
    assert command("gc", "--kv-dir", path).startswith("removed 0 damaged files, 0 without those before them")
    assert not path.exists()


def test_without_a_folder_it_is_the_one_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert command("ls") == f"no KV is stored in {default_folder()}"
    fill(default_folder(), [block()])
    assert command("rm", "tiny") == "removed 1 files, 2.15 kB"


@pytest.mark.parametrize("name", ["tiny", "models/tiny", GROUP])
def test_rm_removes_one_model(path: Path, name: str):
    fill(path, chain(3, size=600_000))
    fill(path, chain(2), OTHER_GROUP, "models/other")
    assert command("rm", name, "--kv-dir", path) == "removed 3 files, 3.6 MB"
    assert [one.model for one in look(path)] == ["models/other"]
    assert not (path / GROUP).exists()
    assert command("rm", "--all", "--kv-dir", path) == "removed 2 files, 4.3 kB"
    assert look(path) == []


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        *((("rm", name), 1, f"no KV of {name} is stored in ") for name in ("tin", "models")),
        (("rm", ""), 1, "; `splitinfer cache ls` lists the stored KV"),
        (("rm",), 2, "name a model, or give --all"),
        (("rm", "tiny", "--all"), 2, "not both"),
        *((("gc", "--kv-disk-gb", gb), 2, "--kv-disk-gb") for gb in ("-1", "nan", "inf", "much")),
    ],
)
def test_what_a_command_cannot_mean_removes_nothing(path: Path, words: tuple[str, ...], code: int, said: str):
    fill(path, chain(3))
    assert said in command(*words, "--kv-dir", path, code=code)
    assert look(path)[0].num_blocks == 3


def test_gc_says_what_it_removed(path: Path):
    records = chain(4, size=300_000)
    fill(path, records)
    fill(path, [block(9, size=500_000)], OTHER_GROUP, used=1000)
    flip(path / GROUP / str(name_of(records[1])))
    left = path / GROUP / f".{name_of(records[0])}.{'0' * 16}.tmp"
    left.write_bytes(bytes(400_000))
    os.utime(left, (1000, 1000))
    said = command("gc", "--kv-disk-gb", 0.001, "--kv-dir", path)
    assert said == (
        "removed 1 damaged files, 2 without those before them, 1 unfinished and 1 over the cap: 3.2 MB"
    )  # fmt: skip
    assert {file.name for file in Folder(path).all_files()} == {name_of(records[0])}
    assert json.loads((path / GROUP / "splitinfer.json").read_text())["model"] == "models/tiny"
