"""Planted faults as data: small, realistic bugs, each one replacement of text in one file.

They stand in the ``.toml`` files beside this module, one for each room of the code. A fault says in a sentence what is
wrong then, and may name the tests that lie nearest to it; ``rooms.toml`` says which tests belong to a room.
"""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
_ROOMS = HERE / "rooms.toml"


class StaleFault(ValueError):
    """A fault whose text does not occur exactly once in its file."""


@dataclass(frozen=True, slots=True)
class Fault:
    """``old``, which occurs once in ``file``, becomes ``new``. ``near``: test paths that are tried first."""

    name: str
    room: str
    what: str
    file: str
    old: str
    new: str
    near: tuple[str, ...] = ()

    def planted(self, text: str) -> str:
        """The file's text with the fault in it.

        Raises:
            StaleFault: ``old`` does not occur exactly once.
        """
        count = text.count(self.old)
        if count != 1:
            raise StaleFault(f"fault {self.name}: its text occurs {count} times in {self.file}")
        return text.replace(self.old, self.new)


def load() -> tuple[Fault, ...]:
    """All faults, room by room."""
    files = sorted(path for path in HERE.glob("*.toml") if path != _ROOMS)
    return tuple(fault for path in files for fault in _faults_of(path))


def _faults_of(path: Path) -> Iterable[Fault]:
    for entry in tomllib.loads(path.read_text())["fault"]:
        yield Fault(
            name=entry["id"],
            room=path.stem,
            what=entry["what"],
            file=entry["file"],
            old=entry["old"],
            new=entry["new"],
            near=tuple(entry.get("near", ())),
        )


@dataclass(frozen=True, slots=True)
class Rooms:
    """Test paths: each room's ``own``, and ``far`` ones that every fault may reach, in the order in which they are
    tried."""

    own: Mapping[str, tuple[str, ...]]
    far: tuple[str, ...]

    def tiers(self, fault: Fault) -> list[tuple[str, ...]]:
        """What to run for a fault, from near to far; no path twice."""
        seen: set[str] = set()
        tiers: list[tuple[str, ...]] = []
        for paths in (fault.near, self.own[fault.room], *((path,) for path in self.far)):
            fresh = tuple(path for path in paths if path not in seen)
            seen.update(fresh)
            if fresh:
                tiers.append(fresh)
        return tiers


def load_rooms() -> Rooms:
    """What ``rooms.toml`` says."""
    said = tomllib.loads(_ROOMS.read_text())
    return Rooms({room: tuple(paths) for room, paths in said["own"].items()}, tuple(said["far"]))
