"""Installing, removing and looking, with stand-ins for launchd's and systemd's commands."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from stand_ins import ASKED, LAUNCHD_FAILED, SYSTEMD_FAILED, StandIns

from splitinfer.errors import ConfigError
from splitinfer.service.actions import Manager, install, manager_of, refuse_root, remove, status
from splitinfer.service.definition import Definition

Make = Callable[[str], StandIns]
OTHER = Definition((*ASKED.command[:-1], "6000"), ASKED.environment)
BOTH = pytest.mark.parametrize("platform", ["darwin", "linux"])
FAILED = {"darwin": LAUNCHD_FAILED, "linux": SYSTEMD_FAILED}


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    return lambda platform: StandIns(tmp_path, platform, monkeypatch)


def manager(there: StandIns) -> Manager:
    return manager_of(there.place)


def lines(there: StandIns) -> list[str]:
    return status(manager(there), there.place)[2]


def put(there: StandIns, definition: Definition = ASKED, *, force: bool = False) -> bool:
    there.calls()
    return install(definition, manager(there), there.place, force=force)


def test_an_agent_is_installed(make: Make):
    there = make("darwin")
    assert put(there)
    file = there.place.home / "Library" / "LaunchAgents" / "io.splitinfer.worker.plist"
    assert there.calls() == [
        "launchctl bootout gui/501/io.splitinfer.worker",
        "launchctl enable gui/501/io.splitinfer.worker",
        f"launchctl bootstrap gui/501 {file}",
        "launchctl kickstart gui/501/io.splitinfer.worker",
    ]
    assert file.read_bytes() == manager(there).text(ASKED)
    assert not file.stat().st_mode & 0o022  # launchd refuses a file that others may write
    assert (there.place.home / "Library" / "Logs" / "splitinfer").is_dir()


def test_a_unit_is_installed(make: Make):
    there = make("linux")
    assert put(there)
    assert there.calls() == [
        "systemctl --user reset-failed splitinfer-worker.service",
        "systemctl --user daemon-reload",
        "systemctl --user enable splitinfer-worker.service",
        "systemctl --user restart splitinfer-worker.service",
    ]
    assert (there.place.home / ".config/systemd/user/splitinfer-worker.service").read_bytes() == manager(there).text(
        ASKED
    )


@BOTH
def test_the_same_again_changes_nothing(platform: str, make: Make):
    there = make(platform)
    put(there)
    assert not put(there)
    assert there.calls() == []
    assert put(there, force=True)
    assert there.calls() != []


@BOTH
def test_other_options_need_force(platform: str, make: Make):
    there = make(platform)
    put(there)
    with pytest.raises(ConfigError, match=r"5577`, and you asked for `.* 6000`; nothing was done; --force"):
        put(there, OTHER)
    with pytest.raises(ConfigError, match=r"with other variables \(HF_HOME=/Volumes/Models/hf, and none here\)"):
        put(there, Definition(ASKED.command))
    assert there.calls() == []
    assert manager(there).file.read_bytes() == manager(there).text(ASKED)
    assert put(there, OTHER, force=True)
    assert manager(there).file.read_bytes() == manager(there).text(OTHER)
    manager(there).file.write_bytes(manager(there).text(OTHER).replace(b"20", b"30"))
    with pytest.raises(ConfigError, match="was changed by hand"):
        put(there, OTHER)


@BOTH
def test_a_file_of_someone_else_stays(platform: str, make: Make):
    there = make(platform)
    manager(there).file.parent.mkdir(parents=True)
    manager(there).file.write_text("mine")
    with pytest.raises(ConfigError, match="not made by this command"):
        put(there)
    assert manager(there).file.read_text() == "mine"


@BOTH
def test_without_a_session_nothing_is_written(platform: str, make: Make):
    there = make(platform)
    there.say("no-session")
    with pytest.raises(ConfigError, match="log in"):
        put(there)
    assert not manager(there).file.exists()


@BOTH
def test_root_and_other_systems_are_refused(platform: str, make: Make):
    there = make(platform)
    there.place = replace(there.place, user=0)
    with pytest.raises(ConfigError, match="never as root"):
        refuse_root(there.place)
    assert lines(there) == [
        "worker: not installed for root; a service belongs to the user who installs it: ask as that user"
    ]
    with pytest.raises(ConfigError, match="not for win32"):
        manager_of(replace(there.place, platform="win32"))


@BOTH
def test_what_ends_at_once_is_not_installed(platform: str, make: Make):
    there = make(platform)
    there.say("printed", FAILED[platform])
    there.log("begin\n10:00:01 splitinfer: tcp://0.0.0.0:5577 is in use\n")
    with pytest.raises(
        ConfigError, match=r"ended at once \(exit code 1\); its log ends with: begin / .*5577 is in use"
    ):
        put(there)
    assert not manager(there).file.exists()
    assert not manager(there).state().is_loaded
    assert sum(there.slept) < 5


@BOTH
def test_a_refused_start_puts_the_one_before_back(platform: str, make: Make):
    there = make(platform)
    put(there)
    there.say("refuses", "Bootstrap failed: 1: no")
    with pytest.raises(ConfigError, match="Bootstrap failed: 1: no"):
        put(there, OTHER, force=True)
    assert manager(there).file.read_bytes() == manager(there).text(ASKED)
    assert not any(each.name.startswith(".splitinfer-") for each in manager(there).file.parent.iterdir())


def test_launchd_is_given_time_to_let_go_and_to_take_up(make: Make):
    there = make("darwin")
    put(there)
    there.say("lingers", "\n" * 3)
    there.say("busy", "\n" * 2)
    assert put(there, OTHER, force=True)
    assert [call.split()[1] for call in there.calls()] == [
        "bootout", "enable", "bootstrap", "bootstrap", "bootstrap", "kickstart"
    ]  # fmt: skip


@BOTH
def test_what_is_removed_is_gone_and_the_log_stays(platform: str, make: Make):
    there = make(platform)
    put(there)
    log = there.log("begin\n")
    assert remove(manager(there))
    assert not manager(there).file.exists()
    assert not manager(there).state().is_loaded
    assert log.exists()
    assert not remove(manager(there))


@BOTH
def test_the_status_shows_what_runs_and_the_end_of_the_log(platform: str, make: Make):
    there = make(platform)
    assert lines(there) == ["worker: not installed; `splitinfer service install` does it"]
    put(there)
    there.log("worker waits\n")
    assert lines(there) == [
        "worker: runs, process 4242",
        "  command  /Users/me/.local/bin/splitinfer worker --host 0.0.0.0 --port 5577",
        "  variable HF_HOME=/Volumes/Models/hf",
        f"  file     {manager(there).file}",
        f"  log      {manager(there).log}",
        "    worker waits",
    ]
    there.say("printed", FAILED[platform])
    starts = {"darwin": 3, "linux": 2}[platform]
    first = lines(there)[0]
    assert first == f"worker: does not run; started {starts} times; it ended last with exit code 1"
    (there.folder / "loaded").unlink()
    assert "the system does not know it" in lines(there)[0]
