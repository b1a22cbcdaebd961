"""Real splitinfer processes for tests: started, read from while they run, awaited with a deadline, cleaned up."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Self

import psutil
import yaml

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 60.0  # a cold start on a machine that is busy with other tests
LOAD_LINE = re.compile(r"stage .* needs .* free")  # what the coordinator says while it loads


def until(happened: Callable[[], object], what: str, seconds: float = START_SECONDS) -> float:
    """Wait until ``happened()`` is true; the seconds it took."""
    began = time.monotonic()
    while not happened():
        assert time.monotonic() - began < seconds, f"{what}: not within {seconds} s"
        time.sleep(0.01)
    return time.monotonic() - began


def environment(changes: Mapping[str, str]) -> dict[str, str]:
    """What a process starts with, if not as this one: its folders of caches and keys, mostly."""
    return {**os.environ, **changes}


class _Stream:
    """One of a process's output streams, read in the background."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe, self._read, self._changed = pipe, b"", threading.Condition()
        self._thread = threading.Thread(target=self._run, name="test reader", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while data := self._pipe.read1(65536):  # type: ignore[attr-defined]
            with self._changed:
                self._read += data
                self._changed.notify_all()

    @property
    def text(self) -> str:
        with self._changed:
            return self._read.decode(errors="replace")

    def wait_for(self, pattern: str, seconds: float, state: Callable[[], str]) -> re.Match[str]:
        """Wait for a text; ``state`` says how its process is if it does not come."""
        give_up = time.monotonic() + seconds
        while (match := re.search(pattern, self.text)) is None:
            left = give_up - time.monotonic()
            assert left > 0, f"{pattern!r} did not come within {seconds} s; {state()}"
            with self._changed:
                self._changed.wait(min(left, 0.05))
        return match

    def close(self) -> None:
        self._thread.join(5)
        self._pipe.close()


class Running:
    """A splitinfer command, or a program that uses the library if ``code`` is given.

    ``err`` is its standard error and ``out`` its standard output so far. ``env``: what is different in its environment.
    """

    def __init__(self, *args: str, code: str | None = None, env: Mapping[str, str] | None = None) -> None:
        command = [sys.executable, *(("-c", code) if code is not None else ("-m", "splitinfer")), *args]
        self._popen = subprocess.Popen(
            command, cwd=ROOT, env=environment(env or {}),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        self.process = psutil.Process(self._popen.pid)
        self._out, self._err = _Stream(self._popen.stdout), _Stream(self._popen.stderr)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def out(self) -> str:
        return self._out.text

    @property
    def err(self) -> str:
        return self._err.text

    @property
    def complaints(self) -> list[str]:
        """Standard error's lines without those about loading."""
        return [line for line in self.err.splitlines() if line.strip() and not LOAD_LINE.search(line)]

    @property
    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def sees(self, pattern: str, seconds: float = START_SECONDS) -> re.Match[str]:
        """Wait for ``pattern`` on standard error."""
        return self._err.wait_for(pattern, seconds, self.state)

    def prints(self, pattern: str, seconds: float = START_SECONDS) -> re.Match[str]:
        """Wait for ``pattern`` on standard output."""
        return self._out.wait_for(pattern, seconds, self.state)

    def types(self, text: str) -> None:
        """Write to its standard input."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(text.encode())
        self._popen.stdin.flush()

    def children(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            return self.process.children(recursive=True)
        return []

    def state(self) -> str:
        """What it and its children have said and done, for a failure's report."""
        lines = [f"exit code {self._popen.poll()}; it printed: {self.out[-1000:]}", f"and said: {self.err[-1000:]}"]
        for process in (self.process, *self.children()):
            with suppress(psutil.Error):
                user, system = process.cpu_times()[:2]
                lines.append(
                    f"{process.pid} {process.status()}, {user + system:.1f} s of processor: {process.cmdline()[1:]}"
                )
        return "\n".join([*lines, f"load {os.getloadavg()}"])

    def signal(self, number: int) -> float:
        """Send a signal; when that was."""
        self._popen.send_signal(number)
        return time.monotonic()

    def wait(self, seconds: float) -> int:
        """Its exit code, once everything it wrote is read."""
        try:
            code = self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still there after {seconds} s; it said: {self.err[-2000:]}") from None
        self._close()
        return code

    def end(self) -> None:
        """Whatever state it is in, it goes, and its children."""
        children = self.children()
        self._popen.kill()
        self._popen.wait(10)
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _close(self) -> None:
        """All three pipes: one that is left to the garbage collector fails the test that runs then."""
        assert self._popen.stdin is not None
        with suppress(BrokenPipeError):
            self._popen.stdin.close()
        self._out.close()
        self._err.close()


class RunningWorker(Running):
    """``splitinfer worker`` on a free port."""

    @property
    def address(self) -> str:
        """Where it waits; known once it is up."""
        return self.sees(r"waits at (tcp://\S+)")[1]

    @property
    def rss(self) -> int:
        return int(self.process.memory_info().rss)


@contextmanager
def worker(*args: str, name: str = "back", env: Mapping[str, str] | None = None) -> Iterator[RunningWorker]:
    port = () if "--port" in args else ("--port", "0")
    with RunningWorker("worker", "--no-announce", "--name", name, *port, *args, env=env) as running:
        yield running


@contextmanager
def coordinator(layout: Path, *args: str) -> Iterator[Running]:
    with Running("coord", "--layout", str(layout), *args) as running:
        yield running


def local_workers(coordinator: psutil.Process | None = None) -> dict[str, psutil.Process]:
    """The living local workers of a coordinator, of this process if none is given, by their stages' names."""
    found = {}
    for child in (coordinator or psutil.Process()).children():
        with suppress(psutil.Error):  # it has ended
            line = child.cmdline()
            if "--name" in line and child.status() != psutil.STATUS_ZOMBIE:
                found[line[line.index("--name") + 1]] = child
    return found


def write_layout(folder: Path, addresses: Sequence[str], model: str = "demo", layers: int = 12) -> Path:
    """A layout file that cuts ``layers`` evenly over the coordinator and workers at ``addresses``."""
    share = layers // (len(addresses) + 1)
    stages = [{"name": "a", "layers": share}]
    stages += [{"name": "bcdefg"[i], "layers": share, "address": address} for i, address in enumerate(addresses)]
    path = folder / f"layout-{abs(hash((*addresses, model)))}.yaml"
    path.write_text(yaml.safe_dump({"model": model, "stages": stages}))
    return path


def are_gone(processes: Sequence[psutil.Process]) -> bool:
    """Whether none of them runs (one that nobody has waited for is gone, too)."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                return False
    return True
