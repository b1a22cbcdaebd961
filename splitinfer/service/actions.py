"""Installs, removes and inspects a service. The file is replaced as a whole, and restored if a start fails.

A ``Manager`` has: ``file``, the installed file; ``log``, the place of its output, for people; ``check``, which raises
if services cannot be started at all; ``text`` and ``read``, from a definition to the file's text and back; ``start``,
which loads the present file; ``stop``, which returns when the service is gone; ``forget``, called after the file is
removed; ``state``; ``last_lines`` of the log; ``advice``, notes for the person after an installation. Each may raise
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

_WATCHED = 3.0  # seconds within which a service that cannot run ends after its start: it imports, then listens
_POLL = 0.5

Manager = Launchd | Systemd


def manager_of(place: ServicePlace) -> Manager:
    """Return the manager of services for ``place``. Raises ConfigError if its system has none."""
    if place.platform not in ("darwin", "linux"):
        raise ConfigError(f"services are for launchd (macOS) and systemd (Linux), not for {place.platform}")
    return Launchd(place) if place.platform == "darwin" else Systemd(place)


def refuse_root(place: ServicePlace) -> None:
    """Raise ConfigError if the user is root, who cannot install a service."""
    if place.user == 0:
        raise ConfigError(
            "a service runs as the user who installs it, with that user's keys and models, and never as root: install "
            "it as that user, without sudo"
        )


def install(definition: Definition, manager: Manager, place: ServicePlace, *, force: bool) -> bool:
    """Install a service and start it. Return whether anything had to be done.

    Raises:
        ConfigError: another service is installed and ``force`` is not given; or the service does not start or ends at
            once, and everything is restored.
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
    """Stop a service and remove its file. Return whether there was one. Its log, keys, models and stored KV stay."""
    is_there = manager.file.exists() or manager.state().is_loaded
    if is_there:
        manager.check()
        manager.stop()
        manager.file.unlink(missing_ok=True)
        manager.forget()
    return is_there


def status(manager: Manager, place: ServicePlace) -> tuple[State, bool, list[str]]:
    """Return the system's state of a service, whether it is installed, and lines for people: its command, its process,
    the end of the log."""
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
    """Describe how the installed service differs from the requested one."""
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
    """Wait as long as a service that cannot run takes to end. Raises ConfigError if it has ended."""
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
    """Restore the state before: no service, or the earlier one."""
    if before == failed:
        return  # the system goes on trying
    manager.stop()
    if before is None:
        manager.file.unlink(missing_ok=True)
        manager.forget()
        return
    write(manager.file, before)
    with contextlib.suppress(ConfigError):  # the first error is the one to report
        manager.start()


def _content(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
