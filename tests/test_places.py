"""One folder in each of the platform's places, and the user's own places before those."""

from pathlib import Path

import pytest

from splitinfer import places
from splitinfer.cli.options import WorkerOptions, settings_of, store_of
from splitinfer.errors import ConfigError
from splitinfer.settings import Settings

XDG = ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME")
ALL = (places.configuration, places.data, places.state, places.caches)
SUPPORT = "Library/Application Support"


@pytest.mark.parametrize(
    ("platform", "found"),
    [
        ("linux", [".config", ".local/share", ".local/state", ".cache"]),
        ("darwin", [SUPPORT, SUPPORT, SUPPORT, "Library/Caches"]),
    ],
)
def test_places_are_the_platforms_unless_the_user_names_others(
    platform: str, found: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sys.platform", platform)
    for name in XDG:
        monkeypatch.delenv(name, raising=False)
    assert [each() for each in ALL] == [Path.home() / place / "splitinfer" for place in found]
    for name in XDG:
        monkeypatch.setenv(name, f"/mine/{name}")
    assert [each() for each in ALL] == [Path(f"/mine/{name}/splitinfer") for name in XDG]


def test_a_file_is_replaced_whole_or_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "new" / "file"
    places.replace_file(path, "one\n")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("one\n", 0o600)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        places.replace_file(path, "two\n")
    assert path.read_text() == "one\n"
    assert list(path.parent.iterdir()) == [path], "half a file is left over"


def test_a_folder_as_a_person_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert places.folder_named("none", "kv_dir") is None
    assert places.folder_named("kv", "kv_dir") == tmp_path / "kv"
    assert places.folder_named("~/kv", "kv_dir") == Path.home() / "kv"
    assert Settings(kv_dir="none").disk is Settings(kv_dir=Path("none")).disk is Settings().disk is None
    assert settings_of({"kv_dir": "none"}).disk is WorkerOptions(kv_dir="none").disk is store_of("none", None) is None
    assert store_of("models", None).path == tmp_path / "models"  # type: ignore[union-attr]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("given", ["", "~nobody-here/kv", "a\0b", "file"])
def test_what_can_be_no_folder_is_one_sentence(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    options = WorkerOptions(kv_dir=given)
    for make in (lambda: Settings(kv_dir=given).disk, lambda: store_of(given, None), lambda: options.disk):
        with pytest.raises(ConfigError, match=r"^(kv_dir|--models-dir): "):
            make()
