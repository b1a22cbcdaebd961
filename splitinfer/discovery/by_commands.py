"""Browses and announces with the commands of the system's responder: Avahi's, or dns-sd of macOS.

    avahi-browse --resolve --terminate   ends by itself after a second; run again until the time is over
    avahi-publish --service, dns-sd -R   announce as long as they run
    dns-sd -Z                            lists without end, without addresses, which the system's resolver knows

Avahi's commands were run; dns-sd's behaviour is *assumed* from its manual page and source, since nobody here has a Mac.
Its manual warns that the form of its output may change.
"""

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
_READING = 0.2  # seconds for what it printed last
_MOST_OUTPUT = 2**20


class Avahi:
    """See ``means.Means``."""

    name = "avahi-browse"
    _BROWSE = ("avahi-browse", "--resolve", "--parsable", "--terminate", "--no-db-lookup", SERVICE)

    def browse(
        self, interfaces: Sequence[LocalInterface], put: Callable[[Sighting], None], is_over: Callable[[], bool]
    ) -> None:
        while not is_over():
            running = _Running(self._BROWSE)
            try:
                while not is_over() and not running.has_ended:
                    time.sleep(_WAIT)
                for sighting in avahi_sightings(running.text):
                    put(sighting)
                if running.has_ended and running.has_failed:
                    raise MeansFailed(f"avahi-browse failed: {running.complaint}")
            finally:
                running.end()
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
        running, done = _Running(("dns-sd", "-Z", SERVICE, "local")), set[Service]()
        try:
            while not is_over():
                has_ended = running.has_ended
                for service in set(zone_services(running.text)) - done:
                    done.add(service)
                    if sighting := _with_addresses(service):
                        put(sighting)
                if has_ended:  # it lists for ever, unless it fails
                    raise MeansFailed(f"dns-sd failed: {running.complaint}")
                time.sleep(_WAIT)
        finally:
            running.end()

    def announce(self, announcement: Announcement, addresses: Sequence[str]) -> "_Command":
        return _Command(announcement, lambda a: ("dns-sd", "-R", a.label, SERVICE, "local", str(a.port), *_texts(a)))


class _Command:
    """A command that announces as long as it runs. See ``means.Registration``."""

    def __init__(self, announcement: Announcement, command: Callable[[Announcement], Sequence[str]]) -> None:
        self._command = command
        self._running = _Running(command(announcement))

    def update(self, announcement: Announcement) -> None:
        self._running.end()
        self._running = _Running(self._command(announcement))

    def check(self) -> None:
        if self._running.has_ended:
            raise MeansFailed(f"what announces it has ended: {self._running.complaint}")

    def close(self) -> None:
        self._running.end()


class _Running:
    """A command that runs, and what it has printed so far, which threads of its own read.

    Raises:
        MeansFailed: it cannot be started.
    """

    def __init__(self, command: Sequence[str]) -> None:
        try:
            self._process = cleanup.start(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise MeansFailed(f"{command[0]} cannot be run: {error.strerror}") from error
        self._lock = threading.Lock()
        self._out, self._err = bytearray(), bytearray()
        self._readers = (self._reader(self._process.stdout, self._out), self._reader(self._process.stderr, self._err))

    def _reader(self, stream: IO[bytes] | None, text: bytearray) -> threading.Thread:
        assert stream is not None

        def read() -> None:
            with stream:
                for line in stream:
                    with self._lock:
                        if len(text) < _MOST_OUTPUT:
                            text.extend(line)

        thread = threading.Thread(target=read, name="reads a command", daemon=True)
        thread.start()
        return thread

    @property
    def has_ended(self) -> bool:
        """Whether the command has ended, and all that it printed was read."""
        return self._process.poll() is not None and not any(thread.is_alive() for thread in self._readers)

    @property
    def has_failed(self) -> bool:
        """Whether its exit code is another than 0."""
        return bool(self._process.returncode)

    @property
    def text(self) -> str:
        """Its standard output."""
        with self._lock:
            return self._out.decode(errors="replace")

    @property
    def complaint(self) -> str:
        """What it wrote to standard error, or to standard output, on one line."""
        with self._lock:
            text = (self._err or self._out).decode(errors="replace")
        return " ".join(text.split())[-300:] or "it said nothing"

    def end(self) -> None:
        """End it, by force if it does not end by itself."""
        self._process.terminate()
        try:
            self._process.wait(_ENDING)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._readers:
            thread.join(_READING)  # one that the command started may still hold its output


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
