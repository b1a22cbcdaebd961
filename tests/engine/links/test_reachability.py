"""What a person is told about a machine that cannot be reached: by error, address, system, and who started this."""

import errno
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.engine.links.reachability import explain, is_local
from splitinfer.system.origin import ProcessOrigin, Start
from transports.unreachable import Unreachable

MAC, LINUX = "Darwin", "Linux"
HERE = "192.168.1.7"
ITERM = ProcessOrigin(Start.PROGRAM, "iTerm")
EXEMPT = [ProcessOrigin(each) for each in (Start.ROOT, Start.DAEMON, Start.SSH, Start.TERMINAL)]


def said(
    number: int, host: str = HERE, system: str = MAC, origin: ProcessOrigin = ITERM, *, is_name: bool = False
) -> str:
    return str(explain(Unreachable(host, number, is_name=is_name), system, origin))


NO_ROUTE = errno.EHOSTUNREACH
SETTINGS = "Local Network"


def test_what_is_said():
    for found, words in (
        (said(NO_ROUTE), "macOS on this machine blocks this process from reaching 192.168.1.7"),
        (said(NO_ROUTE), "allow iTerm in System Settings → Privacy & Security → Local Network"),
        (said(NO_ROUTE), "`ping -c 3 192.168.1.7`"),  # the test that tells it from a machine that is off
        (said(NO_ROUTE), "Terminal, ssh and daemons"),
        (
            said(NO_ROUTE, origin=ProcessOrigin(Start.AGENT, "io.worker")),
            "allow io.worker, which launchd started as an agent",
        ),
        (said(NO_ROUTE, origin=ProcessOrigin(Start.DETACHED)), "Terminal has been closed"),
        (said(NO_ROUTE, origin=ProcessOrigin(Start.UNKNOWN)), "allow the program that started it"),
        *((said(NO_ROUTE, origin=origin), "the machine is off, asleep or in another network") for origin in EXEMPT),
        *((said(NO_ROUTE, origin=origin), "`route -n get 192.168.1.7`") for origin in EXEMPT),
        (said(NO_ROUTE, "169.254.7.7", origin=EXEMPT[0]), "looks for this self-assigned address elsewhere"),
        (said(NO_ROUTE, system=LINUX), "a firewall rejects"),
        (said(NO_ROUTE, system=LINUX), "`ip route get 192.168.1.7`"),
        (said(errno.ETIMEDOUT), "off, asleep or in another network, or a firewall drops"),
        (said(0), "no worker answers; the worker may be stopped"),
        (said(errno.ENETUNREACH), "no network to 192.168.1.7"),
        (said(errno.ENETDOWN), "no network to 192.168.1.7"),
        (said(errno.EACCES), "forbids connections"),
        (said(errno.EADDRNOTAVAIL, "fe80::1"), "[fe80::1%en5]"),
        (said(8, "mini.local", is_name=True), "System Settings → General → Sharing"),
        (said(8, "mini.local", is_name=True), SETTINGS),
        (said(8, "mini.local", LINUX, is_name=True), "Avahi"),
        (said(8, "mini.example", MAC, is_name=True), "check its spelling"),
        (said(8, "mini.example", LINUX, is_name=True), "check its spelling"),
    ):
        assert words in found


def test_what_is_not_said():
    for found, words in (
        *((said(NO_ROUTE, origin=origin), SETTINGS) for origin in EXEMPT),  # who needs no permission
        (said(8, "mini.local", origin=EXEMPT[2], is_name=True), SETTINGS),
        (said(NO_ROUTE, system=LINUX, origin=ProcessOrigin(Start.UNKNOWN)), SETTINGS),
        (said(NO_ROUTE, origin=EXEMPT[0]), "self-assigned"),
        (said(errno.EHOSTDOWN), "firewall"),
    ):
        assert words not in found


def test_what_needs_no_more_words():
    assert said(NO_ROUTE, "8.8.8.8").startswith("there is no route from this machine to 8.8.8.8; ")
    assert said(errno.ECONNREFUSED) == "the machine at 192.168.1.7 answers, but nothing listens on that port"
    assert said(errno.EADDRNOTAVAIL) == f"{os.strerror(errno.EADDRNOTAVAIL)} (192.168.1.7)"
    assert said(errno.EINVAL, "fe80::1%en5") == f"{os.strerror(errno.EINVAL)} (fe80::1%en5)"


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
        assert explain(Unreachable(host, number, is_name), system, ProcessOrigin(start, "x"))
