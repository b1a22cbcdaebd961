"""What a person is told about a machine that cannot be reached: by error, address, system, and who started this."""

import errno
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.engine.links.reachability import explain, is_local
from splitinfer.system.origin import Origin, Start
from transports.unreachable import Unreachable

MAC, LINUX = "Darwin", "Linux"
HERE = "192.168.1.7"
NO_ROUTE = Unreachable(HERE, errno.EHOSTUNREACH)
ITERM = Origin(Start.PROGRAM, "iTerm")
EXEMPT = [Origin(each) for each in (Start.ROOT, Start.DAEMON, Start.SSH, Start.TERMINAL)]


def test_no_route_on_a_mac_is_a_missing_permission():
    found = explain(NO_ROUTE, MAC, ITERM)
    assert "macOS on this machine blocks this process from reaching 192.168.1.7" in found
    assert "allow iTerm in System Settings → Privacy & Security → Local Network" in found
    assert "`ping -c 3 192.168.1.7`" in found  # the test that tells it from a machine that is off
    assert "Terminal, ssh and daemons" in found


def test_the_program_to_be_allowed_is_named():
    agent = explain(NO_ROUTE, MAC, Origin(Start.AGENT, "io.splitinfer.worker"))
    assert "allow io.splitinfer.worker, which launchd started as an agent" in agent
    assert "Terminal has been closed" in explain(NO_ROUTE, MAC, Origin(Start.DETACHED))
    assert "allow the program that started it" in explain(NO_ROUTE, MAC, Origin(Start.UNKNOWN))


@pytest.mark.parametrize("origin", EXEMPT)
def test_who_needs_no_permission_is_not_sent_to_the_settings(origin: Origin):
    found = explain(NO_ROUTE, MAC, origin)
    assert "Local Network" not in str(found)
    assert "the machine is off, asleep or in another network" in found
    assert "`route -n get 192.168.1.7`" in found


def test_a_self_assigned_address_may_be_looked_for_elsewhere():
    found = explain(Unreachable("169.254.7.7", errno.EHOSTUNREACH), MAC, EXEMPT[0])
    assert "looks for this self-assigned address elsewhere" in found
    assert "self-assigned" not in str(explain(NO_ROUTE, MAC, EXEMPT[0]))


def test_elsewhere_no_route_is_no_route():
    linux = explain(NO_ROUTE, LINUX, Origin(Start.UNKNOWN))
    assert "Local Network" not in str(linux)
    assert "a firewall rejects" in linux
    assert "`ip route get 192.168.1.7`" in linux
    far = explain(Unreachable("8.8.8.8", errno.EHOSTUNREACH), MAC, ITERM)
    assert far.startswith("there is no route from this machine to 8.8.8.8; ")


def test_every_other_error():
    def said(number: int, host: str = HERE) -> str:
        return str(explain(Unreachable(host, number), MAC, ITERM))

    assert said(errno.ECONNREFUSED) == "the machine at 192.168.1.7 answers, but nothing listens on that port"
    assert "off, asleep or in another network, or a firewall drops" in said(errno.ETIMEDOUT)
    assert "firewall" not in said(errno.EHOSTDOWN)
    assert "no worker answers; the worker may be stopped" in said(0)
    assert "no network to 192.168.1.7" in said(errno.ENETUNREACH)
    assert "no network to 192.168.1.7" in said(errno.ENETDOWN)
    assert "forbids connections" in said(errno.EACCES)
    assert "[fe80::1%en5]" in said(errno.EADDRNOTAVAIL, "fe80::1")
    assert said(errno.EADDRNOTAVAIL) == f"{os.strerror(errno.EADDRNOTAVAIL)} (192.168.1.7)"
    assert said(errno.EINVAL, "fe80::1%en5") == f"{os.strerror(errno.EINVAL)} (fe80::1%en5)"


def test_names():
    def said(host: str, system: str, origin: Origin = ITERM) -> str:
        return str(explain(Unreachable(host, 8, is_name=True), system, origin))

    assert "System Settings → General → Sharing" in said("mini.local", MAC)
    assert "Local Network" in said("mini.local", MAC)
    assert "Local Network" not in said("mini.local", MAC, EXEMPT[2])
    assert "Avahi" in said("mini.local", LINUX)
    assert "check its spelling" in said("mini.example", MAC)
    assert "check its spelling" in said("mini.example", LINUX)


LOCAL = ["10.1.2.3", "172.16.0.1", "192.168.90.2", "169.254.7.7", "fd00::5", "fe80::1%en5", "Mini.local", "mini.local."]


@pytest.mark.parametrize(("host", "local"), [(host, True) for host in LOCAL] + [
    ("127.0.0.1", False), ("::1", False), ("8.8.8.8", False), ("2600::1", False), ("mini.example", False), ("", False),
])  # fmt: skip
def test_local_addresses(host: str, local: bool):
    assert is_local(host) is local


HOSTS = st.text(max_size=20) | st.sampled_from([*LOCAL, "8.8.8.8", "2600::1", "::1"])


@given(HOSTS, st.integers(0, 140), st.booleans(), st.sampled_from(Start))
def test_there_is_always_a_sentence(host: str, number: int, is_name: bool, start: Start):
    for system in (MAC, LINUX):
        assert explain(Unreachable(host, number, is_name), system, Origin(start, "x"))
