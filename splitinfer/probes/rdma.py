"""Whether RDMA over Thunderbolt can work here: one finding, with a remedy, for each of its requirements. Pure.

It needs macOS 26.2 on Thunderbolt 5, at both ends of a cable; to be enabled once, from Recovery; an active port; an
IPv4 address on that port's interface, which must not be in the Thunderbolt bridge; and an MLX that was built with
JACCL. A requirement that cannot be checked is unknown, and its finding gives the reason.
"""

from collections.abc import Iterator, Mapping, Sequence

from splitinfer.probes import parsing
from splitinfer.probes.evidence import Seen
from splitinfer.probes.finding import Finding, Outcome
from splitinfer.probes.parsing import Port
from splitinfer.system import network
from splitinfer.system.network import Interface
from transports.rdma.macos import LONG_FRAMES
from transports.rdma.probe import parse_devices, parse_states

NAME = "RDMA over Thunderbolt"
LEAST_MACOS = (26, 2)
LEAST_GIGABITS = 80.0  # of a link between two Thunderbolt 5 ports; Thunderbolt 4 makes 40
_ENABLE = (
    "start this Mac in Recovery, open its Terminal, run `rdma_ctl enable`, restart (not possible over the network)"
)
_CABLE = "connect the two Macs with a Thunderbolt 5 cable, port to port"
_NO_DEVICES = "No IB devices found"  # the error of ibv_devinfo without devices


def requirements(seen: Seen) -> list[Finding]:
    """One finding for each requirement, in the order in which a user would mend them; none on another system."""
    if not seen.is_mac:
        return []
    ports = seen.read("thunderbolt", parsing.thunderbolt_ports)
    has_none = _NO_DEVICES in seen.outputs["states"].why
    states = {} if has_none else seen.read("states", parse_states)
    interfaces = seen.read("interfaces", network.interfaces)
    return [
        _macos(seen),
        _ports(seen, ports),
        _cable(seen, ports),
        _enabled(seen),
        _devices(seen),
        _active(seen, states),
        _bridge(seen, interfaces),
        _address(seen, states, interfaces),
        _jaccl(seen),
        _fast_synch(seen),
    ]


def rdma_findings(seen: Seen) -> Iterator[Finding]:
    """What may keep RDMA from working although its requirements are met."""
    found = seen.read("macos", parsing.version)
    is_enabled = seen.read("rdma", parsing.rdma_is_enabled)
    if is_enabled and found is not None and LEAST_MACOS <= found < LONG_FRAMES:
        text = "RDMA of macOS 26.2 works only with a Mac that has 26.2, too: from 26.3 on its frames are longer"
        yield Finding("rdma", Outcome.NOTE, text, "update macOS on every Mac to 26.3 or later")
    if seen.killed_in_rdma:
        yield Finding("rdma", Outcome.WARNING, seen.killed_in_rdma, "sudo shutdown -r now")


def verdict(found: Sequence[Finding]) -> Finding:
    """The requirements summed up; its numbers are the outcome of each."""
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


def _unknown(about: str, seen: Seen, name: str) -> Finding:
    """The finding where a command failed, or its output cannot be parsed."""
    return Finding(about, Outcome.UNKNOWN, seen.outputs[name].why or f"the output of {name} cannot be read")


def _macos(seen: Seen) -> Finding:
    found = seen.read("macos", parsing.version)
    if found is None:
        return _unknown("macOS", seen, "macos")
    here, least = ".".join(map(str, found)), ".".join(map(str, LEAST_MACOS))
    if found >= LEAST_MACOS:
        return Finding("macOS", Outcome.PASSED, f"macOS {here}; RDMA needs {least}")
    return Finding("macOS", Outcome.FAILED, f"macOS {here} is too old: RDMA needs {least}", "update macOS on every Mac")


def _ports(seen: Seen, ports: Sequence[Port] | None) -> Finding:
    about = "Thunderbolt 5"
    if ports is None:
        return _unknown(about, seen, "thunderbolt")
    if not ports:
        return Finding(about, Outcome.FAILED, "this machine has no Thunderbolt port")
    speeds = [port.gigabits for port in ports if port.gigabits is not None]
    if not speeds:
        return Finding(about, Outcome.UNKNOWN, f"{len(ports)} ports, none of which reports its speed")
    if max(speeds) >= LEAST_GIGABITS:
        return Finding(about, Outcome.PASSED, f"{_ports_in_words(len(ports))} of up to {max(speeds):g} Gb/s")
    if any(not port.is_connected for port in ports):
        text = f"the ports make {max(speeds):g} Gb/s, so they are Thunderbolt 4 or older, and have no RDMA"
        return Finding(about, Outcome.FAILED, text, "use tcp:// over the Thunderbolt bridge or Ethernet on this Mac")
    text = f"all ports are in use, at {max(speeds):g} Gb/s at most, which does not tell what they could make"
    return Finding(about, Outcome.UNKNOWN, text, "look again with one port free")


def _ports_in_words(count: int) -> str:
    return "1 port" if count == 1 else f"{count} ports"


def _cable(seen: Seen, ports: Sequence[Port] | None) -> Finding:
    about = "cable to a Mac"
    if ports is None:
        return _unknown(about, seen, "thunderbolt")
    macs = [port for port in ports if port.mac is not None]
    if not macs:
        return Finding(about, Outcome.FAILED, "no other Mac is connected by Thunderbolt", _CABLE)
    best = max(macs, key=lambda port: port.gigabits or 0.0)
    where = f"{best.mac} at receptacle {best.receptacle}"
    if best.gigabits is None:
        return Finding(about, Outcome.UNKNOWN, f"{where}, at an unknown speed")
    if best.gigabits >= LEAST_GIGABITS:
        return Finding(about, Outcome.PASSED, f"{where}, {best.gigabits:g} Gb/s")
    text = f"{where} makes {best.gigabits:g} Gb/s: the cable or the other Mac is not Thunderbolt 5"
    return Finding(about, Outcome.FAILED, text, _CABLE)


