"""What is wrong with this machine, from what its commands print: firewall, network, memory, processes, power, NVIDIA.
Pure.

A function yields what a person may want to change: an outcome, a sentence and a remedy. What is right yields nothing.
"""

import shlex
from collections.abc import Iterator
from itertools import product
from pathlib import PurePosixPath

from splitinfer.common.plain_text import size
from splitinfer.probes import parsing
from splitinfer.probes.evidence import TOOL, SeenHere, WayThere
from splitinfer.probes.finding import Finding, Judged, Outcome
from splitinfer.probes.rdma import rdma_findings
from splitinfer.system.interface_kind import Kind, interface_of

FAILED, WARNING, NOTE = Outcome.FAILED, Outcome.WARNING, Outcome.NOTE


# -- the firewall, and the privacy of the local network ----------------------------------------------------------------
#
# The firewall decides by program, on incoming connections (Apple Platform Security, "Firewall security in macOS"). What
# is signed by Apple or by a known developer is let in; about any other program macOS asks when it listens for the first
# time, in a window that nobody sees over ssh. Python is the program here; the builds of uv and Homebrew are signed ad
# hoc (*assumed* not to count as signed). Privacy of the local network concerns connections to other machines
# (``system.origin``); it came with macOS 15 (TN3179).


def _firewall(seen: SeenHere) -> Iterator[Judged]:
    state = seen.read("firewall", parsing.firewall_state)
    if state == 2:
        text = "the firewall blocks all incoming connections, so no coordinator reaches a worker on this Mac"
        yield FAILED, text, f"sudo {TOOL} --setblockall off"
    elif state == 1:
        yield from _program(seen)


def _program(seen: SeenHere) -> Iterator[Judged]:
    """Yield the entry of the Python that runs workers here."""
    apps = seen.read("firewall_apps", parsing.listed_apps)
    if apps is None:
        return
    ours = {path: allowed for path, allowed in apps.items() if is_this_python(path, seen.executable, seen.prefix)}
    blocked = [path for path, allowed in ours.items() if not allowed]
    if blocked:
        text = f"the firewall blocks connections to {blocked[0]}, so no coordinator reaches a worker on this Mac"
        yield FAILED, text, f"sudo {TOOL} --unblockapp {shlex.quote(blocked[0])}"
    elif not ours:
        path = shlex.quote(seen.executable)
        text = (
            "the firewall is on and does not know this Python: macOS asks when a worker listens for the first time, "
            "and whoever starts it over ssh or by launchd does not see that"
        )
        yield NOTE, text, f"sudo {TOOL} --add {path} && sudo {TOOL} --unblockapp {path}"


def is_this_python(path: str, executable: str, prefix: str) -> bool:
    """Return whether a program that the firewall lists is this Python: the file itself, or the Python.app of a
    framework, which such builds run in its place.

    >>> here = "/opt/homebrew/Cellar/python@3.13/3.13.1/Frameworks/Python.framework/Versions/3.13"
    >>> is_this_python(f"{here}/Resources/Python.app", f"{here}/bin/python3.13", here)
    True
    >>> is_this_python("/usr/bin/python3", f"{here}/bin/python3.13", here)
    False
    """
    listed = PurePosixPath(path)
    return path == executable or (bool(prefix) and "Python.app" in listed.parts and listed.is_relative_to(prefix))


def _privacy(seen: SeenHere) -> Iterator[Judged]:
    found = seen.read("macos", parsing.version)
    if found is None or found < (15,):
        return
    if not seen.origin.may_use_local_network and str(seen.origin) != "unknown":
        text = (
            f"what {seen.origin} starts may connect to other machines of the network only if you allow it; denied "
            "connections fail with “No route to host”"
        )
        remedy = "allow it in System Settings → Privacy & Security → Local Network, or use Terminal or ssh, which may"
        yield NOTE, text, remedy


# -- by which interface each worker is reached -------------------------------------------------------------------------
#
# A cable between two Macs is of use only if the worker's address in the layout is one on the cable. A ``.local`` name
# may have addresses on both, and macOS chooses which of them a connection takes.

_BRIDGE = "Thunderbolt Bridge"
_ON_THE_CABLE = (
    "put the other Mac's address on the cable into the layout: there, `ipconfig getifaddr bridge0` prints it"
)
_SET_ADDRESS = (
    f'sudo networksetup -setmanual "{_BRIDGE}" 10.77.0.1 255.255.255.0 here, the same with 10.77.0.2 on the other Mac, '
    "and these addresses in the layout"
)

