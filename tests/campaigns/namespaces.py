"""Machines as network namespaces: what `splitinfer discover` and layouts with names say about workers in real networks.

    python -m tests.campaigns.namespaces [SCENE ...]      as root, on Linux, with iproute2

                 studio          mini            air
    thunderbolt0 10.77.0.1       10.77.0.2                       a cable
    eth0         192.168.7.1     192.168.7.2     192.168.7.3     a switch
    wlan0        192.168.8.1     192.168.8.2                     a switch, 4 ms away where the kernel has netem

Each scene prints what a person sees, and checks it. Machines have keys and settings of their own. Nothing of the host's
network is touched, and everything is gone at the end.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from processes import until

from splitinfer.discovery.announcement import Announcement, fingerprint_of
from splitinfer.discovery.announcer import to_line
from splitinfer.wire.messages import PROTOCOL_VERSION, Versions

ROOT = Path(__file__).parent.parent.parent
LAYERS = 12
PATIENCE = 60.0
VERSIONS = Versions(PROTOCOL_VERSION, "0.1.0", "0.32.2", "0.32.2")

ADDRESSES = {
    "studio": {"thunderbolt0": "10.77.0.1", "eth0": "192.168.7.1", "wlan0": "192.168.8.1"},
    "mini": {"thunderbolt0": "10.77.0.2", "eth0": "192.168.7.2", "wlan0": "192.168.8.2"},
    "air": {"eth0": "192.168.7.3"},
}
SWITCH = "switch"
SCENES: dict[str, Callable[["Network"], None]] = {}


def scene(run: Callable[["Network"], None]) -> Callable[["Network"], None]:
    SCENES[run.__name__] = run
    return run


def system(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, check=check, capture_output=True, text=True)


@dataclass
class Machine:
    """A namespace, with a home of its own."""

    name: str
    namespace: str
    home: Path
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def environment(self) -> dict[str, str]:
        known = {**os.environ, "HOME": str(self.home), "XDG_CONFIG_HOME": str(self.home / "config")}
        return known | {"XDG_CACHE_HOME": str(self.home / "cache"), "PYTHONUNBUFFERED": "1"}

    def command(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *words]

    def splitinfer(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = self.command(sys.executable, "-m", "splitinfer", *words)
        env = self.environment()
        return subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=300, check=False)

    def start(self, *words: str, log: Path, stdin: int | None = subprocess.DEVNULL) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self.command(sys.executable, *words),
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=log.open("w"),
            env=self.environment(),
            cwd=ROOT,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def worker(self, *words: str) -> subprocess.Popen[str]:
        """A real worker, once it listens."""
        log = self.home / f"worker{len(self.processes)}.log"
        named = words if "--name" in words else ("--name", self.name, *words)
        process = self.start("-m", "splitinfer", "worker", "--host", "0.0.0.0", "--kv-dir", "none", *named, log=log)
        until(lambda: "waits at" in log.read_text(), f"a worker on {self.name}: {log.read_text()}", PATIENCE)
        return process

    def announce(self, **changes: Any) -> None:
        """An announcement without a worker, of the real announcer: as another version would make it, or a machine that
        is gone."""
        made = Announcement(
            self.name, os.urandom(8).hex(), 5577, "0" * 32, VERSIONS, "Apple M4 Pro", 48 * 10**9, 40 * 10**9
        )
        log = self.home / "announcer.log"
        process = self.start("-m", "splitinfer.discovery.announcer", "0.0.0.0", log=log, stdin=subprocess.PIPE)
        assert process.stdin is not None
        process.stdin.write(to_line(replace(made, **changes)))
        process.stdin.flush()

    def key(self) -> str:
        return self.splitinfer("pair").stdout.split("key: ")[1].split()[0]

    def ip(self, *words: str) -> None:
        system("ip", "-n", self.namespace, *words)

    def end(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.processes.clear()


class Network:
    """The machines and their switches."""

    def __init__(self, home: Path) -> None:
        self._prefix = f"uf{os.getpid()}"
        self.home = home
        self.machines = {name: self._machine(name) for name in ADDRESSES}
        self._switch = self._namespace(SWITCH)
        for interface in ("thunderbolt0", "eth0", "wlan0"):
            system("ip", "-n", self._switch, "link", "add", f"br-{interface}", "type", "bridge", "mcast_snooping", "0")
            system("ip", "-n", self._switch, "link", "set", f"br-{interface}", "up")
        for name, addresses in ADDRESSES.items():
            for interface, address in addresses.items():
                self._connect(self.machines[name], interface, address)

    def __getitem__(self, name: str) -> Machine:
        return self.machines[name]

    def _namespace(self, name: str) -> str:
        full = f"{self._prefix}{name}"
        system("ip", "netns", "add", full)
        system("ip", "-n", full, "link", "set", "lo", "up")
        return full

    def _machine(self, name: str) -> Machine:
        home = self.home / name
        home.mkdir()
        return Machine(name, self._namespace(name), home)

    def _connect(self, machine: Machine, interface: str, address: str) -> None:
        end = self.port(machine, interface)
        system(
            "ip", "-n", machine.namespace, "link", "add", interface, "type", "veth", "peer", "name", end,
            "netns", self._switch,
        )  # fmt: skip
        system("ip", "-n", self._switch, "link", "set", end, "master", f"br-{interface}", "up")
        machine.ip("addr", "add", f"{address}/24", "dev", interface)
        machine.ip("link", "set", interface, "up")
        if interface == "wlan0":
            words = ("tc", "-n", machine.namespace, "qdisc", "add", "dev", interface, "root", "netem", "delay", "4ms")
            system(*words, check=False)

    def port(self, machine: Machine, interface: str) -> str:
        """The switch's end of a machine's cable."""
        return f"{machine.name}-{interface}"[:15]

    def pull(self, machine: Machine, interface: str) -> None:
        """Pull a cable: the switch's end goes down, and the machine's with it."""
        system("ip", "-n", self._switch, "link", "set", self.port(machine, interface), "down")
        machine.ip("link", "set", interface, "down")

    def plug(self, machine: Machine, interface: str) -> None:
        machine.ip("link", "set", interface, "up")
        system("ip", "-n", self._switch, "link", "set", self.port(machine, interface), "up")

    def block(self, *, blocked: bool) -> None:
        """Have the switches drop multicasts between machines, as a Wi-Fi with client isolation does."""
        for machine in self.machines.values():
            for interface in ADDRESSES[machine.name]:
                system(
                    "bridge", "-n", self._switch, "link", "set", "dev", self.port(machine, interface),
                    "mcast_flood", "off" if blocked else "on",
                )  # fmt: skip

    def end(self) -> None:
        for machine in self.machines.values():
            machine.end()
        for name in (*ADDRESSES, SWITCH):
            pids = system("ip", "netns", "pids", f"{self._prefix}{name}", check=False).stdout.split()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            system("ip", "netns", "del", f"{self._prefix}{name}", check=False)


def until_found(machine: Machine, text: str, *, is_there: bool = True) -> None:
    """Wait until `splitinfer discover` says a text, or says it no more."""
    until(
        lambda: (text in machine.splitinfer("discover", "--seconds", "2").stdout) is is_there,
        f"{text!r}: {is_there}",
        PATIENCE,
    )


def look(machine: Machine, *words: str) -> str:
    """What `splitinfer discover` says, printed."""
    done = machine.splitinfer("discover", *words)
    print("\n".join(f"    | {line}" for line in (done.stdout + done.stderr).splitlines()))
    return done.stdout


def says(text: str, *parts: str) -> None:
    for part in parts:
        assert part in text, f"{part!r} is missing"


def layout(network: Network, *stages: dict[str, object]) -> str:
    path = network.home / f"layout{len(list(network.home.glob('layout*')))}.yaml"
    path.write_text(json.dumps({"model": "demo", "stages": [{"name": "studio", "layers": 6}, *stages]}))
    return str(path)


def answer(network: Network, *stages: dict[str, object]) -> subprocess.CompletedProcess[str]:
    """What `coord` says with a layout, printed."""
    done = network["studio"].splitinfer(
        "coord", "--layout", layout(network, *stages), "--prompt", "Once upon", "--max-tokens", "8", "--kv-dir", "none"
    )
    print("\n".join(f"    | {line}" for line in (done.stderr + done.stdout).splitlines()))
    return done


@scene
def three_interfaces(network: Network) -> None:
    """Thunderbolt first; its cable pulled, the switch; that pulled, Wi-Fi; plugged in again, Thunderbolt."""
    studio, mini = network["studio"], network["mini"]
    mini.worker()
    says(look(studio), "mini", "tcp://10.77.0.2:5577 by Thunderbolt (thunderbolt0)", "also tcp://192.168.7.2:5577")
    network.pull(mini, "thunderbolt0")
    until_found(studio, "10.77.0.2", is_there=False)
    says(look(studio), "mini: tcp://192.168.", "192.168.7.2:5577", "192.168.8.2:5577")  # without netem they are equal
    network.pull(mini, "eth0")
    until_found(studio, "192.168.7.2", is_there=False)
    says(look(studio), "tcp://192.168.8.2:5577 by")
    for interface in ("thunderbolt0", "eth0"):
        network.plug(mini, interface)
    until_found(studio, "by Thunderbolt")
    says(look(studio), "tcp://10.77.0.2:5577 by Thunderbolt (thunderbolt0)")


@scene
def killed_worker(network: Network) -> None:
    """A worker that is killed is withdrawn by its announcer, which the end of a pipe tells."""
    process = network["mini"].worker()
    says(look(network["studio"]), "mini: tcp://")
    process.kill()
    until_found(network["studio"], "mini", is_there=False)
    says(look(network["studio"]), "no worker was found")


@scene
def stopped_worker(network: Network) -> None:
    """A worker that is stopped says goodbye: nobody who looks afterwards finds it."""
    process = network["mini"].worker()
    says(look(network["studio"]), "mini: tcp://")
    process.terminate()
    process.wait(PATIENCE)
    says(look(network["studio"]), "no worker was found")


@scene
def three_stages(network: Network) -> None:
    """studio has a cable to mini; air, between both in the layout, reaches mini only by the switch."""
    studio, mini, air = network["studio"], network["mini"], network["air"]
    for machine in (mini, air):
        machine.splitinfer("pair", studio.key())
        machine.worker()
    stages = ({"name": "air", "layers": 3, "key": air.key()}, {"name": "mini", "layers": 3, "key": mini.key()})
    done = answer(network, *stages)
    assert done.returncode == 0, done.stderr
    says(done.stderr, "stage air: found at tcp://192.168.7.3", "stage mini: found at tcp://192.168.7.2")


@scene
def how_soon(network: Network) -> None:
    """Seconds until a layout's name has its address, five times."""
    network["mini"].worker()
    for _ in range(5):
        done = subprocess.run(
            network["studio"].command(sys.executable, "-c", FIND, network["mini"].key()),
            capture_output=True, text=True, env=network["studio"].environment(), cwd=ROOT, timeout=300, check=False,
        )  # fmt: skip
        print(f"    | {done.stdout.strip()}{done.stderr.strip()}")
        assert "tcp://10.77.0.2:5577" in done.stdout


