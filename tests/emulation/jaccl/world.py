"""The emulated machines: a folder that says which devices there are, what they are cabled to, and what goes wrong.

    FOLDER/world.json        the devices and the limits
           DEVICE/           what is registered there (`device`), and faults that were planned for what it sends

All processes of a test share the folder, so the names of devices are unique in it, although each belongs to one Mac.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from tests.emulation.jaccl.device import Device, Limits, Usage

VARIABLE = "SPLITINFER_EMULATED_JACCL"
MACOS = "26.3"


class What(StrEnum):
    """What can happen to a message on the wire. No end is told of any."""

    FLIP = "flip"  # one bit of the byte `at`
    DROP = "drop"  # it does not arrive
    UNPLUG = "unplug"  # the cable is pulled: the sending process dies


@dataclass(frozen=True, slots=True)
class Fault:
    """Happens to the message after the next `skip` ones. `at`: a byte of the message; negative: from its end."""

    what: What
    skip: int = 0
    at: int = 0


@dataclass(frozen=True, slots=True)
class Port:
    """A device: the one it is cabled to ("" if none), and its Mac's system."""

    peer: str
    macos: str = MACOS


class World:
    """The folder, as tests and the processes of a link see it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        text = json.loads((folder / "world.json").read_text())
        self.ports = {name: Port(**port) for name, port in text["ports"].items()}
        self.limits = Limits(**text["limits"])

    @classmethod
    def make(
        cls,
        folder: Path,
        *,
        num_cables: int = 1,
        macos: tuple[str, str] = (MACOS, MACOS),
        limits: Limits | None = None,
    ) -> World:
        """Cables between two Macs: cable k joins `rdma_en{2k}`, the connecting side's, and `rdma_en{2k+1}`.

        `macos`: the system of the connecting side's Mac and of the listener's.
        """
        ports: dict[str, Port] = {}
        for cable in range(num_cables):
            here, there = (f"rdma_en{2 * cable + end}" for end in (0, 1))
            ports |= {here: Port(there, macos[0]), there: Port(here, macos[1])}
        folder.mkdir(parents=True, exist_ok=True)
        for name in ports:
            (folder / name).mkdir()
        content = {
            "ports": {name: asdict(port) for name, port in ports.items()},
            "limits": asdict(limits or Limits()),
        }
        (folder / "world.json").write_text(json.dumps(content))
        return cls(folder)

    @classmethod
    def of_this_process(cls) -> World | None:
        """The world that the environment names; None on a real machine."""
        name = os.environ.get(VARIABLE)
        return cls(Path(name)) if name else None

    # -- what tests do -------------------------------------------------------------------------------------------------

    @property
    def environment(self) -> dict[str, str]:
        return {VARIABLE: str(self.folder)}

    @staticmethod
    def devices(cable: int = 0) -> str:
        """The devices of a cable as an address or a layout names them."""
        return f"rdma_en{2 * cable}:rdma_en{2 * cable + 1}"

    def address(self) -> str:
        return f"rdma://127.0.0.1:0?device={self.devices()}"

    def plan(self, device: str, faults: Sequence[Fault]) -> None:
        """Let these happen to what `device` sends from now on."""
        path = self.folder / device / "faults.json"
        new = path.with_suffix(".new")
        new.write_text(json.dumps([asdict(fault) for fault in faults]))
        new.replace(path)

    def usage(self, device: str) -> Usage:
        return self.device(device).usage()

    def overlaps(self, device: str) -> int:
        """How often an operation on `device` began while another was in progress."""
        path = self.folder / device / "overlaps"
        return len(path.read_bytes()) if path.exists() else 0

    # -- what processes of a link do -----------------------------------------------------------------------------------

    def device(self, name: str) -> Device:
        """Raises RuntimeError with JACCL's text."""
        if name not in self.ports:
            raise RuntimeError(f"[jaccl] Could not find device {name} ({len(self.ports)} available)")
        return Device(self.folder / name, self.limits)

    def macos(self, device: str) -> str:
        """The system of the Mac that has `device`; of one of the Macs if it is not known."""
        return self.ports.get(device, next(iter(self.ports.values()))).macos

    def take_faults(self, device: str) -> list[Fault] | None:
        """Those planned since the last call; None if there is no new plan."""
        path = self.folder / device / "faults.json"
        if not path.exists():
            return None
        text = path.read_text()
        path.unlink()
        return [Fault(**{**fault, "what": What(fault["what"])}) for fault in json.loads(text)]

    def count_overlap(self, device: str) -> None:
        with (self.folder / device / "overlaps").open("ab") as file:
            file.write(b"!")

    def output(self, tool: str) -> str:
        """What `ibv_devices` or `ibv_devinfo` prints, in the form of rdma-core's tools."""
        if tool == "ibv_devices":
            lines = [f"    {name:<16}\t{index:016x}" for index, name in enumerate(self.ports, 1)]
            return "\n".join(["    device          \t   node GUID", *lines]) + "\n"
        states = {name: "PORT_ACTIVE (4)" if port.peer else "PORT_DOWN (1)" for name, port in self.ports.items()}
        return "".join(f"hca_id:\t{name}\n\t\tport:\t1\n\t\t\tstate:\t{state}\n" for name, state in states.items())
