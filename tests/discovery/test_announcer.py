"""What a worker announces when."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from announcing import CABLE, ETHERNET, MINI
from zeroconf import ServiceInfo

from splitinfer.cli.serve_worker import is_announced
from splitinfer.discovery import announcer
from splitinfer.errors import ConfigError


class World:
    """A worker's announcement, with interfaces and a clock that the test sets; what it registers is written
    down."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.interfaces, self.time, self.failure, self.asked = [ETHERNET], 0.0, "", 0
        monkeypatch.setattr(announcer, "registered", self.register)
        monkeypatch.setattr(announcer, "local_interfaces", self.ask)
        monkeypatch.setattr(announcer, "_numbers", lambda: tuple(self.interfaces))
        monkeypatch.setattr(announcer, "time", SimpleNamespace(monotonic=lambda: self.time))
        self.announcing = announcer.Announcing(MINI, "0.0.0.0")

    def ask(self) -> list:
        self.asked += 1
        return self.interfaces

    def register(self, info: ServiceInfo, addresses: Sequence[str]) -> "World":
        if self.failure:
            raise OSError(self.failure)
        self.log.append(f"announce {info.decoded_properties['name']} at {' '.join(addresses)}")
        return self

    def close(self) -> None:
        self.log.append("close")

    def passes(self, *seconds: float) -> None:
        for each in seconds:
            self.time += each
            self.announcing.tick()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_it_announces_once(world: World):
    world.passes(0, 1, 10, 60)
    world.announcing.close()
    world.announcing.close()
    assert world.log == ["announce mini at 192.168.7.1", "close"]
    assert world.asked == 1, "interfaces were asked for although no address had changed"


def test_a_cable_that_is_plugged_in_later_is_announced(world: World):
    world.passes(0)
    world.interfaces = [CABLE, ETHERNET]
    world.passes(1)
    assert len(world.log) == 1
    world.passes(4)
    assert world.log[1:] == ["close", "announce mini at 10.77.0.1 192.168.7.1"]
    world.interfaces = []
    world.passes(5)
    assert world.log[3:] == ["close"]


def test_a_failure_is_said_once_and_tried_again_later(world: World, caplog: pytest.LogCaptureFixture):
    world.failure = "No such device"
    world.passes(0, 1, 30, 31)
    assert [record.message for record in caplog.records] == [
        "mDNS announcing stopped: No such device; use the address instead"
    ]
    world.failure = ""
    world.passes(1)
    assert world.log == []
    world.passes(30)
    assert world.log == ["announce mini at 192.168.7.1"]


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
