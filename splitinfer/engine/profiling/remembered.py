"""Remembers what this machine was measured to do, so that it is measured once for a model.

    splitinfer/profiles/DIGEST.json      in the user's folder of caches, beside ``kv``

The digest is of all that the figures depend on: the machine's name (home folders may be shared), its device and, where
that is emulated, its file; the versions of splitinfer, MLX and mlx-lm; the model's shapes. What memory is free is never
remembered. A file that cannot be read or written is as good as none.
"""

import contextlib
import hashlib
import json
import logging
import secrets
from dataclasses import replace
from pathlib import Path

from splitinfer.engine.profiling.measure import SECONDS, measure_machine
from splitinfer.engine.profiling.question import Question
from splitinfer.engine.profiling.stopwatch import Report
from splitinfer.engine.versions import device_name, machine_name, own_versions
from splitinfer.kvstore.paths import default_folder
from splitinfer.machine.profile import VERSION, MachineProfile
from splitinfer.machine.selection import emulated_machine
from splitinfer.models.memory import unloaded_bytes

log = logging.getLogger(__name__)


def profile_here(
    name: str, question: Question, report: Report, *, again: bool = False, seconds: float = SECONDS
) -> tuple[MachineProfile, bool]:
    """This machine's profile under ``name``, and whether it was measured now. ``again``: it shall be.

    Raises:
        ModelError, ConfigError, DeviceFailed: as ``measure_machine``.
    """
    path = _path(question)
    known = None if again else _read(path)
    if known is not None:
        return replace(known, name=name, free_bytes=unloaded_bytes()), False
    profile = measure_machine(name, question, report, seconds)
    _write(path, profile)
    return profile, True


def profiles_folder() -> Path:
    """Where profiles are remembered."""
    return default_folder().parent / "profiles"


def _path(question: Question) -> Path:
    file = emulated_machine()
    emulated = "" if file is None else _text_of(file)
    depends_on = [VERSION, machine_name(), device_name(), emulated, repr(own_versions()), question.shape()]
    return profiles_folder() / f"{hashlib.sha256(json.dumps(depends_on).encode()).hexdigest()[:32]}.json"


def _text_of(file: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return file.read_text(encoding="utf-8")
    return str(file)


def _read(path: Path) -> MachineProfile | None:
    with contextlib.suppress(OSError, ValueError, RecursionError, KeyError, TypeError):
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["version"] == VERSION:
            return MachineProfile.from_dict(found["machine"])
    return None


def _write(path: Path, profile: MachineProfile) -> None:
    """Write it under a temporary name and rename it, so that nobody reads half of it."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"version": VERSION, "machine": profile.as_dict()}, indent=1) + "\n")
        temporary.replace(path)
    except OSError as error:
        log.info("the profile of this machine is not remembered: %s", error)
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