@scene
def dead_host(network: Network) -> None:
    """Announced, but nothing comes back from it: its answers go nowhere."""
    network["air"].announce()
    network["air"].ip("route", "add", "blackhole", "192.168.7.1/32")
    try:
        says(look(network["studio"]), "air: announced, but it does not answer", "192.168.7.3:5577: no answer for 1.5 s")
    finally:
        network["air"].ip("route", "del", "blackhole", "192.168.7.1/32")


@scene
def one_name_twice(network: Network) -> None:
    """Two workers named mini: listed apart, and a layout's key says which. The pipeline then answers over it."""
    studio, mini, air = network["studio"], network["mini"], network["air"]
    for machine in (mini, air):
        machine.splitinfer("pair", studio.key())
        machine.worker("--name", "mini")
    says(look(studio), "2 workers are named mini", "not known here")
    for machine, address in ((mini, "10.77.0.2"), (air, "192.168.7.3")):
        done = answer(network, {"name": "mini", "layers": 6, "key": machine.key()})
        assert done.returncode == 0, done.stderr
        says(done.stderr, f"found at tcp://{address}:5577")
    print("  by the name in the keyring, without a key in the layout:")
    studio.splitinfer("pair", air.key(), "--name", "mini")
    says(answer(network, {"name": "mini", "layers": 6}).stderr, "found at tcp://192.168.7.3:5577")
    says(look(studio), "known here as mini", "NOT the key that is known here under this name")


