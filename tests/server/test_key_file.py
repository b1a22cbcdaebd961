"""The file of keys: changed as a whole, readable by its owner only, and followed while the server runs."""

import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from splitinfer.errors import ConfigError
from splitinfer.server import key_file
from splitinfer.server.key_file import FollowedKeys, add_key, remove_key
from splitinfer.server.keys import ApiKey, Scope, digest, read_keys


def test_keys_are_added_and_removed(tmp_path: Path):
    path = tmp_path / "new" / "keys.yaml"
    laptop = add_key(path, "laptop")
    phone = add_key(path, "phone", [Scope.ADMIN], 30.0, 2)
    expected = ApiKey("phone", digest(phone), frozenset({Scope.ADMIN}), 30.0, 2)
    assert read_keys(path) == [ApiKey("laptop", digest(laptop)), expected]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    remove_key(path, "laptop")
    assert read_keys(path) == [expected]
    assert [each.name for each in path.parent.iterdir()] == ["keys.yaml"], "no half-written file is left"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda path: add_key(path, "laptop"), "has a key 'laptop' already"),
        (lambda path: add_key(path, " "), "a key needs a name"),
        (lambda path: add_key(path, "x", concurrent=0), "concurrent of key 'x' must be a number over 0"),
        (lambda path: remove_key(path, "phone"), "has no key 'phone'"),
        (lambda path: add_key(path / "below", "x"), "cannot be written"),
    ],
)
def test_a_change_that_cannot_be_leaves_the_file(tmp_path: Path, change, reason: str):
    path = tmp_path / "keys.yaml"
    add_key(path, "laptop")
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=reason):
        change(path)
    assert path.read_bytes() == before


def test_a_file_that_holds_something_else_is_not_overwritten(tmp_path: Path):
    path = tmp_path / "layout.yaml"
    path.write_text("stages: []\n")
    with pytest.raises(ConfigError, match="must hold a list of API keys"):
        add_key(path, "laptop")
    assert path.read_text() == "stages: []\n"


def test_a_running_server_follows_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "keys.yaml"
    laptop, given = add_key(path, "laptop"), ApiKey("given-1", digest("given"))
    keys = FollowedKeys(path, [given])
    known = keys.find(laptop)
    assert known is not None
    phone = add_key(path, "phone")
    assert [key.name for key in keys] == ["laptop", "phone", "given-1"]
    remove_key(path, "laptop")
    assert (keys.holds(known), keys.find(laptop)) == (False, None)
    assert keys.find(phone) is not None
    path.write_text("damaged")
    assert (keys.find(phone), keys.find("given")) == (None, given)
    assert "no key of the file is admitted" in caplog.text
    path.unlink()
    assert (keys.find(phone), keys.find("given")) == (None, given)
    again = add_key(path, "again")
    assert keys.find(again) is not None


@pytest.mark.parametrize("text", ["- 2026-13-01", "[" * 5000, "- !!bool x", "- [", "- {name: a}", "- \x00"])
def test_a_damaged_file_admits_nobody(tmp_path: Path, text: str):
    path = tmp_path / "keys.yaml"
    laptop, given = add_key(path, "laptop"), ApiKey("given-1", digest("given"))
    keys = FollowedKeys(path, [given])
    path.write_text(text)
    for _ in range(2):
        assert (keys.find(laptop), keys.find("given")) == (None, given)
    with pytest.raises(ConfigError):
        FollowedKeys(path)


def test_a_fault_in_reading_the_file_admits_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "keys.yaml"
    laptop = add_key(path, "laptop")
    keys = FollowedKeys(path)
    path.write_text(path.read_text() + "\n")
    monkeypatch.setattr(key_file, "read_keys", lambda *_, **__: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        keys.find(laptop)
    assert keys.find(laptop) is None


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_write_admits_nobody(tmp_path: Path, mode: int, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "keys.yaml"
    laptop = add_key(path, "laptop")
    keys = FollowedKeys(path)
    path.chmod(mode)
    assert keys.find(laptop) is None
    assert "other users can write" in caplog.text
    with pytest.raises(ConfigError, match=r"`chmod 600 .*` makes it its owner's"):
        FollowedKeys(path)
    path.chmod(0o644)
    assert keys.find(laptop) is not None


def test_the_command_shows_a_key_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from splitinfer.cli import app, keys

    monkeypatch.setattr(keys, "set_up", lambda verbose: None)
    monkeypatch.setattr(keys, "finish", lambda run, verbose: run())
    file = ["--file", str(tmp_path / "keys.yaml")]

    def run(*args: str) -> str:
        done = CliRunner().invoke(app, ["keys", *args, *file], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    secret = run("add", "laptop", "--scope", "admin", "--concurrent", "3").strip()
    (key,) = read_keys(tmp_path / "keys.yaml")
    assert key.sha256 == digest(secret)
    listed = run("ls")
    assert listed == "laptop: admin; any rate, 3 at a time\n"
    run("rm", "laptop")
    assert run("ls").endswith("has no key\n")
    with pytest.raises(ConfigError, match="there is no scope 'root'"):
        run("add", "x", "--scope", "root")
