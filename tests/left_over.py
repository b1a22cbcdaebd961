"""Nothing that a test began outlives it: no thread, no child process, no rdma group, no state of the process.

What one test leaves behind happens in the next one. The listening end of a link, say, ends its process on a thread of
its own, a moment after the test that made the link is over; a later test that counts processes finds one too many.

So after each test, when its fixtures are gone, `wait` waits until all that it began has ended, and names what has not.
What a fixture of a module or a session begins is its own, and so is what its threads begin: it may live on until that
fixture ends.

What MLX counts as held, and its limit of memory, are looked at after each test: above the limit MLX ends one step
before it begins the next, and tests that launch ahead fail much later, in one of ten operations.

What holds for the whole process is looked at after each file, when its fixtures are gone, too. What the product sets
for its process is put back, MLX's limits for example: each stage that is loaded sets them, as it may, and they would
hold in every file after it. All else that has changed (`_state`) is named.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import psutil
import pytest
from zmq.auth.thread import AuthenticationThread
from zmq.utils.garbage import GarbageCollectorThread

SECONDS = 30.0  # for all to end; a child that hangs is killed by its parent within ten
MOST_HELD = 2**32  # bytes; the tests' models are a thousandth of that
if "SPLITINFER_REAL_MODELS" in os.environ:  # these are not
    MOST_HELD = 2**36
_CHECK_SECONDS = 0.002
_TASKS = Path("/proc/self/task")


class LeftOver:
    """Who may leave a thread or process alone: None for what was there before, else a fixture."""

    def __init__(self) -> None:
        self._threads: dict[threading.Thread, object] = {}
        self._pids: dict[int, object] = {}
        self._of_tests = threading.current_thread()
        start = threading.Thread.start

        def note_and_start(thread: threading.Thread) -> None:
            beginner = threading.current_thread()
            if beginner in self._threads and beginner is not self._of_tests:
                self._threads[thread] = self._threads[beginner]
            start(thread)

        threading.Thread.start = note_and_start  # type: ignore[method-assign]

    def keep(self, owner: object = None) -> None:
        """All that lives now and is nobody's is this one's."""
        for thread in threading.enumerate():
            self._threads.setdefault(thread, owner)
        for pid in _children():
            self._pids.setdefault(pid, owner)

    def disown(self, owner: object) -> None:
        """A fixture is over: what it began has to end."""
        self._threads = {thread: one for thread, one in self._threads.items() if one is not owner and thread.is_alive()}
        self._pids = {pid: one for pid, one in self._pids.items() if one is not owner}

    def wait(self, seconds: float = SECONDS) -> str:
        """Wait until all that has begun since has ended; what has not, in words; "" if nothing is left."""
        give_up_at = time.monotonic() + seconds
        while True:
            threads = [one for one in threading.enumerate() if one not in self._threads and not _is_of_process(one)]
            pids = [pid for pid in _children() if pid not in self._pids]
            if not threads and not pids:
                return ""
            if time.monotonic() > give_up_at:
                said = "\n".join([*map(_said_of_thread, threads), *map(_said_of_process, pids)])
                self.keep()  # one test is blamed for it
                return said
            time.sleep(_CHECK_SECONDS)


def _is_of_process(thread: threading.Thread) -> bool:
    """Whether a library began it once, for as long as the process lives."""
    return isinstance(thread, (GarbageCollectorThread, AuthenticationThread))


def _children() -> list[int]:
    """The child processes of this process, in microseconds where there are none and the system is Linux."""
    if not _TASKS.exists():
        return [child.pid for child in psutil.Process().children() if _lives(child.pid)]
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # waits for nobody, and reaps nobody
    except ChildProcessError:
        return []
    pids: list[int] = []
    for task in os.listdir(_TASKS):  # noqa: PTH208 - after each test: it has to be quick
        with contextlib.suppress(OSError), open(f"{_TASKS}/{task}/children") as file:  # the thread may have ended
            pids += [pid for pid in map(int, file.read().split()) if _lives(pid)]
    return pids


def _lives(pid: int) -> bool:
    """Whether a child has not ended; one whose end nobody has asked for yet has."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _said_of_thread(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return f"thread {thread.name!r} has just ended"
    loops = [below.f_locals.get("self") for below, _ in traceback.walk_stack(frame)]
    tasks = [str(task) for loop in loops if isinstance(loop, asyncio.BaseEventLoop) for task in asyncio.all_tasks(loop)]
    stack = "".join(traceback.format_stack(frame)[-6:])
    return "\n".join([f"thread {thread.name!r} is at", stack, *dict.fromkeys(tasks)])


