"""Whether RDMA over Thunderbolt can work here: one finding, with a remedy, for each of its requirements. Pure.

It needs macOS 26.2 on Thunderbolt 5, at both ends of a cable; one ``rdma_ctl enable`` in Recovery; an active port; an
IPv4 address on that port's interface, which must not be in the Thunderbolt bridge; and an MLX that was built with
JACCL. A requirement that cannot be checked is unknown, and its finding gives the reason.
"""

from collections.abc import Iterator, Mapping, Sequence

from splitinfer.probes import parsing
from splitinfer.probes.evidence import SeenHere
from splitinfer.probes.finding import Finding, Judged, Outcome
from splitinfer.probes.parsing import Port
from splitinfer.system.interfaces import Interface, hardware_ports, parse_ifconfig
from transports.rdma.probe import ACTIVE, LEAST, LONG_FRAMES, parse_states

NAME = "RDMA over Thunderbolt"
LEAST_GIGABITS = 80.0  # of a link between two Thunderbolt 5 ports; Thunderbolt 4 makes 40
_ENABLE = (
    "start this Mac in Recovery, open its Terminal, run `rdma_ctl enable`, restart (not possible over the network)"
)
_CABLE = "connect the two Macs with a Thunderbolt 5 cable, port to port"
_LONG_UP = 7 * 86400.0  # seconds
_NO_DEVICES = "No IB devices found"  # the error of ibv_devinfo without devices


def requirements(seen: SeenHere) -> list[Finding]:
    """Return a finding for each requirement, in the order for a user to mend them. Return none except on macOS."""
    if not seen.is_mac:
        return []
    ports = seen.read("thunderbolt", parsing.thunderbolt_ports)
    states = {} if _NO_DEVICES in seen.outputs["states"].why else seen.read("states", parse_states)
    interfaces = seen.read("interfaces", parse_ifconfig)
    version = seen.read("macos", parsing.version)
    judged: dict[str, Judged] = {
        "macOS": _unknown(seen, "macos") if version is None else _macos(version),
        "Thunderbolt 5": _unknown(seen, "thunderbolt") if ports is None else _ports(ports),
        "cable to a Mac": _unknown(seen, "thunderbolt") if ports is None else _cable(ports),
        "rdma_ctl": _enabled(seen, ports),
        "active port": _no_states(seen) if states is None else _active(states, _how_to_enable(ports)),
        "Thunderbolt bridge": _unknown(seen, "interfaces") if interfaces is None else _bridge(seen, interfaces),
        "IPv4 address": _address(seen, states, interfaces),
        "MLX with JACCL": _jaccl(seen),
    }
    return [Finding(name, *each) for name, each in judged.items()]


def rdma_findings(seen: SeenHere) -> Iterator[Judged]:
    """Yield what may keep RDMA from working although its requirements are met."""
    found = seen.read("macos", parsing.version)
    is_enabled = seen.read("rdma", parsing.rdma_is_enabled)
    if is_enabled and found is not None and LEAST <= found < LONG_FRAMES:
        text = "RDMA of macOS 26.2 works only with a Mac that has 26.2, too: from 26.3 on its frames are longer"
        yield Outcome.NOTE, text, "update macOS on every Mac to 26.3 or later"
    if not is_enabled:
        return
    if seen.up > _LONG_UP:  # adurham/exo, docs/PERFORMANCE_HISTORY.md
        days = f"{seen.up / 86400:.0f} days"
        text = f"this Mac has run for {days}; RDMA was seen to get slower with each restart of what uses it"
        yield Outcome.NOTE, text, "if its links are slower than they were, restart both Macs"
    yield from _cables(seen)


