"""Writes the steps to a trace file, for ui.perfetto.dev or chrome://tracing.

The file is a JSON array of trace events, one to a line, in which the closing bracket may be missing, so it can be
opened while it grows and after a crash. There is a track for each stage and one for each link, in the order in which a
step passes them, all on the coordinator's clock. Events on a track never overlap, or viewers would draw one below the
other:

    front            [ step 1 ][ step 2 ]
    front to back              [1]        [2]
    back                          [ step 1 ][ step 2 ]
    back to front                           [1]        [2]

A link delivers its frames in order, so a frame's event begins when the frame before it has arrived; ``way_ms`` is the
time since it was sent itself. ``waited_us`` is how long a step waited in a stage's inbox.
"""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitinfer.core.json_text import dumps
from splitinfer.core.metrics.gaps import Visit
from splitinfer.errors import ConfigError

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 30
_PROCESS = 1


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One step through all stages and back; seconds on the coordinator's clock.

    ``visits`` and ``bytes_sent``: one for each stage. ``sent`` and ``heard``: when the result was sent and received.
    """

    number: int
    kind: str
    num_sequences: int
    tokens: int
    useful: int
    visits: Sequence[Visit]
    bytes_sent: Sequence[int]
    sent: float
    heard: float


class Trace:
    """Writes the steps to ``path``, from one thread; may be closed from another.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._zero = time.monotonic_ns()
        self._num_bytes = 0
        self._until: list[int] = []  # by track: where its last event ends, in nanoseconds since the beginning
        try:
            self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - lives as long as this
        except OSError as error:
            why = error.strerror or str(error)
            raise ConfigError(f"the trace cannot be written to {path} ({why}); name another file") from error
        self._write(b"[\n" + _encoded(_meta("process_name", 0, name="splitinfer")))

    def begin(self, names: Sequence[str]) -> None:
        """Name the tracks: stage, link, stage, link ... A single stage has no link."""
        tracks = []
        for here, there in zip(names, (*names[1:], names[0]), strict=True):
            tracks += [here] if len(names) == 1 else [here, f"{here} to {there}"]
        self._until = [0] * len(tracks)
        self._write(b"".join(b",\n" + _encoded(line) for line in _name_tracks(tracks)))

    def step(self, step: TracedStep) -> None:
        """Write one step."""
        if self._file.closed:
            return
        lines = [*self._stages(step), *(self._links(step) if len(step.visits) > 1 else ())]
        self._write("".join(lines).encode())

    def close(self) -> None:
        """Close the array and the file."""
        with self._lock:
            if not self._file.closed:
                self._put(b"\n]\n")
                self._file.close()

    def _stages(self, step: TracedStep) -> Iterator[str]:
        about = f'"step":{step.number},"sequences":{step.num_sequences},"tokens":{step.tokens},"useful":{step.useful}'
        spacing = 2 if len(step.visits) > 1 else 1
        for i, visit in enumerate(step.visits):
            args = f'{about},"bytes_sent":{step.bytes_sent[i]}'
            if i:
                args += f',"waited_us":{(visit.start - visit.received) * 1e6:.1f}'
            yield self._event(spacing * i, f"{step.kind} {step.number}", step.kind, visit.start, visit.end, args)

    def _links(self, step: TracedStep) -> Iterator[str]:
        ways = [(visit.sent, visit.received) for visit in step.visits[1:]] + [(step.sent, step.heard)]
        for i, (sent, received) in enumerate(ways):
            args = f'"step":{step.number},"bytes":{step.bytes_sent[i]},"way_ms":{(received - sent) * 1e3:.3f}'
            yield self._event(2 * i + 1, f"frame {step.number}", "link", sent, received, args)

    def _event(self, track: int, name: str, category: str, start: float, end: float, args: str) -> str:
        """One event, cut where it would overlap the one before it; microseconds with three places."""
        begin = max(int(start * 1e9) - self._zero, self._until[track])
        until = self._until[track] = max(int(end * 1e9) - self._zero, begin)
        return (
            f',\n{{"name":"{name}","cat":"{category}","ph":"X","pid":{_PROCESS},"tid":{track + 1},'
            f'"ts":{begin / 1e3:.3f},"dur":{(until - begin) / 1e3:.3f},"args":{{{args}}}}}'
        )

    def _write(self, data: bytes) -> None:
        with self._lock:
            if not self._file.closed:
                self._put(data)

    def _put(self, data: bytes) -> None:
        """Write whole lines at once, so that a process that dies leaves no partial line."""
        try:
            self._file.write(data)
        except OSError as error:
            log.warning("the trace ends here: %s cannot be written (%s)", self.path, error.strerror)
            self._file.close()
            return
        self._num_bytes += len(data)
        if self._num_bytes > MAX_BYTES:
            log.warning(
                "the trace ends here: %s has %d bytes, and viewers cannot open much more", self.path, self._num_bytes
            )
            self._file.write(b"\n]\n")
            self._file.close()


def _name_tracks(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    for i, name in enumerate(names):
        yield _meta("thread_name", i + 1, name=name)
        yield _meta("thread_sort_index", i + 1, sort_index=i)


def _meta(what: str, track: int, **args: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": _PROCESS, "tid": track, "args": args}


def _encoded(event: dict[str, Any]) -> bytes:
    return dumps(event).encode(errors="replace")
