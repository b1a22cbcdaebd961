"""What is to be kept running, as values: the table of services, and one service with its program and its options.

Another command becomes a service by one more entry in ``SERVICES`` and its function in ``splitinfer.cli.service``.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_CARRIED = (
    "HF_ENDPOINT", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME",
)  # fmt: skip
"""Where models, stored KV and keys are, and nothing that is secret: a service does not see the shell's environment."""


@dataclass(frozen=True, slots=True)
class Service:
    """A command that can be a service.

    name: of the service, and of the command of `splitinfer` that it runs.
    stop_seconds: from SIGTERM to SIGKILL; longer than the command takes to end in the worst case.
    always: options that are written down also where they are not given.
    folders: options whose value is a path, which becomes absolute: a service runs in another folder.
    """

    name: str
    stop_seconds: int
    always: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Its name for launchd."""
        return f"io.splitinfer.{self.name}"

    @property
    def unit(self) -> str:
        """Its name for systemd."""
        return f"splitinfer-{self.name}.service"


WORKER = Service("worker", stop_seconds=20, always=("host", "port"), folders=("model", "kv_dir"))

SERVICES: Mapping[str, Service] = {service.name: service for service in (WORKER,)}


@dataclass(frozen=True, slots=True)
class Definition:
    """A service as it is to be installed.

    command: the program's absolute path, the command's name and its options, as words.
    environment: the variables that it gets besides the system's.
    """

    service: Service
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Installed:
    """What a file describes. ``other``: its further settings, as text, by name."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    other: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class State:
    """What the system says of a service.

    is_loaded: the system knows it. pid: ``None`` if it does not run. starts: how often it was started; ``None`` if that
    is not known. last_exit: how it ended the last time; ``None`` if it never did, or the system does not say.
    """

    is_loaded: bool
    pid: int | None = None
    starts: int | None = None
    last_exit: str | None = None

    @property
    def is_running(self) -> bool:
        return self.pid is not None


def carried(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of this process that a service needs, too; paths in them are absolute."""
    found = {name: environment[name] for name in _CARRIED if environment.get(name)}
    return {name: os.path.abspath(value) if _is_path(name) else value for name, value in found.items()}  # noqa: PTH100


def _is_path(name: str) -> bool:
    return name.endswith(("_HOME", "_CACHE"))


def absolute(value: str) -> str:
    """A path that an option names, as it is from any folder; words that no path could be stay ("none", a hub id)."""
    path = Path(value).expanduser()
    return str(path.absolute()) if value != "none" and (path.exists() or value[0] in "~./") else value


# ----- what differs --------------------------------------------------------------------------------


def differences(there: Installed, here: Installed) -> list[str]:
    """What ``here`` would change, one phrase for each option, variable or setting; empty if nothing."""
    found = []
    if there.command[:1] != here.command[:1]:
        found.append(_changed("the program", *(each.command[0] if each.command else None for each in (there, here))))
    for what, before, after in (
        ("", _options(there.command[1:]), _options(here.command[1:])),
        ("the variable ", there.environment, here.environment),
        ("the setting ", there.other, here.other),
    ):
        for name in sorted({*before, *after}):
            if before.get(name) != after.get(name):
                found.append(_changed(what + name, before.get(name), after.get(name)))
    return found


def _changed(what: str, before: str | None, after: str | None) -> str:
    if before is None:
        return f"{what} {after}".rstrip() + " is new"
    if after is None:
        return f"{what} {before}".rstrip() + " is gone"
    return f"{what} is {before or 'empty'} there, and {after or 'empty'} here"


def _options(words: Iterable[str]) -> dict[str, str]:
    """The options of a command line with their values, and what is not an option by its place."""
    found: dict[str, str] = {}
    name = None
    for place, word in enumerate(words):
        if word.startswith("--"):
            name, _, value = word.partition("=")
            found[name] = value
        elif name is not None:
            found[name] = f"{found[name]} {word}".strip()
        else:
            found[f"word {place + 1}"] = word
    return found
