"""Installs, removes and looks at a service. The file is replaced as a whole, and put back where a start fails.

A ``Manager`` has: ``file``, which is installed; ``log``, where its output is, for people; ``check``, which raises where
services cannot be started at all; ``text`` and ``read``, the file's text from a definition and back; ``start``, which
takes up the file as it is now; ``stop``, which returns when the service is gone; ``forget``, after the file is removed;
``state``; ``last_lines`` of the log; ``advice``, what the person has to know after an installation. Each may raise
ConfigError, whose sentence says what the system refused.
"""

import contextlib
import shlex
from pathlib import Path

from splitinfer.errors import ConfigError
from splitinfer.places import write
from splitinfer.service.definition import NAME, Definition, ServicePlace, State
from splitinfer.service.launchd import Launchd
from splitinfer.service.systemd import Systemd

_WATCHED = 3.0  # seconds after a start in which a service that cannot run has ended: it imports, then listens
_POLL = 0.5

Manager = Launchd | Systemd


def manager_of(place: ServicePlace) -> Manager:
    """Return the manager of services where ``place`` is. Raises ConfigError: this system has none."""
    if place.platform not in ("darwin", "linux"):
        raise ConfigError(f"services are for launchd (macOS) and systemd (Linux), not for {place.platform}")
    return Launchd(place) if place.platform == "darwin" else Systemd(place)


def refuse_root(place: ServicePlace) -> None:
    """Raise ConfigError: a service cannot be installed by this user."""
    if place.user == 0:
        raise ConfigError(
            "a service runs as the user who installs it, with that user's keys and models, and never as root: install "
            "it as that user, without sudo"
        )


def install(definition: Definition, manager: Manager, place: ServicePlace, *, force: bool) -> bool:
    """Install a service and start it; whether anything had to be done.

    Raises:
        ConfigError: another one is there and ``force`` is not given; or it does not start, or not stay: then it is as
            it was before.
    """
    manager.check()
    text, before = manager.text(definition), _content(manager.file)
    if not force and before is not None:
        if before != text:
            raise ConfigError(f"{_difference(definition, manager, before)}; nothing was done; --force replaces it")
        if manager.state().is_running:
            return False
    write(manager.file, text)
    try:
        manager.start()
        _watch(manager, place)
    except ConfigError:
        _put_back(manager, before, text)
        raise
    return True


def remove(manager: Manager) -> bool:
    """Stop a service and remove its file; whether there was one. Its log, keys, models and stored KV stay."""
    is_there = manager.file.exists() or manager.state().is_loaded
    if is_there:
        manager.check()
        manager.stop()
        manager.file.unlink(missing_ok=True)
        manager.forget()
    return is_there


def status(manager: Manager, place: ServicePlace) -> tuple[State, bool, list[str]]:
    """Return what the system says of a service, whether it is installed, and lines for people: what is installed, what
    runs, the end of the log."""
    text, state = _content(manager.file), manager.state()
    if text is None and state.is_loaded:
        said = f"{NAME}: its file is gone, but the system knows it; `splitinfer service remove` forgets it"
        return state, False, [said]
    if text is None:
        root = f"{NAME}: not installed for root; a service belongs to the user who installs it: ask as that user"
        said = f"{NAME}: not installed; `splitinfer service install` does it"
        return state, False, [root if place.user == 0 else said]
    found = manager.read(text)
    return state, True, [
        f"{NAME}: {_running(state)}",
        f"  command  {shlex.join(found.command) if found else 'unknown: the file cannot be understood'}",
        *(f"  variable {each}={value}" for each, value in (found.environment if found else {}).items()),
        f"  file     {manager.file}",
        f"  log      {manager.log}",
        *(f"    {line}" for line in manager.last_lines()),
    ]  # fmt: skip


def _running(state: State) -> str:
    if not state.is_loaded:
        return "installed, but the system does not know it: it starts when you log in, or when you install it again"
    what = f"runs, process {state.pid}" if state.pid is not None else "does not run"
    again = f"; started {state.starts} times" if (state.starts or 0) > 1 else ""
    return what + again + (f"; it ended last with {state.last_exit}" if state.last_exit else "")


def _difference(definition: Definition, manager: Manager, before: bytes) -> str:
    """Return how what is installed differs from what is asked for."""
    there = manager.read(before)
    if there is None:
        return f"{manager.file} is there and was not made by this command"
    already = f"the {NAME} is installed already"
    if there.command != definition.command:
        return f"{already} as `{shlex.join(there.command)}`, and you asked for `{shlex.join(definition.command)}`"
    if there.environment != definition.environment:
        return f"{already} with other variables ({_variables(there)}, and {_variables(definition)} here)"
    return f"{already}, but {manager.file} was changed by hand"


def _variables(definition: Definition) -> str:
    return " ".join(f"{name}={value}" for name, value in definition.environment.items()) or "none"


def _watch(manager: Manager, place: ServicePlace) -> None:
    """Wait until a service that cannot run would have ended. Raises ConfigError: it has."""
    for _ in range(int(_WATCHED / _POLL)):
        place.sleep(_POLL)
        state = manager.state()
        if state.last_exit is not None or (state.starts or 0) > 1:
            said = " / ".join(line.strip() for line in manager.last_lines()[-2:])
            raise ConfigError(
                f"it was started and ended at once ({state.last_exit or 'it was started again'}); its log ends with: "
                f"{said or f'nothing; see {manager.log}'}"
            )
    if not manager.state().is_running:
        raise ConfigError(f"it was accepted, but does not run; see {manager.log}")


def _put_back(manager: Manager, before: bytes | None, failed: bytes) -> None:
    """Make it as it was: without the service, or with the one from before."""
    if before == failed:
        return  # the system goes on trying
    manager.stop()
    if before is None:
        manager.file.unlink(missing_ok=True)
        manager.forget()
        return
    write(manager.file, before)
    with contextlib.suppress(ConfigError):  # the first error is the one to know
        manager.start()


def _content(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
