"""launchd and systemd as seen by ``actions``: files to write, commands to run.

Every method may raise ConfigError, whose sentence says what the system refused.
"""

from pathlib import Path
from typing import Protocol

from splitinfer.errors import ConfigError
from splitinfer.service import launchd, systemd
from splitinfer.service.commands import Done
from splitinfer.service.definition import Definition, Installed, Service, State
from splitinfer.service.place import Place

_POLL = 0.5  # seconds
_SETTLING = 15.0  # seconds for which launchd may refuse an agent after the one before: headroomlabs-ai/headroom#1289
_LINES = 8  # of the log


class Manager(Protocol):
    """What keeps one service running."""

    @property
    def file(self) -> Path:
        """The file that is installed."""

    @property
    def log(self) -> str:
        """Where the service's output is, for people."""

    def check(self) -> None:
        """Whether services can be started here at all; else the error says why not."""

    def text(self, definition: Definition) -> bytes:
        """What ``file`` is to hold."""

    def read(self, text: bytes) -> Installed | None:
        """What such a text describes."""

    def start(self) -> None:
        """Take up the file as it is now, and start the service, now and at every login."""

    def stop(self) -> None:
        """Stop the service, and return when it is gone; no harm if it is not there."""

    def forget(self) -> None:
        """What is to be done after the file is removed."""

    def state(self) -> State:
        """What the system says of the service."""

    def last_lines(self) -> list[str]:
        """The end of the log; empty if there is none, or why it cannot be read."""

    def advice(self) -> list[str]:
        """What the person has to know or do after an installation, a sentence each."""


def manager_of(service: Service, place: Place) -> Manager:
    """The manager of a service where ``place`` is. Raises ConfigError: there is none."""
    place.check()
    return Launchd(service, place) if place.platform == "darwin" else Systemd(service, place)


class Launchd:
    """A LaunchAgent in the domain of the user's screen session."""

    def __init__(self, service: Service, place: Place) -> None:
        self._service, self._place = service, place
        self._domain = f"gui/{place.user}"
        self._target = f"{self._domain}/{service.label}"
        self._log = place.home / "Library" / "Logs" / "splitinfer" / f"{service.name}.log"

    @property
    def file(self) -> Path:
        return self._place.home / "Library" / "LaunchAgents" / f"{self._service.label}.plist"

    @property
    def log(self) -> str:
        return str(self._log)

    def check(self) -> None:
        done = self._launchctl("print", self._domain)
        if done.code != 0:
            raise ConfigError(launchd.no_session(self._service, done.why))

    def text(self, definition: Definition) -> bytes:
        return launchd.plist(definition, self._log)

    def read(self, text: bytes) -> Installed | None:
        return launchd.installed(text)

    def start(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self.stop()
        self._launchctl("enable", self._target)  # someone may have disabled it, which bootstrap reports as error 5
        for _ in range(int(_SETTLING / _POLL)):
            done = self._launchctl("bootstrap", self._domain, str(self.file))
            if not launchd.is_busy(done.code):
                break
            self._place.sleep(_POLL)
        if done.code != 0:
            raise ConfigError(launchd.refusal(done.code, done.why, self.file))
        self._launchctl("kickstart", self._target)  # no harm if RunAtLoad has done it; openbase-community/openbase#15

    def stop(self) -> None:
        self._launchctl("bootout", self._target)
        for _ in range(int((self._service.stop_seconds + _SETTLING) / _POLL)):  # bootout returns before it is gone
            if not self.state().is_loaded:
                return
            self._place.sleep(_POLL)
        raise ConfigError(f"launchd has not let go of {self._target}; `launchctl print {self._target}` says why")

    def forget(self) -> None:
        pass

    def state(self) -> State:
        done = self._launchctl("print", self._target)
        return launchd.state(done.output) if done.code == 0 else State(is_loaded=False)

    def last_lines(self) -> list[str]:
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, self._log.stat().st_size - 2**14))
                return file.read().decode(errors="replace").splitlines()[-_LINES:]
        except OSError:
            return []

    def advice(self) -> list[str]:
        return [
            "macOS 15 and newer ask on this Mac's screen whether it may find devices on local networks: allow it, else "
            "it is reached by others but reaches none: \"No route to host\" (System Settings > Privacy & "
            "Security > Local Network; an agent is asked, what runs in Terminal or over ssh is not: TN3179)",
            "it runs while you are logged in on the screen: let this Mac log you in by itself after a restart",
        ]  # fmt: skip

    def _launchctl(self, *words: str) -> Done:
        return self._place.run(("launchctl", *words))


class Systemd:
    """A unit of the user's own systemd."""

    def __init__(self, service: Service, place: Place) -> None:
        self._service, self._place = service, place

    @property
    def file(self) -> Path:
        configs = self._place.environment.get("XDG_CONFIG_HOME")  # systemd.unit(5), "User unit search path"
        return (Path(configs) if configs else self._place.home / ".config") / "systemd" / "user" / self._service.unit

    @property
    def log(self) -> str:
        return f"journalctl --user-unit={self._service.unit}"

    def check(self) -> None:
        done = self._systemctl("show-environment")
        if done.code != 0:
            raise ConfigError(systemd.no_instance(self._service, done.why))

    def text(self, definition: Definition) -> bytes:
        return systemd.unit(definition)

    def read(self, text: bytes) -> Installed | None:
        return systemd.installed(text)

    def start(self) -> None:
        unit = self._service.unit
        self._systemctl("reset-failed", unit)  # it may have been started too often with its options of before
        for words in (("daemon-reload",), ("enable", unit), ("restart", unit)):
            done = self._systemctl(*words)
            if done.code != 0:
                raise ConfigError(systemd.refusal("start", done.why, self.file))

    def stop(self) -> None:
        done = self._systemctl("disable", "--now", self._service.unit)
        if done.code != 0 and self.state().is_running:
            raise ConfigError(systemd.refusal("stop", done.why, self.file))

    def forget(self) -> None:
        self._systemctl("daemon-reload")
        self._systemctl("reset-failed", self._service.unit)

    def state(self) -> State:
        properties = ",".join(systemd.PROPERTIES)
        done = self._systemctl("show", self._service.unit, f"--property={properties}")
        return systemd.state(done.output) if done.code == 0 else State(is_loaded=False)

    def last_lines(self) -> list[str]:
        done = self._place.run(
            ("journalctl", f"--user-unit={self._service.unit}", f"--lines={_LINES}", "--output=short-iso", "--no-pager",
             "--quiet")
        )  # fmt: skip
        why = [f"({done.why})"] if done.complaint else []  # a journal that this user may not read, or none
        return done.output.splitlines() or why

    def advice(self) -> list[str]:
        name = self._place.environment.get("USER") or str(self._place.user)
        done = self._place.run(("loginctl", "show-user", name, "--property=Linger", "--value"))
        if done.output.strip() == "yes":
            return []
        return [f"it runs while you are logged in; to keep it running always: loginctl enable-linger {name}"]

    def _systemctl(self, *words: str) -> Done:
        return self._place.run(("systemctl", "--user", *words))
