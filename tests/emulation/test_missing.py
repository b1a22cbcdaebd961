"""Where the tests are not, as beside an installed package, what would be emulated says so in one sentence."""

import sys

import pytest

import transports
from splitinfer.engine.device.device import open_device
from splitinfer.errors import ConfigError
from splitinfer.machine.selection import VARIABLE
from transports import AddressError, registry


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package without the tests."""
    for name in [name for name in sys.modules if name == "tests" or name.startswith("tests.emulation")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tests", None)
    monkeypatch.setattr(registry, "TRANSPORTS", {scheme: registry.TRANSPORTS[scheme] for scheme in registry.known()})


def test_an_accelerator(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, "two-large")
    with pytest.raises(ConfigError, match="emulated accelerators and links are in the source"):
        open_device(0, (0, 1))


def test_a_link():
    with pytest.raises(AddressError, match="emulated accelerators and links are in the source"):
        transports.connect("emulated+tcp://127.0.0.1:1?latency=0.003", timeout=1)
