"""`splitinfer serve` as a process of its own on two stages, and what can be seen of it from outside."""

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from constrained import save
from processes import Running, RunningWorker, are_gone, until, write_layout

from splitinfer.llm import LLM, Settings

LOCAL = "local"
START_SECONDS, END_SECONDS = 120.0, 30.0
_KV = 2**28  # bytes of the library; else half of all memory
_PROGRAM = "from campaigns.looking import main\nmain()"


class Serving:
    """A server under way. ``port``: where it listens."""

    def __init__(self, running: Running) -> None:
        self.running = running
        self.port = int(running.sees(r"serving \S+ at http://127.0.0.1:(\d+)/v1", START_SECONDS)[1])
        self._num_looks, self._last_workers = 0, list[psutil.Process]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def workers(self) -> list[psutil.Process]:
        return [child for child in self.running.children() if child.is_running()]

    def look(self) -> dict[str, Any]:
        self._num_looks += 1
        self.running.types("\n")
        until(lambda: self.running.out.count("\n") >= self._num_looks, "it tells what it holds", 60.0)
        found: dict[str, Any] = json.loads(self.running.out.split("\n")[self._num_looks - 1])
        return found

    @property
    def complaints(self) -> list[str]:
        """The first lines of its log that tell of a failure."""
        lines = self.running.err.splitlines()
        return [f"its log says: {line}" for line in lines if "failed" in line or "Traceback" in line][:5]

    def tell_to_end(self) -> None:
        """As a person or a service manager does."""
        self._last_workers = self.workers
        self.running.signal(signal.SIGTERM)

    def ended(self) -> list[str]:
        workers = self._last_workers
        code = self.running.wait(END_SECONDS)
        until(lambda: are_gone(workers), "its workers are gone", 10.0)
        return [] if code == 143 else [f"it ended with {code}"]


class RestartedWorker:
    """`splitinfer worker` with ``args`` on a port of its own, that is started there again when it is gone."""

    def __init__(self, *args: str) -> None:
        self._args = args
        self._running = _worker(0, *args)
        self.address = self._running.address

    @property
    def process(self) -> psutil.Process:
        return self._running.process

    def state(self) -> str:
        return self._running.state()

    def kill(self) -> None:
        """It is gone on return."""
        self._running.signal(signal.SIGKILL)
        self._running.wait(10)

    def start_again(self) -> None:
        self._running.end()
        self._running = _worker(int(self.address.rpartition(":")[2]), *self._args)

    def end(self) -> None:
        self._running.end()


def _worker(port: int, *args: str) -> RunningWorker:
    return RunningWorker("worker", "--name", "back", "--port", str(port), *args)


@contextmanager
def restarted_worker(*args: str) -> Iterator[RestartedWorker]:
    """A worker that can be killed; it keeps no KV on disk unless ``args`` say where."""
    made = RestartedWorker(*(args or ("--kv-dir", "none")))
    try:
        yield made
    finally:
        made.end()


NUM_LAYERS = 2


def quick_model(folder: Path, context: int = 4096) -> Path:
    """A random model of two layers with the demo's tokenizer: what is under way is tested, not what is said."""
    return save(folder, num_hidden_layers=NUM_LAYERS, max_position_embeddings=context, eos_token_id=0)


@contextmanager
def serving(
    *args: str, workers: Sequence[str] = (LOCAL,), model: str = "", layers: int = NUM_LAYERS, context: int = 4096
) -> Iterator[Serving]:
    """A server with ``args``; its workers run where their addresses say. ``model``: with so many layers; without, the
    quick one. Whatever happens, no process of it stays."""
    with _folder() as folder:
        layout = write_layout(folder, list(workers), model or _quick(folder, context), layers)
        own = {"XDG_CACHE_HOME": f"{folder}/cache", "XDG_CONFIG_HOME": f"{folder}/config"}
        options = ("--layout", str(layout), "--context", str(context))
        options += () if "--port" in args else ("--port", "0")
        options += () if "--kv-dir" in args else ("--kv-dir", "none")
        environment = {**own, "PYTHONPATH": os.pathsep.join(sys.path)}
        running = Running("serve", *options, *args, code=_PROGRAM, env=environment)
        try:
            yield Serving(running)
        finally:
            running.end()


@contextmanager
def library(context: int = 4096) -> Iterator[LLM]:
    """The quick model as a library, on two stages as well: what it says is what a server must say."""
    with _folder() as folder:
        layout = write_layout(folder, [LOCAL], _quick(folder, context), NUM_LAYERS)
        with LLM(str(layout), settings=Settings(kv_bytes=_KV, context=context)) as llm:
            yield llm


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="campaign-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _quick(folder: Path, context: int) -> str:
    return str(quick_model(folder / "quick", context))


def settle(looks: Any, seconds: float = 20.0) -> dict[str, Any]:
    """What is held once nothing is held any more, or the time is over. ``looks``: looks once."""
    give_up = time.monotonic() + seconds
    while any((found := looks())["held"].values()) and time.monotonic() < give_up:
        time.sleep(0.1)
    result: dict[str, Any] = found
    return result


def left_by(found: dict[str, Any]) -> list[str]:
    """What is held when nobody asks for anything any more (``looking.look``)."""
    held = {name: count for name, count in found["held"].items() if count}
    return [*([f"held by nobody: {held}"] if held else []), *([found["broken"]] if found["broken"] else [])]