def _said_of_process(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        return f"process {pid} ({process.status()}): {' '.join(process.cmdline())}"
    except psutil.NoSuchProcess:
        return f"process {pid} has just ended"


# -- what holds for the whole process ----------------------------------------------------------------

# Variables that pytest, the fixtures of the session and packages that are imported set.
_OF_OTHERS = ("PYTEST_", "XDG_", "COV_", "TRANSFORMERS_", "TOKENIZERS_", "HF_", "PYDANTIC_")
_HANDLED = (signal.SIGINT, signal.SIGTERM)


def _state() -> dict[str, object]:
    """What a test may change for all that follow it, by name."""
    return {
        "the folder it works in": os.getcwd(),  # noqa: PTH109 - compared, not used
        "mlx's default device": str(mx.default_device()),
        "the interpreter's recursion limit": sys.getrecursionlimit(),
        "whether garbage is collected": gc.isenabled(),
        "logging below a level": logging.root.manager.disable,
    } | {f"${name}": value for name, value in os.environ.items() if not name.startswith(_OF_OTHERS)}


def _limit(number: int, bytes_: int | None = None) -> int:
    """MLX's limit of memory, or of its cache, which can only be read by setting it."""
    set_limit = (mx.set_memory_limit, mx.set_cache_limit)[number]
    before = set_limit(2**40 if bytes_ is None else bytes_)
    if bytes_ is None:
        set_limit(before)
    return before


class OfProcess:
    """The state of the process as it was before the first test."""

    def __init__(self) -> None:
        self._state, self._limits = _state(), [_limit(number) for number in range(2)]
        self._interval, self._level = sys.getswitchinterval(), logging.getLogger().level
        self._handlers = [signal.getsignal(one) for one in _HANDLED]

    def memory(self) -> str:
        """What is wrong with what MLX counts as held, or with its limit, in words; "" if nothing is. A limit is put
        back."""
        held, limit = mx.get_active_memory(), _limit(0)
        if held <= MOST_HELD and limit == self._limits[0]:
            return ""
        _limit(0, self._limits[0])
        return f"{held:,} bytes are held, the limit is {limit:,} and was {self._limits[0]:,}"

    def put_back(self) -> str:
        """What has changed, in words; "" if nothing has."""
        for number, limit in enumerate(self._limits):
            _limit(number, limit)
        sys.setswitchinterval(self._interval)
        logging.getLogger().setLevel(self._level)
        for one, handler in zip(_HANDLED, self._handlers, strict=True):
            signal.signal(one, handler)
        now = _state()
        names = [name for name in {**self._state, **now} if self._state.get(name) != now.get(name)]
        said = "\n".join(f"{name}: {self._state.get(name)} before, {now.get(name)} now" for name in names)
        for name in (name for name in names if name.startswith("$")):
            os.environ.pop(name[1:], None)
            if name in self._state:
                os.environ[name[1:]] = str(self._state[name])
        self._state = _state()  # one file is blamed for it
        return said


_left_over = LeftOver()
_of_process: list[OfProcess] = []


def keep() -> None:
    """What lives now may outlive its test: it took the place of something that a fixture of a module had begun, and
    that fixture ends it."""
    _left_over.keep()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Iterator[object]:
    if fixturedef.scope == "function":
        return (yield)
    before = ("before", fixturedef)  # what the test has begun already
    _left_over.keep(before)
    try:
        return (yield)
    finally:
        _left_over.keep(fixturedef)
        _left_over.disown(before)


def pytest_fixture_post_finalizer(fixturedef: pytest.FixtureDef[object]) -> None:
    if fixturedef.scope != "function":
        _left_over.disown(fixturedef)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart() -> None:
    _left_over.keep()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    _of_process.append(OfProcess())


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    yield
    if wrong := _of_process[-1].memory():
        pytest.fail(f"{item.nodeid} leaves MLX's memory otherwise than it was: {wrong}", pytrace=False)
    if (nextitem is None or nextitem.path != item.path) and (changed := _of_process[-1].put_back()):
        pytest.fail(f"{item.path.name} leaves the process otherwise than it was:\n{changed}", pytrace=False)
    if left := _left_over.wait(float(os.environ.get("LEFT_SECONDS", SECONDS))):
        pytest.fail(f"{item.nodeid} leaves behind:\n{left}", pytrace=False)
