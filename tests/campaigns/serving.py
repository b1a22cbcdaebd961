"""`splitinfer serve` as a process of its own on two stages, and what can be seen of it from outside."""

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from constrained import save
from processes import Running, RunningWorker, are_gone, until, write_layout

from splitinfer.core.layout import LOCAL
from splitinfer.llm import LLM, Settings

START_SECONDS, END_SECONDS = 120.0, 30.0
NUM_LAYERS = 2
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

    def left(self, seconds: float = 20.0) -> list[str]:
        """What is held when nobody asks for anything any more, once things had time to settle, and what the first
        lines of its log say that tell of a failure."""
        give_up = time.monotonic() + seconds
        while any((found := self.look())["held"].values()) and time.monotonic() < give_up:
            time.sleep(0.1)
        held = {name: count for name, count in found["held"].items() if count}
        return [f"held by nobody: {held}"] * bool(held) + [found["broken"]] * bool(found["broken"]) + self.complaints

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

    def __init__(self, *args: str, env: Mapping[str, str] | None = None) -> None:
        self._args, self._env = args, env
        self.running = self._start(0)
        self.address = self.running.address
        self.port = int(self.address.rpartition(":")[2])

    def _start(self, port: int) -> RunningWorker:
        return RunningWorker("worker", "--no-announce", "--port", str(port), *self._args, env=self._env)

    @property
    def process(self) -> psutil.Process:
        return self.running.process

    def kill(self) -> None:
        """It is gone on return."""
        self.running.signal(signal.SIGKILL)
        self.running.wait(10)

    def start_again(self) -> None:
        """As launchd does, or a person."""
        self.running.end()
        self.running = self._start(self.port)

    def close(self) -> None:
        self.running.end()


@contextmanager
def serving(
    *args: str, workers: Sequence[str] = (LOCAL,), model: str = "", layers: int = NUM_LAYERS, context: int = 4096
) -> Iterator[Serving]:
    """A server with ``args``; its workers run where their addresses say. ``model``: with so many layers; without, the
    quick one. Whatever happens, no process of it stays."""
    with scratch() as folder:
        layout = write_layout(folder, list(workers), model or str(quick_model(folder / "quick", context)), layers)
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
    with scratch() as folder:
        layout = write_layout(folder, [LOCAL], str(quick_model(folder / "quick", context)), NUM_LAYERS)
        with LLM(str(layout), settings=Settings(kv_bytes=_KV, context=context)) as llm:
            yield llm


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder that is gone afterwards, whoever still writes there."""
    with tempfile.TemporaryDirectory(prefix="campaign-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def quick_model(folder: Path, context: int = 4096) -> Path:
    """A random model of two layers with the demo's tokenizer: what is under way is tested, not what is said."""
    return save(folder, num_hidden_layers=NUM_LAYERS, max_position_embeddings=context, eos_token_id=0)
