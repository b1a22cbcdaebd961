"""The files of keys: made once, private, edited by hand, damaged."""

import stat
import threading
import time
from pathlib import Path

import pytest

from splitinfer.cli.pair import pair
from splitinfer.errors import ConfigError
from splitinfer.keyring import Keyring
from transports import KeyPair

KEY = "ab" * 32


def test_the_own_key_is_made_once_and_private(tmp_path: Path) -> None:
    first = Keyring(tmp_path / "deep" / "keys").own()
    assert Keyring(tmp_path / "deep" / "keys").own() == first
    assert stat.S_IMODE((tmp_path / "deep" / "keys" / "key").stat().st_mode) == 0o600
    assert [path.name for path in (tmp_path / "deep" / "keys").iterdir()] == ["key"]


def test_changes_at_the_same_time_are_all_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By processes of their own, as `pair` and `init` are."""
    read = Keyring._read

    def slowly(keyring: Keyring) -> None:
        read(keyring)
        time.sleep(0.02)

    monkeypatch.setattr(Keyring, "_read", slowly)
    keys = [f"{i}" * 64 for i in range(5)]
    changes = [threading.Thread(target=Keyring(tmp_path).admit, args=(key, "")) for key in keys]
    for each in changes:
        each.start()
    for each in changes:
        each.join()
    assert sorted(each.key for each in Keyring(tmp_path).known()) == keys


def test_who_is_admitted_is_known_to_all_who_look(tmp_path: Path) -> None:
    here, there = Keyring(tmp_path), Keyring(tmp_path)
    assert not there.admits(KEY)
    here.admit(KEY, "my  studio\n")
    assert there.admits(KEY)
    assert [(one.key, one.name) for one in there.known()] == [(KEY, "my studio")]
    assert here.forget(KEY)
    assert not there.admits(KEY)
    assert not here.forget(KEY)


@pytest.mark.parametrize("text", ["nonsense\n", f"{KEY[:-1]} short\n", "\x00" * 64])
def test_a_damaged_file_admits_nobody(text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "peers").write_text(f"{KEY} good\n{text}")
    assert not Keyring(tmp_path).admits(KEY)
    assert "line 2 of" in caplog.text
    with pytest.raises(ConfigError, match="line 2 of"):
        Keyring(tmp_path).known()


def test_a_file_that_is_damaged_later_admits_nobody_either(tmp_path: Path) -> None:
    keyring = Keyring(tmp_path)
    keyring.admit(KEY, "studio")
    assert keyring.admits(KEY)
    (tmp_path / "peers").write_text(f"{KEY} studio\nnonsense\n")
    assert not keyring.admits(KEY)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"public": "x", "secret": "y"}'])
def test_a_damaged_key_is_said(text: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(text)
    with pytest.raises(ConfigError, match="does not contain a key"):
        Keyring(tmp_path).own()


def test_a_stranger_is_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keyring = Keyring(tmp_path)
    for _ in range(3):
        keyring.log_unknown(KEY)
    for _ in range(50):
        keyring.log_unknown(KeyPair.make().public)
    assert caplog.text.count(f"splitinfer pair {KEY}") == 1
    assert len(caplog.records) == 20, "a flood of strangers does not fill the log"


def test_pairing_with_ones_own_key_says_what_that_means(capsys: pytest.CaptureFixture[str]) -> None:
    for key in (Keyring().own().public, KEY):
        pair(key, "studio")
    own, other = capsys.readouterr().err.split("admitted; running workers know it already\n")[1:]
    assert own.startswith("It is this machine's own key")
    assert "If another machine printed it, that machine has the same key as this machine" in own
    assert other == ""
