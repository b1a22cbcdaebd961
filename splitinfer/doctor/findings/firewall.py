"""Whether other machines may connect: macOS's application firewall, and its privacy of the local network.

The firewall decides by program, on incoming connections (Apple Platform Security, "Firewall security in macOS"). What
is signed by Apple or by a known developer is let in; any other program is asked about when it listens for the first
time, in a window that nobody sees over ssh. Python is the program here; the builds of uv and Homebrew are signed ad hoc
(*assumed* not to count as signed). Privacy of the local network concerns connections to other machines:
``system.origin``.
"""

import shlex
from collections.abc import Iterator
from pathlib import PurePosixPath

from splitinfer.doctor.findings.finding import Finding, Seen, Severity
from splitinfer.doctor.parsing import firewall
from splitinfer.doctor.parsing.macos import version

TOOL = "/usr/libexec/ApplicationFirewall/socketfilterfw"
_FIREWALL, _PRIVACY = "firewall", "local network"
_FIRST_WITH_PRIVACY = (15,)  # macOS 15, TN3179


def findings(seen: Seen) -> Iterator[Finding]:
    """Findings on who may connect to this Mac, and to whom it may connect; none elsewhere."""
    if not seen.is_mac:
        return
    yield from _firewall(seen)
    yield from _privacy(seen)


def _firewall(seen: Seen) -> Iterator[Finding]:
    state = seen.read("firewall", firewall.firewall_state)
    blocks_all = seen.read("firewall_block_all", firewall.is_on)
    if state == 2 or (state and blocks_all):
        text = "the firewall blocks all incoming connections, so no coordinator reaches a worker on this Mac"
        yield Finding(_FIREWALL, Severity.PROBLEM, text, f"sudo {TOOL} --setblockall off")
    elif state == 1:
        yield from _program(seen)
    if state and seen.read("firewall_stealth", firewall.is_on):
        text = "the firewall is in stealth mode: this Mac does not answer ping, and a port without a worker times out"
        yield Finding(_FIREWALL, Severity.NOTE, text, f"sudo {TOOL} --setstealthmode off")


def _program(seen: Seen) -> Iterator[Finding]:
    """The entry of the Python that runs workers here."""
    apps = seen.read("firewall_apps", firewall.listed_apps)
    if apps is None:
        return
    ours = {path: allowed for path, allowed in apps.items() if is_this_python(path, seen.executable, seen.prefix)}
    blocked = [path for path, allowed in ours.items() if not allowed]
    if blocked:
        text = f"the firewall blocks connections to {blocked[0]}, so no coordinator reaches a worker on this Mac"
        yield Finding(_FIREWALL, Severity.PROBLEM, text, f"sudo {TOOL} --unblockapp {shlex.quote(blocked[0])}")
    elif not ours:
        path = shlex.quote(seen.executable)
        text = (
            "the firewall is on and does not know this Python: macOS asks when a worker listens for the first time, "
            "and whoever starts it over ssh or by launchd does not see that"
        )
        yield Finding(_FIREWALL, Severity.NOTE, text, f"sudo {TOOL} --add {path} && sudo {TOOL} --unblockapp {path}")


def is_this_python(path: str, executable: str, prefix: str) -> bool:
    """Whether a program that the firewall lists is this Python: the file itself, or the Python.app of a framework,
    which such builds run in its place.

    >>> here = "/opt/homebrew/Cellar/python@3.13/3.13.1/Frameworks/Python.framework/Versions/3.13"
    >>> is_this_python(f"{here}/Resources/Python.app", f"{here}/bin/python3.13", here)
    True
    >>> is_this_python("/usr/bin/python3", f"{here}/bin/python3.13", here)
    False
    """
    if path == executable:
        return True
    listed = PurePosixPath(path)
    return bool(prefix) and "Python.app" in listed.parts and listed.is_relative_to(prefix)


def _privacy(seen: Seen) -> Iterator[Finding]:
    found = seen.read("macos", version)
    if found is None or found < _FIRST_WITH_PRIVACY:
        return
    if found < (15, 1):
        text = "macOS 15.0 has bugs in the privacy of the local network that 15.1 mended (Apple, TN3179)"
        yield Finding(_PRIVACY, Severity.WARNING, text, "update macOS")
    if not seen.origin.may_use_local_network and str(seen.origin) != "unknown":
        text = (
            f"what {seen.origin} starts may connect to other machines of the network only if you allow it; denied "
            "connections fail with “No route to host”"
        )
        remedy = "allow it in System Settings → Privacy & Security → Local Network, or use Terminal or ssh, which may"
        yield Finding(_PRIVACY, Severity.NOTE, text, remedy)