def _cables(seen: SeenHere) -> Iterator[Judged]:
    """Yield cables that RDMA has trouble with: two to one Mac (exo #2160), one at the port beside a Studio's Ethernet
    (exo #1551), which macOS calls en2."""
    ports = [port for port in seen.read("thunderbolt", parsing.thunderbolt_ports) or () if port.mac is not None]
    devices = seen.read("hardware_ports", hardware_ports) or {}
    names = [port.mac for port in ports]
    for name in sorted({name for name in names if name and names.count(name) > 1}):
        text = f"{names.count(name)} Thunderbolt cables lead to {name}: if that is one Mac, RDMA can hang under load"
        yield Outcome.WARNING, text, "leave one cable between two Macs"
    for port in ports:
        if port.model == "Mac Studio" and devices.get(f"Thunderbolt {port.receptacle}") == "en2":
            text = f"the cable to {port.mac} is in the port next to Ethernet (en2), which has no RDMA on a Mac Studio"
            yield Outcome.WARNING, text, "plug it into another Thunderbolt port"


def verdict(found: Sequence[Finding]) -> Finding:
    """Return the requirements summed up; its numbers are the outcome of each."""
    missing = [each.name for each in found if each.outcome is Outcome.FAILED]
    unknown = [each.name for each in found if each.outcome is Outcome.UNKNOWN]
    if not found:
        outcome, text = Outcome.NOT_AVAILABLE, "Not available: needs macOS. Links between machines use TCP."
    elif missing:
        outcome, text = Outcome.NOT_AVAILABLE, f"Not available. Missing: {', '.join(missing)}."
    elif unknown:
        outcome, text = Outcome.UNKNOWN, f"May work. Could not check: {', '.join(unknown)}."
    else:
        outcome, text = Outcome.PASSED, "Available."
    return Finding(NAME, outcome, text, numbers={each.name: str(each.outcome) for each in found})


def _right(text: str) -> Judged:
    return Outcome.PASSED, text, ""


def _wrong(text: str, remedy: str = "") -> Judged:
    return Outcome.FAILED, text, remedy


def _unknown(seen: SeenHere, name: str, remedy: str = "") -> Judged:
    """Return what is said where a command failed, or its output cannot be parsed."""
    return Outcome.UNKNOWN, seen.outputs[name].why or f"the output of {name} cannot be read", remedy


def _macos(version: tuple[int, ...]) -> Judged:
    here, least = ".".join(map(str, version)), ".".join(map(str, LEAST))
    if version >= LEAST:
        return _right(f"macOS {here}; RDMA needs {least}")
    return _wrong(f"macOS {here} is too old: RDMA needs {least}", "update macOS on every Mac")


def _ports(ports: Sequence[Port]) -> Judged:
    if not ports:
        return _wrong("this machine has no Thunderbolt port")
    most = max((port.gigabits for port in ports if port.gigabits is not None), default=None)
    count = "1 port" if len(ports) == 1 else f"{len(ports)} ports"
    if most is None:
        return Outcome.UNKNOWN, f"{count}, none of which reports its speed", ""
    if most >= LEAST_GIGABITS:
        return _right(f"{count} of up to {most:g} Gb/s")
    if _is_older(ports):
        text = f"the ports make {most:g} Gb/s, so they are Thunderbolt 4 or older, and have no RDMA"
        return _wrong(text, "use tcp:// over the Thunderbolt bridge or Ethernet on this Mac")
    text = f"all ports are in use, at {most:g} Gb/s at most, which does not tell what they could make"
    return Outcome.UNKNOWN, text, "look again with one port free"


def _cable(ports: Sequence[Port]) -> Judged:
    macs = [port for port in ports if port.mac is not None]
    if not macs:
        return _wrong("no other Mac is connected by Thunderbolt", _CABLE)
    best = max(macs, key=lambda port: port.gigabits or 0.0)
    where = f"{best.mac} at receptacle {best.receptacle}"
    if best.gigabits is None:
        return Outcome.UNKNOWN, f"{where}, at an unknown speed", ""
    if best.gigabits >= LEAST_GIGABITS:
        return _right(f"{where}, {best.gigabits:g} Gb/s")
    return _wrong(f"{where} makes {best.gigabits:g} Gb/s: the cable or the other Mac is not Thunderbolt 5", _CABLE)


def _how_to_enable(ports: Sequence[Port] | None) -> str:
    """Return the remedy where RDMA is not enabled; on Thunderbolt 4 a visit to Recovery would be in vain (exo
    #1636)."""
    return "leave it so: these ports have no RDMA" if _is_older(ports or ()) else _ENABLE