@scene
def impostor(network: Network) -> None:
    """Of a stage's name, but with another key; a stage without a key; a stage's fingerprint without its key."""
    studio, mini, air = network["studio"], network["mini"], network["air"]
    for machine in (mini, air):
        machine.splitinfer("pair", studio.key())
    mini.worker()
    print("  another key:")
    done = answer(network, {"name": "mini", "layers": 6, "key": air.key()})
    assert done.returncode == 1
    says(done.stderr, "has another key")
    print("  no key:")
    done = answer(network, {"name": "mini", "layers": 6})
    assert done.returncode == 1
    says(done.stderr, "has no address and no key")
    print("  the right fingerprint on a machine that has not the key:")
    mini.end()
    air.worker("--no-announce")
    fingerprint = fingerprint_of(mini.key())
    air.announce(name="mini", fingerprint=fingerprint)
    until_found(studio, "mini")
    done = answer(network, {"name": "mini", "layers": 6, "key": mini.key()})
    assert done.returncode == 1, "the impostor got a stage"


@scene
def other_version(network: Network) -> None:
    """A worker of another version is listed with what differs."""
    versions = Versions(PROTOCOL_VERSION + 1, "0.2.0", "0.33.0", "0.33.0")
    network["air"].worker("--no-announce")
    network["air"].announce(versions=versions)
    says(
        look(network["studio"]),
        f"(protocol {PROTOCOL_VERSION} here, protocol {PROTOCOL_VERSION + 1} there)",
        "splitinfer 0.2.0",
    )


