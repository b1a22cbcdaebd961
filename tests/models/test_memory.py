"""What fits is let in; what does not is refused with the numbers that a person needs."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.errors import CannotFit
from splitinfer.models import memory
from splitinfer.models.memory import (
    HeldReport,
    Need,
    announce_idle,
    announce_loaded,
    check_fit,
    counted_bytes,
    free_bytes,
    limit_to,
    reserve,
    resource_limit,
    set_limits,
    size,
    withdraw,
)
from splitinfer.places import of_this_host
from splitinfer.system.ledger import Ledger, Others

NEED = Need(weights=4_000_000_000, kv_fixed=1_000_000, kv_per_token=100_000)
MARGIN = 256 * 2**20
TOTAL = 4_000_000_000 + 1_000_000 + 100_000 * 1000


def test_size():
    sizes = {999: "999 B", 1536: "1.54 kB", 999_999: "1 MB", 4_250_000_000: "4.25 GB", -2_000_000: "-2 MB"}
    assert {num_bytes: size(num_bytes) for num_bytes in sizes} == sizes


@given(st.integers(1, 10**9), st.integers(1, 500), st.integers(0, 10**12), st.integers(1000, 10**6))
def test_stored_blocks_never_have_more_than_half_of_the_buffers(kv: int, arrays: int, free: int, limit: int):
    counted = counted_bytes(kv, arrays, free, limit)
    assert counted >= kv
    assert free // counted * arrays <= max(limit // 2, arrays)
    if free // kv * arrays <= limit // 2 - arrays:
        assert counted == kv, "bytes are the narrower limit"


def test_the_number_of_buffers_is_known_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mx, "device_info", lambda: {"resource_limit": 499_000})
    assert resource_limit() is None
    monkeypatch.setattr(memory, "on_gpu", lambda: True)
    assert resource_limit() == 499_000
    monkeypatch.setattr(mx, "device_info", dict)
    assert resource_limit() is None


def test_what_fits_is_let_in_to_the_last_byte(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "free_bytes", lambda: TOTAL + MARGIN)
    assert check_fit(NEED, 1000, "stage mini") == TOTAL + MARGIN
    monkeypatch.setattr(memory, "free_bytes", lambda: TOTAL + MARGIN - 1)
    with pytest.raises(CannotFit):
        check_fit(NEED, 1000, "stage mini")
    with pytest.raises(CannotFit, match="for 1,001 tokens"):
        check_fit(NEED, 1001, "stage mini")


def test_a_start_says_what_it_needs_only_where_that_is_over_half_of_what_is_free():
    needed = NEED.total(1000)
    assert NEED.warning(1000, 2 * needed) == ""
    assert replace(NEED, scores=1).warning(1000, 2 * needed).startswith("needs 4 GB of weights and 101 MB of KV")


def test_a_refusal_has_the_numbers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "free_bytes", lambda: 2_000_000_000)
    with pytest.raises(CannotFit) as caught:
        check_fit(NEED, 1000, "stage mini (layers 4 to 9)")
    assert str(caught.value).startswith(
        "stage mini (layers 4 to 9) does not fit: it needs 4 GB of weights and 101 MB of KV for 1,000 tokens; "
        "2 GB free, 2.37 GB too little; give it fewer layers"
    )


class Machine:
    """A machine of our choice behind the operating system and MLX."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, gpu: bool, available: int, info: dict[str, Any], active=0):
        self.wired: list[int] = []
        self.cached: list[int] = []
        fake = SimpleNamespace(
            device_info=lambda: info,
            get_active_memory=lambda: active,
            set_wired_limit=self.wired.append,
            set_cache_limit=self.cached.append,
        )
        monkeypatch.setattr(memory, "mx", fake)
        monkeypatch.setattr(memory, "on_gpu", lambda: gpu)
        monkeypatch.setattr(memory, "available_bytes", lambda: available)


WORKING_SET = "max_recommended_working_set_size"


@pytest.mark.parametrize(
    ("gpu", "available", "info", "active", "free"),
    [
        (False, 700, {WORKING_SET: 5}, 0, 700),
        (True, 700, {WORKING_SET: 500}, 100, 400),
        (True, 300, {WORKING_SET: 500}, 100, 300),
        (True, 9_000, {"free_memory": 400, "total_memory": 800}, 100, 400),  # CUDA
        (False, 300, {"free_memory": 400, "total_memory": 800}, 0, 300),
    ],
)
def test_free_bytes(monkeypatch: pytest.MonkeyPatch, gpu: bool, available: int, info, active: int, free: int):
    Machine(monkeypatch, gpu=gpu, available=available, info=info, active=active)
    assert free_bytes() == free


