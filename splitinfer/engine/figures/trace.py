"""Writes the steps to a trace file, for ui.perfetto.dev or chrome://tracing.

The file is a JSON array of trace events, one on each line. Its closing bracket may be missing, so viewers can open it
while it grows and after a crash. Each stage and each link has a track, in the order of a step's way, all on the
coordinator's clock. Events on a track never overlap, because viewers would draw them below each other: a frame's event
begins when the previous frame has arrived, and ``way_ms`` is the time since the frame was sent. ``waited_us`` is the
time that a step waited in a stage's inbox.
"""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from splitinfer.common.json_text import dumps
from splitinfer.core.metrics.records import StepRecord
from splitinfer.errors import ConfigError

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 30
_PROCESS = 1


class Trace:
    """Writes the steps to ``path``, from one thread. Another thread may close it.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._zero = time.monotonic_ns()
        self._num_bytes = 0
        self._until: list[int] = []  # by track: the end of its last event, in nanoseconds since the beginning
        try:
            self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - lives as long as this
        except OSError as error:
            why = error.strerror or str(error)
            raise ConfigError(f"the trace cannot be written to {path} ({why}); name another file") from error
        self._write("[\n" + _meta("process_name", 0, name="splitinfer"))

    def begin(self, names: Sequence[str]) -> None:
        """Write the names of the tracks: stage, link, stage, link ... A single stage has no link."""
        tracks = []
        for here, there in zip(names, (*names[1:], names[0]), strict=True):
            tracks += [here] if len(names) == 1 else [here, f"{here} to {there}"]
        self._until = [0] * len(tracks)
        for i, name in enumerate(tracks):
            named, sorted_ = (_meta("thread_name", i + 1, name=name), _meta("thread_sort_index", i + 1, sort_index=i))
            self._write(f",\n{named},\n{sorted_}")

    def step(self, step: StepRecord) -> None:
        """Write one step."""
        self._write("".join([*self._stages(step), *(self._links(step) if len(step.visits) > 1 else ())]))

    def close(self) -> None:
        """Close the array and the file."""
        with self._lock:
            if not self._file.closed:
                self._put(b"\n]\n")
                self._file.close()

    def _stages(self, step: StepRecord) -> Iterator[str]:
        kind, rows = step.rows.kind, step.num_rows
        about = f'"step":{step.number},"sequences":{step.num_sequences},"tokens":{rows},"useful":{step.useful}'
        spacing = 2 if len(step.visits) > 1 else 1
        for i, visit in enumerate(step.visits):
            args = f'{about},"bytes_sent":{step.figures[i].bytes_sent}'
            if i:
                args += f',"waited_us":{(visit.start - visit.received) * 1e6:.1f}'
            yield self._event(spacing * i, f"{kind} {step.number}", kind, visit.start, visit.end, args)

    def _links(self, step: StepRecord) -> Iterator[str]:
        ways = [(visit.sent, visit.received) for visit in step.visits[1:]] + [(step.sent, step.heard)]
        for i, (sent, received) in enumerate(ways):
            sizes = f'"bytes":{step.figures[i].bytes_sent},"way_ms":{(received - sent) * 1e3:.3f}'
            yield self._event(
                2 * i + 1, f"frame {step.number}", "link", sent, received, f'"step":{step.number},{sizes}'
            )

    def _event(self, track: int, name: str, category: str, start: float, end: float, args: str) -> str:
        """Return one event as text, in microseconds to three places. It begins after the previous one's end."""
        begin = max(int(start * 1e9) - self._zero, self._until[track])
        until = self._until[track] = max(int(end * 1e9) - self._zero, begin)
        return (
            f',\n{{"name":"{name}","cat":"{category}","ph":"X","pid":{_PROCESS},"tid":{track + 1},'
            f'"ts":{begin / 1e3:.3f},"dur":{(until - begin) / 1e3:.3f},"args":{{{args}}}}}'
        )

    def _write(self, text: str) -> None:
        with self._lock:
            if not self._file.closed:
                self._put(text.encode(errors="replace"))

    def _put(self, data: bytes) -> None:
        """Write whole lines at once, so that a crash leaves no partial line."""
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


def _meta(what: str, track: int, **args: Any) -> str:
    return dumps({"name": what, "ph": "M", "pid": _PROCESS, "tid": track, "args": args})
