"""Installs, removes and looks at a service. The file is replaced as a whole, and put back where a start fails."""

import contextlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from splitinfer.errors import ConfigError
from splitinfer.service.definition import Definition, Installed, Service, State, differences
from splitinfer.service.managers import Manager
from splitinfer.service.place import Place

_WATCHED = 3.0  # seconds after a start in which a service that cannot run has ended: it imports, then listens
_POLL = 0.5


@dataclass(frozen=True, slots=True)
class Status:
    """A service as it is. ``installed``: what its file describes; ``None`` if there is none, or it is not ours."""

    service: Service
    file: Path | None
    installed: Installed | None
    state: State
    log: str
    last_lines: tuple[str, ...]


def install(definition: Definition, manager: Manager, place: Place, *, force: bool) -> bool:
    """Install a service and start it; whether anything had to be done.

    Raises:
        ConfigError: another one is there and ``force`` is not given; or it does not start, or not stay: then it is as
            it was before.
    """
    manager.check()
    text, before = manager.text(definition), _content(manager.file)
    if not force and before is not None:
        if before == text:
            if manager.state().is_running:
                return False
        else:
            raise ConfigError(_other_options(definition.service, manager, before, text))
    _write(manager.file, text)
    try:
        manager.start()
        _watch(manager, place)
    except ConfigError:
        _put_back(manager, before, text)
        raise
    return True


def remove(manager: Manager) -> bool:
    """Stop a service and remove its file; whether there was one. Its log, keys, models and stored KV stay."""
    manager.check()
    is_there = manager.file.exists() or manager.state().is_loaded
    if is_there:
        manager.stop()
        manager.file.unlink(missing_ok=True)
        manager.forget()
    return is_there


def status(service: Service, manager: Manager) -> Status:
    """What is installed, what runs, and the end of the log."""
    text = _content(manager.file)
    return Status(
        service,
        None if text is None else manager.file,
        None if text is None else manager.read(text),
        manager.state(),
        manager.log,
        tuple(manager.last_lines()),
    )


def _other_options(service: Service, manager: Manager, before: bytes, after: bytes) -> str:
    there, here = manager.read(before), manager.read(after)
    if there is None or here is None:
        what = f"{manager.file} is there and was not made by this command"
    else:
        changes = "; ".join(differences(there, here)) or f"{manager.file} was changed by hand"
        what = f"the {service.name} is installed already, but not like this ({changes})"
    return f"{what}; nothing was done; --force replaces it"


def _watch(manager: Manager, place: Place) -> None:
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
    _write(manager.file, before)
    with contextlib.suppress(ConfigError):  # the first error is the one to know
        manager.start()


def _content(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error


def _write(file: Path, text: bytes) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("wb", dir=file.parent, prefix=".splitinfer-", delete=False) as made:
            made.write(text)
            os.fchmod(made.fileno(), 0o644)  # launchd refuses a file that others may write
        Path(made.name).replace(file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from error
