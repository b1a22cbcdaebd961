"""Processors and BLAS: what is decided, on texts; what is done, on a child."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.comparing import machine
from splitinfer.core.layout import lay_out
from splitinfer.models.blas import preloaded_blas

OPENBLAS = "/usr/lib/x86_64-linux-gnu/openblas-pthread/libblas.so.3"
TWO_THREADS = """
import sys, threading
waiting = threading.Event()
threading.Thread(target=waiting.wait).start()
print("ready", flush=True)
sys.stdin.read()
waiting.set()
"""


@given(st.lists(st.booleans(), max_size=5), st.lists(st.integers(0, 99), unique=True, max_size=4))
def test_each_stage_here_has_a_processor_of_its_own_while_there_are_any(local: list[bool], cpus: list[int]) -> None:
    parts = [("first", 1, None), *((f"s{i}", 1, "local" if here else f"tcp://h{i}:1") for i, here in enumerate(local))]
    given_ = machine.assign(lay_out(parts), cpus)
    here = ["first", *(f"s{i}" for i, is_here in enumerate(local) if is_here)]
    assert all((given_[name] in cpus) if name in here and cpus else given_[name] is None for name in given_)
    if len(here) <= len(cpus):
        assert [given_[name] for name in here] == cpus[: len(here)]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux pins")
def test_a_process_is_pinned_with_all_its_threads() -> None:
    with subprocess.Popen([sys.executable, "-c", TWO_THREADS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        cpu = machine.free_processors()[-1]
        machine.pin(child.pid, cpu)
        threads = [path.name for path in Path(f"/proc/{child.pid}/task").iterdir()]
        assert len(threads) == 2
        assert all(os.sched_getaffinity(int(thread)) == {cpu} for thread in threads)
        child.communicate(b"")


@pytest.mark.parametrize(
    ("preloaded", "found", "then"),
    [
        (None, OPENBLAS, OPENBLAS),
        (None, None, None),
        ("/lib/libjemalloc.so", OPENBLAS, f"{OPENBLAS}:/lib/libjemalloc.so"),
        ("/opt/libopenblas.so", OPENBLAS, "/opt/libopenblas.so"),
    ],
    ids=["nothing", "no OpenBLAS", "another library", "another BLAS"],
)
def test_openblas_is_preloaded_once_and_with_one_thread(preloaded: str | None, found: str | None, then: str | None):
    before = {"PATH": "/bin"} | ({} if preloaded is None else {"LD_PRELOAD": preloaded})
    environment = machine.preloading(before, found)
    if then is None:
        assert environment is None
        return
    assert (environment["LD_PRELOAD"], environment["OPENBLAS_NUM_THREADS"], environment["PATH"]) == (then, "1", "/bin")
    assert machine.preloading(environment, found) is None


def test_which_blas_is_read_from_the_mapped_files() -> None:
    line = "7f0 r-xp 00000000 fe:00 1    "
    wheel = f"{line}/v/site-packages/mlx_cpu.libs/libblas-bd8a282c.so.3.10.0\n{line}/v/mlx/lib/libmlx.so\n"
    assert preloaded_blas(wheel) is None
    assert preloaded_blas(f"{wheel}{line}{OPENBLAS}\n") == OPENBLAS
    assert preloaded_blas(f"{wheel}{line}/usr/lib64/libopenblas.so.0\n") == "/usr/lib64/libopenblas.so.0"
    assert preloaded_blas(f"{wheel}7f0 rw-p 0 00:00 0 \n{line}/usr/lib/liblapack.so.3\n") is None
