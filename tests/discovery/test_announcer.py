"""The process that announces: what it announces when, and that it ends with its worker."""

import subprocess
import sys
from collections.abc import Sequence

import pytest
from announcing import CABLE, ETHERNET, MINI, announced

from splitinfer.cli.serve_worker import is_announced
from splitinfer.discovery.announcement import Announcement
from splitinfer.discovery.announcer import (
    Announcer,
)
from splitinfer.errors import ConfigError


class World:
    """An announcer with interfaces and a clock that the test sets; what it registers is written down."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.interfaces, self.time, self.failure = [ETHERNET], 0.0, ""
        self.announcer = Announcer("0.0.0.0", self.register, lambda: self.interfaces, lambda: self.time)  # type: ignore[arg-type]

    def register(self, announcement: Announcement, addresses: Sequence[str]) -> "World":
        if self.failure:
            raise OSError(self.failure)
        self.log.append(f"announce {announcement.name} at {' '.join(addresses)}")
        return self

    def update(self, announcement: Announcement) -> None:
        self.register(announcement, ())
        self.log[-1] = f"update {announcement.free}"

    def close(self) -> None:
        self.log.append("close")


def test_it_announces_once_and_updates():
    world = World()
    world.announcer.announce(MINI)
    world.announcer.look()
    world.announcer.announce(announced(free=5))
    world.announcer.close()
    assert world.log == ["announce mini at 192.168.7.1", "update 5", "close"]


def test_a_cable_that_is_plugged_in_later_is_announced():
    world = World()
    world.announcer.announce(MINI)
    world.interfaces = [CABLE, ETHERNET]
    world.announcer.look()
    assert world.log[1:] == ["close", "announce mini at 10.77.0.1 192.168.7.1"]


def test_a_failure_is_said_once_and_tried_again_later(caplog: pytest.LogCaptureFixture):
    world = World()
    world.failure = "No such device"
    world.announcer.announce(MINI)
    for world.time in (1.0, 31.0, 62.0):
        world.announcer.look()
    assert [record.message for record in caplog.records] == [
        "mDNS announcing stopped: No such device; use the address instead"
    ]
    world.failure = ""
    world.announcer.look()
    assert world.log == []
    world.time = 93.0
    world.announcer.look()
    assert world.log == ["announce mini at 192.168.7.1"]


def test_the_process_ends_when_its_worker_does():
    """The end of standard input is the end of the worker."""
    process = subprocess.Popen([sys.executable, "-m", "splitinfer.discovery.announcer", "::"], stdin=subprocess.PIPE)
    process.communicate(timeout=120)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("asked", "host", "insecure", "child", "is_so"),
    [
        (None, "127.0.0.1", False, False, False),
        (None, "localhost", True, False, False),
        (None, "0.0.0.0", False, False, True),
        (None, "::", False, False, True),
        (None, "0.0.0.0", True, False, False),
        (None, "127.0.0.1", False, True, False),
        (False, "0.0.0.0", False, False, False),
        (True, "0.0.0.0", True, False, True),
    ],
)
def test_which_workers_are_announced(asked: bool | None, host: str, insecure: bool, child: bool, is_so: bool):
    assert is_announced(asked, host, insecure=insecure, child=child) is is_so


def test_a_worker_that_nobody_reaches_cannot_be_announced():
    with pytest.raises(ConfigError, match=r"127.0.0.1 is this one; give --host"):
        is_announced(True, "127.0.0.1", insecure=False, child=False)