_DETOURS = {
    Kind.WIRELESS: (
        "over Wi-Fi", NOTE, ": each token waits for it, 5 ms and more",
        "connect the machines by a Thunderbolt or Ethernet cable",
    ),
    Kind.VPN: (
        "through a VPN, such as Tailscale", WARNING, "", "use an address of the local network in the layout",
    ),
}  # fmt: skip


def _network(seen: SeenHere) -> Iterator[Judged]:
    for way in seen.ways:
        yield from _way(seen, way)
    if seen.is_mac:
        yield from _shared_network(seen)


def _way(seen: SeenHere, way: WayThere) -> Iterator[Judged]:
    name = f"{way.worker} ({way.host})"
    if way.own is None:
        yield FAILED, f"there is no route to {name}", "connect both machines to one network"
    found = None if way.own is None else interface_of(way.own, seen.interfaces)
    if found is None:
        return
    kind, interface = found.kind, found.name
    if kind in _DETOURS:
        yield _detour(seen, f"the link to {name} goes {_DETOURS[kind][0]} ({interface})", *_DETOURS[kind][1:])
    if seen.is_mac and way.address.startswith("169.254.") and kind is not Kind.THUNDERBOLT:
        # macOS keeps one route for all of 169.254.0.0/16, by its first interface: swellweb/targetBridge PR 130.
        text = f"{name} has a self-assigned address, which macOS looks for on {interface} and not on the cable"
        yield FAILED, text, _SET_ADDRESS


def _detour(seen: SeenHere, text: str, outcome: Outcome, more: str, remedy: str) -> Judged:
    """Return a way that need not be taken where there is a cable (exo #1723: Tailscale, 24 tokens a second became
    2.5)."""
    cabled = [port.mac for port in seen.read("thunderbolt", parsing.thunderbolt_ports) or () if port.mac]
    if cabled:
        return WARNING, f"{text}, while a Thunderbolt cable leads to {cabled[0]}", _ON_THE_CABLE
    return outcome, f"{text}{more}", remedy


def _shared_network(seen: SeenHere) -> Iterator[Judged]:
    """Yield a cable that got an address of the house's network: macOS may then send everything over it (dnet #66)."""
    networks = [(each, net) for each in seen.interfaces for net in each.networks if net.version == 4]
    for (ours, own), (other, theirs) in product(networks, networks):
        is_cable = (ours.kind is Kind.THUNDERBOLT, other.kind is Kind.THUNDERBOLT) == (True, False)
        if is_cable and own.network.overlaps(theirs.network):
            both = f"{ours.name} ({own.ip}) and {other.name} ({theirs.ip})"
            yield WARNING, f"{both} are in one network, so macOS may take the wrong way", _SET_ADDRESS
            return


# -- memory as macOS counts it -----------------------------------------------------------------------------------------
#
# Activity Monitor's *Memory Used* is the memory of programs, wired memory and what the compressor holds
# (``system.free_memory``). Weights that were swapped out come back from the disk at every token.
# ``iogpu.wired_limit_mb`` raises what the GPU may hold; that macOS needs 2 GiB besides is *assumed*.

_MUCH_SWAP = 2**30
_FOR_MACOS = 2 * 2**30
_LITTLE = 0.1  # of the memory, still available
_QUIT = "quit programs that you do not need, or give this machine fewer layers"


def _memory(seen: SeenHere) -> Iterator[Judged]:
    wired, swapped = seen.wired_limit or 0, size(seen.swapped)
    if seen.memory and wired > seen.memory - _FOR_MACOS:
        text = f"iogpu.wired_limit_mb is {wired // 2**20}, which leaves macOS less than 2 GiB of {size(seen.memory)}"
        yield WARNING, text, f"sudo sysctl iogpu.wired_limit_mb={good_wired_limit(seen.memory)}"
    if seen.swapped > _MUCH_SWAP:
        text = f"{swapped} are in swap files: a stage whose weights are there waits for the disk at each token"
        yield WARNING, text, _QUIT
    available = seen.available if seen.pages is None else seen.pages.available_bytes
    if seen.memory and available < _LITTLE * seen.memory:
        kinds = {} if seen.pages is None else seen.pages.by_category()
        used = ", ".join(f"{name} {size(kinds[name])}" for name in ("app memory", "wired", "compressed") if kinds)
        text = f"only {size(available)} of {size(seen.memory)} are available"
        yield WARNING, f"{text} ({used})" if used else text, _QUIT


def good_wired_limit(memory: int) -> int:
    """Return megabytes that the GPU of a Mac may wire where nothing else is to run: 85 % of its memory, in bytes."""
    return memory * 85 // 100 // 2**20


# -- what else of splitinfer runs --------------------------------------------------------------------------------------