def test_memory_is_shared_with_the_other_processes(monkeypatch: pytest.MonkeyPatch):
    Machine(monkeypatch, gpu=True, available=700, info={WORKING_SET: 900}, active=100)
    others = Ledger(of_this_host("memory"), group=1)
    others.claim("stage", held=250, load=300)
    assert free_bytes() == 250, "900 less 100, 250 and 300"
    others.drop("stage", held=0)
    assert free_bytes() == 700


def test_the_owners_limit_holds_where_it_is_the_smaller(monkeypatch: pytest.MonkeyPatch):
    Machine(monkeypatch, gpu=True, available=2**40, info={WORKING_SET: 900})
    for limit, wanted in ((None, 900), (800, 800), (1000, 900)):
        monkeypatch.setattr(memory, "wired_limit_bytes", lambda limit=limit: limit)
        assert memory.gpu_limit() == wanted
    Machine(monkeypatch, gpu=False, available=2**40, info={WORKING_SET: 900})
    assert memory.gpu_limit() is None


def test_scores_are_counted_and_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "free_bytes", lambda: TOTAL + MARGIN + 2**30)
    need = replace(NEED, scores=2**30)
    assert check_fit(need, 1000, "s") == TOTAL + MARGIN + 2**30
    monkeypatch.setattr(memory, "free_bytes", lambda: TOTAL + MARGIN + 2**30 - 1)
    with pytest.raises(
        CannotFit, match=r"101 MB of KV for 1,000 tokens and 1.07 GB for their attention; 5.44 GB free, 1 B"
    ):
        check_fit(need, 1000, "s")


def test_what_a_stage_announces_from_loading_to_its_end(monkeypatch: pytest.MonkeyPatch):
    Machine(monkeypatch, gpu=False, available=10 * TOTAL, info={}, active=0)
    other = Ledger(of_this_host("memory"), group=1)
    kv, need = TOTAL - NEED.weights, replace(NEED, scores=5)
    assert reserve(need, 1000, "stage mini", "mini") == 10 * TOTAL
    assert other.others() == Others(0, TOTAL + MARGIN + 5)
    report = HeldReport()
    memory.mx.get_active_memory = lambda: 10**9
    report.now()
    assert other.others() == Others(10**9, TOTAL + MARGIN + 5 - 10**9), "a quarter has been read"
    memory.mx.get_active_memory = lambda: NEED.weights
    monkeypatch.setattr(memory, "available_bytes", lambda: 6 * 10**9)
    assert announce_loaded(need, 1000, "mini") == 6 * 10**9
    assert other.others() == Others(NEED.weights, 3 * 10**9)
    monkeypatch.setattr(memory, "available_bytes", lambda: 0)
    assert announce_loaded(need, 1000, "mini") == 0
    assert other.others() == Others(NEED.weights, kv + MARGIN + 5)
    announce_idle("mini")
    assert other.others() == Others(NEED.weights, 0)
    withdraw("mini")
    assert other.others() == Others()


def test_limits_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    machine = Machine(monkeypatch, gpu=True, available=2**40, info={WORKING_SET: TOTAL + MARGIN + 5})
    set_limits(NEED, 1000)
    assert (machine.wired, machine.cached) == ([TOTAL + MARGIN + 5], [(TOTAL + MARGIN) // 8])
    machine = Machine(monkeypatch, gpu=True, available=2**40, info={})
    set_limits(replace(NEED, scores=2**31), 1000)
    assert machine.wired == [], "a device that recommends nothing"
    assert machine.cached == [2**31], "the next layer finds its scores' buffer"


def test_launching_ahead_is_limited_where_memory_is_shared(monkeypatch: pytest.MonkeyPatch):
    limits: list[int] = []
    Machine(monkeypatch, gpu=True, available=2**40, info={WORKING_SET: 900}, active=100)
    memory.mx.set_memory_limit = limits.append
    limit_to(700)
    assert limits == [800]
    for gpu, info in ((False, {WORKING_SET: 900}), (True, {})):
        Machine(monkeypatch, gpu=gpu, available=2**40, info=info, active=100)
        memory.mx.set_memory_limit = limits.append
        limit_to(700)
    assert limits == [800]


def test_limits_on_a_cpu(monkeypatch: pytest.MonkeyPatch):
    machine = Machine(monkeypatch, gpu=False, available=2**40, info={WORKING_SET: 1000})
    set_limits(Need(0, 0, 0), 0)
    set_limits(Need(10**13, 0, 0), 0)
    assert (machine.wired, machine.cached) == ([], [64 * 2**20, 2 * 2**30])
