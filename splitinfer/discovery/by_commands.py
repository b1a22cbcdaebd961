"""Browses and announces with the commands of the system's responder: Avahi's, or dns-sd of macOS.

    avahi-browse --resolve --terminate   ends by itself after a second; run again until the time is over
    avahi-publish --service, dns-sd -R   announce as long as they run
    dns-sd -Z                            lists without end, without addresses, which the system's resolver knows

Avahi's commands were run; dns-sd's behaviour is *assumed* from its manual page and source, since nobody here has a Mac.
Its manual warns that the form of its output may change.
"""

import queue
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO

from splitinfer import cleanup
from splitinfer.discovery.announcement import SERVICE, Announcement, from_strings, to_strings
from splitinfer.discovery.means import MeansFailed
from splitinfer.discovery.parsing import Service, avahi_sightings, zone_services
from splitinfer.discovery.workers import Sighting
from splitinfer.system.interface_kind import LocalInterface

_WAIT = 0.1  # seconds between two questions whether it is over
_BETWEEN = 0.5  # seconds between two runs of avahi-browse
_ENDING = 2.0  # seconds for a command to end
_MOST_OUTPUT = 2**20


class Avahi:
    """See ``means.Means``."""

    name = "avahi-browse"
    _BROWSE = ("avahi-browse", "--resolve", "--parsable", "--terminate", "--no-db-lookup", SERVICE)

    def browse(
        self, interfaces: Sequence[LocalInterface], put: Callable[[Sighting], None], is_over: Callable[[], bool]
    ) -> None:
        while not is_over():
            process = _start(self._BROWSE)
            lines = _Lines(process)
            while not is_over() and not lines.are_all_read:
                time.sleep(_WAIT)
            failed = lines.are_all_read and process.wait() != 0
            _end(process)
            for sighting in avahi_sightings(lines.text):
                put(sighting)
            if failed:
                raise MeansFailed(f"avahi-browse failed: {lines.complaint}")
            _pause(is_over)

    def announce(self, announcement: Announcement, addresses: Sequence[str]) -> "_Command":
        return _Command(
            announcement, lambda a: ("avahi-publish", "--service", a.label, SERVICE, str(a.port), *_texts(a))
        )


class DnsSd:
    """See ``means.Means``."""

    name = "dns-sd"

    def browse(
        self, interfaces: Sequence[LocalInterface], put: Callable[[Sighting], None], is_over: Callable[[], bool]
    ) -> None:
        process = _start(("dns-sd", "-Z", SERVICE, "local"))
        lines, done = _Lines(process), set[Service]()
        try:
            while not is_over():
                for service in set(zone_services(lines.text)) - done:
                    done.add(service)
                    if sighting := _with_addresses(service):
                        put(sighting)
                if lines.are_all_read:  # it lists for ever, unless it fails
                    raise MeansFailed(f"dns-sd failed: {lines.complaint}")
                time.sleep(_WAIT)
        finally:
            _end(process)

    def announce(self, announcement: Announcement, addresses: Sequence[str]) -> "_Command":
        return _Command(announcement, lambda a: ("dns-sd", "-R", a.label, SERVICE, "local", str(a.port), *_texts(a)))


class _Command:
    """A command that announces as long as it runs. See ``means.Registration``."""

    def __init__(self, announcement: Announcement, command: Callable[[Announcement], Sequence[str]]) -> None:
        self._command = command
        self._process, self._lines = self._run(announcement)

    def update(self, announcement: Announcement) -> None:
        _end(self._process)
        self._process, self._lines = self._run(announcement)

    def check(self) -> None:
        if self._process.poll() is not None:
            raise MeansFailed(f"what announces it has ended: {self._lines.complaint}")

    def close(self) -> None:
        _end(self._process)

    def _run(self, announcement: Announcement) -> "tuple[subprocess.Popen[bytes], _Lines]":
        process = _start(self._command(announcement))
        return process, _Lines(process)


class _Lines:
    """What a command has printed so far, read in threads of its own."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._parts: dict[str, queue.SimpleQueue[bytes]] = {"out": queue.SimpleQueue(), "err": queue.SimpleQueue()}
        self._texts = {"out": b"", "err": b""}
        assert process.stdout is not None
        assert process.stderr is not None
        self._threads = [self._thread("out", process.stdout), self._thread("err", process.stderr)]

    def _thread(self, which: str, stream: IO[bytes]) -> threading.Thread:
        def read() -> None:
            for line in stream:
                self._parts[which].put(line)

        thread = threading.Thread(target=read, name=f"reads {which}", daemon=True)
        thread.start()
        return thread

    @property
    def are_all_read(self) -> bool:
        """Whether the command has closed its output, which it does when it ends."""
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def text(self) -> str:
        """Its standard output."""
        return self._read("out")

    @property
    def complaint(self) -> str:
        """What it wrote to standard error, or to standard output, on one line."""
        return " ".join((self._read("err") or self._read("out")).split())[-300:] or "it said nothing"

    def _read(self, which: str) -> str:
        while not self._parts[which].empty():
            part = self._parts[which].get()
            if len(self._texts[which]) < _MOST_OUTPUT:
                self._texts[which] += part
        return self._texts[which].decode(errors="replace")


def _start(command: Sequence[str]) -> "subprocess.Popen[bytes]":
    try:
        return cleanup.start(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        raise MeansFailed(f"{command[0]} cannot be run: {error.strerror}") from error


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(_ENDING)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _pause(is_over: Callable[[], bool]) -> None:
    until = time.monotonic() + _BETWEEN
    while time.monotonic() < until and not is_over():
        time.sleep(_WAIT)


def _texts(announcement: Announcement) -> tuple[str, ...]:
    return tuple(each.decode() for each in to_strings(announcement))


def _with_addresses(service: Service) -> Sighting | None:
    """An instance with its host's addresses, as the system resolves them; ``None`` if it is none of a worker."""
    announcement = from_strings(service.strings, service.port)
    if announcement is None:
        return None
    try:
        found = socket.getaddrinfo(service.host.rstrip("."), service.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return Sighting(announcement, ())
    return Sighting(announcement, tuple(dict.fromkeys(str(each[4][0]) for each in found)))