def _is_older(ports: Sequence[Port]) -> bool:
    """Return whether the ports are known to be Thunderbolt 4 or older. A free port tells its highest speed."""
    speeds = [port.gigabits for port in ports if port.gigabits is not None]
    return bool(speeds) and max(speeds) < LEAST_GIGABITS and any(not port.is_connected for port in ports)


def _enabled(seen: SeenHere, ports: Sequence[Port] | None) -> Judged:
    output, is_enabled = seen.outputs["rdma"], seen.read("rdma", parsing.rdma_is_enabled)
    if output.text is None and output.why.startswith("there is no"):
        return _wrong(f"{output.why}: it came with macOS 26.2", "update macOS")
    if is_enabled is None:
        return _unknown(seen, "rdma")
    return _right("RDMA is enabled") if is_enabled else _wrong("RDMA is not enabled", _how_to_enable(ports))


def _no_states(seen: SeenHere) -> Judged:
    hangs = "has not answered" in seen.outputs["states"].why
    return _unknown(seen, "states", "unplug the cable and plug it in again, or restart" if hangs else "")


def _active(states: Mapping[str, str], how_to_enable: str) -> Judged:
    if active := _active_devices(states):
        return _right(", ".join(active))
    if not states:
        return _wrong("ibv_devinfo lists no port, as on Thunderbolt 4, and before RDMA is enabled", how_to_enable)
    down = ", ".join(f"{name} {state}" for name, state in states.items())
    remedy = f"{_CABLE}, and enable RDMA on the other Mac too: a port is down until both have it"
    return _wrong(f"no port is active ({down})", remedy)


def _active_devices(states: Mapping[str, str]) -> list[str]:
    return [name for name, state in states.items() if state == ACTIVE]


def _bridge(seen: SeenHere, interfaces: Mapping[str, Interface]) -> Judged:
    names = seen.read("hardware_ports", hardware_ports) or {}
    kinds, bridge = {device: port for port, device in names.items()}, names.get("Thunderbolt Bridge", "bridge0")
    if bridge not in interfaces:
        return _right("there is none")
    members = interfaces[bridge].members  # one of unknown kind is taken for a Thunderbolt port
    ports = [name for name in members if kinds.get(name, "Thunderbolt").startswith("Thunderbolt")]
    if not interfaces[bridge].is_up or not ports:
        return _right(f"{bridge} is down" if ports else f"{bridge} holds no Thunderbolt port")
    remedy = (
        f"turn Thunderbolt Bridge off in the network settings, or until the next start: sudo ifconfig {bridge} down; "
        "then give each port an address of its own"
    )
    return _wrong(f"{bridge} holds {', '.join(ports)}, which RDMA cannot use then", remedy)


def _address(seen: SeenHere, states: Mapping[str, str] | None, interfaces: Mapping[str, Interface] | None) -> Judged:
    if states is None or interfaces is None:
        return _unknown(seen, "interfaces" if interfaces is None else "states")
    ports = [name.removeprefix("rdma_") for name in _active_devices(states) or states]
    if not ports:
        return Outcome.UNKNOWN, "without an RDMA device it is unknown which interface needs one", ""
    have = [f"{port} {interfaces[port].ipv4[0]}" for port in ports if port in interfaces and interfaces[port].ipv4]
    if have:
        return _right(", ".join(have))
    text = f"{', '.join(ports)} {'has' if len(ports) == 1 else 'have'} no IPv4 address, by which RDMA finds its way"
    remedy = (
        f"give both ends of the cable one of a network of their own, such as sudo ifconfig {ports[0]} inet "
        "192.168.90.1 netmask 255.255.255.252 here and .2 there (for good: in the network settings)"
    )
    return _wrong(text, remedy)


def _jaccl(seen: SeenHere) -> Judged:
    text = "this MLX was built without JACCL: only its wheels for macOS 26 and later have it"
    remedy = "on macOS 26.2 or later, install mlx again: pip install --force-reinstall mlx"
    return _right("this MLX was built with it") if seen.has_jaccl else _wrong(text, remedy)
