"""Fixtures that several floors of the tests share, and which tests a run has, in which order (see README.md)."""

import gc
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, settings

from splitinfer.machine.selection import VARIABLE
from splitinfer.shutdown import shutdown
from tests.emulation.strict import VARIABLE as STRICT

for folder in ("", "chat", "cluster", "core", "grammar", "matrix", "pictures", "transports", "weights", "wire"):
    sys.path.insert(0, str(Path(__file__).parent / folder))
sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import interrupts  # noqa: E402
import left_over  # noqa: E402
import loaded_once  # noqa: E402
import tiny  # noqa: E402

TESTS = Path(__file__).parent
_tests = itertools.count()
HEAVY = ("matrix", "engine", "bench", "cluster", "models", "transports")  # their files first, so that all end together


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("how much is tested")
    group.addoption("--all", action="store_true", help="tests marked nightly, too: every cut, every combination")
    group.addoption("--accelerator", metavar="FILE", type=Path, help="compute on an emulated accelerator")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "nightly: runs with --all only")
    config.addinivalue_line("markers", "own_device: about this machine's own device, so not with --accelerator")
    # How long an example takes depends on what else the machine does.
    examples, slow = 200 if config.getoption("--all") else 30, [HealthCheck.too_slow]
    settings.register_profile("any machine", deadline=None, max_examples=examples, suppress_health_check=slow)
    settings.load_profile("any machine")
    os.environ[STRICT] = "1"  # also in the processes that tests start
    os.environ.pop("SSL_CERT_FILE", None)  # reading such a bundle takes each client of HTTP 50 ms
    os.environ["SSL_CERT_DIR"] = str(TESTS)  # which has no certificates: no test needs any but its own
    if config.getoption("--accelerator") is not None:
        os.environ[VARIABLE] = str(config.getoption("--accelerator").resolve())
    interrupts.let_children_hear_them()
    config.pluginmanager.register(left_over)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """The garbage collector leaves out what is imported to stay; it took a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_named = any("::" in arg for arg in config.args)  # who names a test wants it
    left_out = [] if is_named else [item for item in items if _is_left_out(item, config)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    kept = set(items) - set(left_out)
    items[:] = sorted((item for item in items if item in kept), key=_place)


def _is_left_out(item: pytest.Item, config: pytest.Config) -> bool:
    if config.getoption("--accelerator") is not None and item.get_closest_marker("own_device"):
        return True
    return item.get_closest_marker("nightly") is not None and not config.getoption("--all")


def _place(item: pytest.Item) -> int:
    """Files of the heavy rooms come first; within a room the order stays."""
    room = item.path.relative_to(TESTS).parts[0]
    return HEAVY.index(room) if room in HEAVY else len(HEAVY)


@pytest.fixture(scope="session", autouse=True)
def a_process_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is written to the user's folders. A command that a test runs here ends in an exception and not, with all
    that it said, the process. A stage is loaded once."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in ("cache", "config", "data", "state"):
            patch.setenv(f"XDG_{kind.upper()}_HOME", str(tmp_path_factory.mktemp(kind)))
        patch.setattr(shutdown, "_leave", sys.exit)
        loaded_once.look_up(patch)
        yield


@pytest.fixture(autouse=True)
def no_test_finds_the_kv_of_another(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Each test has folders of caches and of keys of its own. Most never look there, and ``tmp_path`` would take a
    fifth of the time of a test that does nothing."""
    own = tmp_path_factory.getbasetemp() / f"of-test-{next(_tests)}"
    own.mkdir()
    for kind in ("cache", "config", "data"):
        monkeypatch.setenv(f"XDG_{kind.upper()}_HOME", str(own / kind))


@pytest.fixture
def busy() -> Callable[[], AbstractContextManager[None]]:
    """A block of code that must end while the device is busy: it fails if an operation waited there for its turn."""

    @contextmanager
    def while_busy() -> Iterator[None]:
        numbers = mx.random.uniform(shape=(2_000_000,))
        mx.eval(numbers)
        work = mx.sort(numbers)
        launched = time.monotonic()
        mx.async_eval(work)
        began = time.monotonic()
        yield
        ended = time.monotonic()
        mx.eval(work)
        assert time.monotonic() - ended > 0.01, (
            f"an operation waited for the device: launching took {began - launched:.4f} s, the block"
            f" {ended - began:.4f} s; MLX counts {mx.get_active_memory():,} bytes as held"
        )

    return while_busy


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that gives the folder of a tiny model, written once a session."""
    made: dict[tuple[Any, ...], Path] = {}

    def folder(name: str, **changes: Any) -> Path:
        key = (name, *sorted(changes.items()))
        if key not in made:
            made[key] = tiny.save(tmp_path_factory.mktemp(name), name, **changes)
        return made[key]

    return folder