@scene
def blocked(network: Network) -> None:
    """Multicasts do not get through: what was tried on each interface, and that an address works anyway."""
    mini, studio = network["mini"], network["studio"]
    mini.splitinfer("pair", studio.key())
    mini.worker()
    network.block(blocked=True)
    try:
        says(look(studio), "no worker was found", "Thunderbolt (thunderbolt0), 10.77.0.1: no device answered", "5353")
        done = answer(network, {"name": "mini", "layers": 6, "key": mini.key()})
        assert done.returncode == 1
        says(done.stderr, "no worker with the key of stage mini", "no device answered")
        done = answer(network, {"name": "mini", "layers": 6, "key": mini.key(), "address": "tcp://192.168.7.2:5577"})
        assert done.returncode == 0, done.stderr
    finally:
        network.block(blocked=False)


@scene
def nobody(network: Network) -> None:
    """No worker, but another device that speaks multicast DNS; then no interface."""
    studio = network["studio"]
    network["mini"].start("-c", RESPONDER, log=network.home / "responder.log")
    until_found(studio, "other device")
    says(look(studio), "1 other device answered, no worker", "no worker announces itself there")
    for interface in ADDRESSES["air"]:
        network["air"].ip("link", "set", interface, "down")
    says(look(network["air"]), "this machine has no network interface that is up")
    for interface in ADDRESSES["air"]:
        network["air"].ip("link", "set", interface, "up")


FIND = """
import sys, time
from splitinfer.config import Layout
from splitinfer.discovery.discover import find_stages
stages = [{"name": "studio", "layers": 6}, {"name": "mini", "layers": 6, "key": sys.argv[1]}]
layout, begun = Layout.from_dict({"stages": stages}), time.monotonic()
print(find_stages(layout).stages[1].address, f"{time.monotonic() - begun:.2f} s")
"""

RESPONDER = """
import socket, time, zeroconf
responder = zeroconf.Zeroconf(interfaces=["192.168.7.2"])
info = zeroconf.ServiceInfo("_ipp._tcp.local.", "printer._ipp._tcp.local.", port=631, server="printer.local.",
                            addresses=[socket.inet_aton("192.168.7.2")])
responder.register_service(info)
time.sleep(600)
"""


@contextlib.contextmanager
def opened() -> Iterator[Network]:
    with tempfile.TemporaryDirectory(prefix="uf") as home:
        network = Network(Path(home))
        try:
            yield network
        finally:
            network.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("scenes", nargs="*", metavar="SCENE", help=f"of {', '.join(SCENES)}; all if none is given")
    wanted = parser.parse_args().scenes or list(SCENES)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the namespaces are removed
    failed = []
    for name in wanted:
        print(f"{name}: {SCENES[name].__doc__}")
        with opened() as network:
            try:
                SCENES[name](network)
            except AssertionError as error:
                failed.append(name)
                print(f"  FAILED: {error}")
    print(f"{len(wanted) - len(failed)} of {len(wanted)} scenes as expected" + (f"; not: {failed}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