def _enabled(seen: Seen) -> Finding:
    about = "rdma_ctl"
    output = seen.outputs["rdma"]
    if output.text is None and output.why.startswith("there is no"):
        return Finding(about, Outcome.FAILED, f"{output.why}: it came with macOS 26.2", "update macOS")
    is_enabled = seen.read("rdma", parsing.rdma_is_enabled)
    if is_enabled is None:
        return _unknown(about, seen, "rdma")
    if is_enabled:
        return Finding(about, Outcome.PASSED, "RDMA is enabled")
    return Finding(about, Outcome.FAILED, "RDMA is not enabled", _ENABLE)


def _devices(seen: Seen) -> Finding:
    about = "RDMA devices"
    devices = seen.read("devices", parse_devices)
    if devices is None:
        return _unknown(about, seen, "devices")
    if devices:
        return Finding(about, Outcome.PASSED, ", ".join(devices))
    text = "ibv_devices lists none, as on Thunderbolt 4, whatever rdma_ctl says, and before RDMA is enabled"
    return Finding(about, Outcome.FAILED, text, _ENABLE)


def _active(seen: Seen, states: Mapping[str, str] | None) -> Finding:
    about = "active port"
    if states is None:
        found = _unknown(about, seen, "states")
        hangs = "has not answered" in found.sentence
        return Finding(
            about, found.outcome, found.sentence, "unplug the cable and plug it in again, or restart" if hangs else ""
        )
    active = _active_devices(states)
    if active:
        return Finding(about, Outcome.PASSED, ", ".join(active))
    if not states:
        return Finding(about, Outcome.FAILED, "ibv_devinfo lists no port", _ENABLE)
    down = ", ".join(f"{name} {state}" for name, state in states.items())
    remedy = f"{_CABLE}, and enable RDMA on the other Mac too: a port is down until both have it"
    return Finding(about, Outcome.FAILED, f"no port is active ({down})", remedy)


def _active_devices(states: Mapping[str, str]) -> list[str]:
    return [name for name, state in states.items() if state == "PORT_ACTIVE"]


def _bridge(seen: Seen, interfaces: Mapping[str, Interface] | None) -> Finding:
    about = "Thunderbolt bridge"
    if interfaces is None:
        return _unknown(about, seen, "interfaces")
    names = seen.read("hardware_ports", network.hardware_ports) or {}
    bridge = names.get("Thunderbolt Bridge", "bridge0")
    if bridge not in interfaces:
        return Finding(about, Outcome.PASSED, "there is none")
    ports = [name for name in interfaces[bridge].members if _is_thunderbolt(name, names)]
    if not interfaces[bridge].is_up or not ports:
        return Finding(about, Outcome.PASSED, f"{bridge} is down" if ports else f"{bridge} holds no Thunderbolt port")
    remedy = (
        f"turn Thunderbolt Bridge off in the network settings, or until the next start: sudo ifconfig {bridge} down; "
        "then give each port an address of its own"
    )
    return Finding(about, Outcome.FAILED, f"{bridge} holds {', '.join(ports)}, which RDMA cannot use then", remedy)


def _is_thunderbolt(interface: str, names: Mapping[str, str]) -> bool:
    """Whether an interface is a Thunderbolt port; one of unknown kind is taken for one."""
    known = {device: port for port, device in names.items()}
    return known.get(interface, "Thunderbolt").startswith("Thunderbolt")


def _address(seen: Seen, states: Mapping[str, str] | None, interfaces: Mapping[str, Interface] | None) -> Finding:
    about = "IPv4 address"
    if states is None or interfaces is None:
        return _unknown(about, seen, "interfaces" if interfaces is None else "states")
    ports = [name.removeprefix("rdma_") for name in _active_devices(states) or states]
    if not ports:
        return Finding(about, Outcome.UNKNOWN, "without an RDMA device it is unknown which interface needs one")
    have = [f"{port} {interfaces[port].ipv4[0]}" for port in ports if port in interfaces and interfaces[port].ipv4]
    if have:
        return Finding(about, Outcome.PASSED, ", ".join(have))
    text = f"{', '.join(ports)} {'has' if len(ports) == 1 else 'have'} no IPv4 address, by which RDMA finds its way"
    remedy = (
        f"give both ends of the cable one of a network of their own, such as sudo ifconfig {ports[0]} inet "
        "192.168.90.1 netmask 255.255.255.252 here and .2 there (for good: in the network settings)"
    )
    return Finding(about, Outcome.FAILED, text, remedy)


def _jaccl(seen: Seen) -> Finding:
    if seen.has_jaccl:
        return Finding("MLX with JACCL", Outcome.PASSED, "this MLX was built with it")
    text = "this MLX was built without JACCL: only its wheels for macOS 26 and later have it"
    return Finding(
        "MLX with JACCL",
        Outcome.FAILED,
        text,
        "on macOS 26.2 or later, install mlx again: pip install --force-reinstall mlx",
    )


def _fast_synch(seen: Seen) -> Finding:
    value = seen.environment.get("MLX_METAL_FAST_SYNCH", "")
    if value in ("", "0"):
        return Finding("MLX_METAL_FAST_SYNCH", Outcome.PASSED, "is not set")
    text = f"is set to {value!r:.20}; GPUs have hung with it until the next start of the machine"
    return Finding("MLX_METAL_FAST_SYNCH", Outcome.FAILED, text, "unset MLX_METAL_FAST_SYNCH")