def _processes(seen: SeenHere) -> Iterator[Judged]:
    if len(seen.processes) > 1:
        names = ", ".join(f"{each.command[0]} (pid {each.pid})" for each in seen.processes)
        text = f"{len(seen.processes)} processes of splitinfer share this machine's memory and GPU: {names}"
        yield NOTE, text, "end those that you do not need: kill PID"


# -- what others met: a slow macOS, a variable of MLX's ----------------------------------------------------------------


def _slow(seen: SeenHere) -> Iterator[Judged]:
    found = seen.read("macos", parsing.version)
    if found is not None and found >= (27,):  # exo #2166, omlx #1835, ds4 #845; the cure is of omlx #1835
        text = "on macOS 27 some Macs generate 4 to 10 times slower than they did on macOS 26"
        remedy = (
            "if this one does, set its energy mode in System Settings to Automatic, then to High Power again; "
            "install updates of macOS"
        )
        yield NOTE, text, remedy
    if seen.is_mac and seen.fast_synch:  # adurham/exo: 1.5 times slower; exo: GPUs hang together with RDMA
        text = "MLX_METAL_FAST_SYNCH is set, which made links slower for some and hung the GPU beside RDMA"
        yield WARNING, text, "unset MLX_METAL_FAST_SYNCH"


# -- sleep, low power mode, battery ------------------------------------------------------------------------------------
#
# A sleeping Mac answers nobody. splitinfer prevents idle sleep while it has work (``system.keep_awake``); a worker that
# waits for a coordinator does not. ``pmset`` sets for all power sources with ``-a`` and for mains with ``-c``
# (pmset(1)).


def _power(seen: SeenHere) -> Iterator[Judged]:
    settings = seen.read("power", parsing.power_settings)
    if settings is not None and settings.sleep and not settings.is_sleep_disabled:
        minutes = f"{settings.sleep} minute{'s' if settings.sleep > 1 else ''}"
        text = f"this Mac sleeps after {minutes} without a person at it, and then no coordinator reaches a worker here"
        yield WARNING, text, "sudo pmset -c sleep 0"
    if settings is not None and settings.is_low_power:
        text = "low power mode is on, which slows the processor and the GPU"
        yield WARNING, text, "sudo pmset -a lowpowermode 0"
    if settings is not None and settings.display_sleep:
        minutes = f"{settings.display_sleep} minute{'s' if settings.display_sleep > 1 else ''}"
        text = f"the display sleeps after {minutes}, and some Macs compute more slowly from then on"
        yield NOTE, text, "if this one does: sudo pmset -c displaysleep 0"
    if seen.battery is not None:
        yield (
            WARNING,
            f"this machine runs on its battery ({seen.battery} %): it sleeps earlier, and may be slower",
            "plug it in",
        )


# -- NVIDIA's GPUs on Linux --------------------------------------------------------------------------------------------

_MUCH_TAKEN = 0.5  # of its memory


def _nvidia(seen: SeenHere) -> Iterator[Judged]:
    """Yield NVIDIA's GPUs; nothing where there is no nvidia-smi."""
    output = seen.outputs.get("nvidia")
    if output is None or (output.text is None and output.why.startswith("there is no")):
        return
    found = parsing.gpus(output.text or "")
    if not found:
        why = " ".join((output.text or output.why).split())[:200]
        yield FAILED, f"nvidia-smi finds no GPU: {why}", "install or reload the driver, or start the machine anew"
        return
    if not seen.on_gpu:
        text = f"there is a GPU ({found[0].name}), but this MLX computes on the processor"
        yield WARNING, text, "pip install 'mlx[cuda13]'"
    for number, gpu in enumerate(found):
        if gpu.memory and gpu.used is not None and gpu.used > _MUCH_TAKEN * gpu.memory:
            text = f"{gpu.used} MiB of GPU {number}'s {gpu.memory} MiB are taken ({gpu.name})"
            yield WARNING, text, "nvidia-smi shows by whom; end what you do not need"


# -- all together ------------------------------------------------------------------------------------------------------

AREAS = {
    "firewall": _firewall, "local network": _privacy, "network": _network, "memory": _memory, "process": _processes,
    "speed": _slow, "power": _power, "gpu": _nvidia, "rdma": rdma_findings,
}  # fmt: skip


def every_finding(seen: SeenHere) -> list[Finding]:
    """Return every finding, the worst first; equal outcomes stay in the order of their areas."""
    found = [Finding(name, *judged) for name, area in AREAS.items() for judged in area(seen)]
    worst_first = list(Outcome)
    return sorted(found, key=lambda each: worst_first.index(each.outcome))
