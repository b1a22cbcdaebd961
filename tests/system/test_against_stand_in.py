"""The calls of macOS's libraries, with the arguments of Apple's headers: made to a library that a C compiler built from
those declarations."""

import ctypes
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import until

from splitinfer.engine.device.steps import StepsUnderWay
from splitinfer.system import apple, free_memory, qos
from splitinfer.system.free_memory import available_bytes, wired_limit_bytes
from transports import connect, listen

HERE = Path(__file__).parent
COMPILER = shutil.which("cc")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler here")


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("stand_in") / "stand_in.so"
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-O1", "-o", library, HERE / "stand_in.c"], check=True)
    return ctypes.CDLL(str(library))


@pytest.fixture
def stand_in(built: ctypes.CDLL) -> Iterator[ctypes.CDLL]:
    yield built
    built.stand_in_refuse(0)


@pytest.fixture
def mac(stand_in: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """This process takes itself to run on macOS."""
    monkeypatch.setattr(apple, "is_macos", lambda: True)
    monkeypatch.setattr(apple, "library", lambda _path: stand_in)
    return stand_in


# -- threads ---------------------------------------------------------------------------------------


def test_a_class_is_the_calling_threads_own(mac: ctypes.CDLL):
    qos.write_behind()
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(mac.stand_in_own_qos()))
    thread.start()
    thread.join()
    assert (mac.stand_in_own_qos(), mac.stand_in_own_priority(), seen) == (0x11, 0, [0])


def test_nothing_is_called_on_other_systems(stand_in: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(apple, "library", lambda path: pytest.fail(path))
    qos.serve_requests()
    assert (wired_limit_bytes(), free_memory.memory_pages()) == (None, None)


def test_the_threads_that_requests_wait_for_are_user_initiated(mac: ctypes.CDLL):
    seen: list[tuple[str, int]] = []

    def look(*_: object) -> None:
        seen.append((threading.current_thread().name.split()[0], mac.stand_in_own_qos()))

    steps = StepsUnderWay[int](look)
    steps.add(1, lambda _: None, look, is_done=False)
    steps.drain()
    steps.close()
    with listen("tcp://127.0.0.1:0") as listener:
        link = connect(listener.address, timeout=10)
        link.deliver_to(lambda _: look())
        accepted = listener.accept(timeout=10)
        accepted.close("done")
        until(lambda: any(name == "transports" for name, _ in seen), "the link's thread has called", 10)
        link.close("done")
    assert {name for name, _ in seen} == {"waiter", "transports"}
    assert {number for _, number in seen} == {0x19}


# -- memory ----------------------------------------------------------------------------------------


def test_free_memory_is_what_vm_stat_prints(mac: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script = tmp_path / "vm_stat"
    script.write_text(f"#!/bin/sh\ncat {HERE / 'recorded' / 'vm_stat_intel_16.txt'}\n")
    script.chmod(0o755)
    monkeypatch.setattr(free_memory, "_VM_STAT", str(script))
    pages = free_memory.memory_pages()
    assert pages.wired == 763_254
    assert available_bytes() == pages.available_bytes
    script.write_text("#!/bin/sh\nexit 1\n")
    assert free_memory.memory_pages() is None
    assert available_bytes() > 0, "psutil's"


def test_a_value_of_sysctl_is_read_with_its_width(mac: ctypes.CDLL):
    assert int.from_bytes(apple.sysctl("hw.memsize"), "little") == 64 * 2**30
    assert wired_limit_bytes() == 56 * 2**30
    assert apple.chip() == "Apple M4 Max"
    mac.stand_in_refuse(1)
    assert (wired_limit_bytes(), apple.chip()) == (None, "")
