"""What fits is let in; what does not is refused with the numbers that a person needs."""

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.errors import CannotFit
from splitinfer.models import memory
from splitinfer.models.memory import Need, check_fit, counted_bytes, free_bytes, resource_limit, set_limits, size

NEED = Need(weights=4_000_000_000, kv_fixed=1_000_000, kv_per_token=100_000)
MARGIN = 256 * 2**20
TOTAL = 4_000_000_000 + 1_000_000 + 100_000 * 1000


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1536, "1.54 kB"),
        (999_999, "1 MB"),
        (4_250_000_000, "4.25 GB"),
        (-2_000_000, "-2 MB"),
        (1_500_000_000_000, "1.5 TB"),
    ],
)
def test_size(num_bytes: int, text: str):
    assert size(num_bytes) == text


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


@given(st.integers(0, 10**15))
def test_size_is_three_digits_and_a_unit(num_bytes: int):
    number, unit = size(num_bytes).split(" ")
    factor = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}[unit]
    assert "e" not in number
    value = float(number.replace(",", ""))
    assert abs(value * factor - num_bytes) <= 0.005 * num_bytes
    assert value < 1000 or unit == "TB"


def test_the_total_is_weights_and_kv():
    assert NEED.total(1000) == TOTAL
    assert NEED.total(0) == 4_001_000_000


def test_what_fits_is_let_in_to_the_last_byte(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "free_bytes", lambda: TOTAL + MARGIN)
    assert check_fit(NEED, 1000, "stage mini") == TOTAL + MARGIN
    monkeypatch.setattr(memory, "free_bytes", lambda: TOTAL + MARGIN - 1)
    with pytest.raises(CannotFit):
        check_fit(NEED, 1000, "stage mini")


def test_a_refusal_has_the_numbers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "free_bytes", lambda: 2_000_000_000)
    with pytest.raises(CannotFit) as caught:
        check_fit(NEED, 1000, "stage mini (layers 4 to 9)")
    assert str(caught.value).startswith(
        "stage mini (layers 4 to 9) does not fit: it needs 4 GB of weights and 101 MB of KV for 1,000 tokens; "
        "2 GB free, 2.37 GB too little; give it fewer layers"
    )


def test_more_tokens_may_not_fit_where_fewer_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "free_bytes", lambda: TOTAL + MARGIN)
    check_fit(NEED, 1000, "s")
    with pytest.raises(CannotFit, match="for 1,001 tokens"):
        check_fit(NEED, 1001, "s")


class Machine:
    """A machine of our choice behind psutil and MLX."""

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
        monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=available))


WORKING_SET = "max_recommended_working_set_size"


@pytest.mark.parametrize(
    ("gpu", "available", "info", "active", "free"),
    [
        (False, 700, {WORKING_SET: 5}, 0, 700),
        (True, 700, {}, 0, 700),
        (True, 700, {WORKING_SET: 500}, 100, 400),
        (True, 300, {WORKING_SET: 500}, 100, 300),
    ],
)
def test_free_bytes(monkeypatch: pytest.MonkeyPatch, gpu: bool, available: int, info, active: int, free: int):
    Machine(monkeypatch, gpu=gpu, available=available, info=info, active=active)
    assert free_bytes() == free


def test_limits_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    machine = Machine(monkeypatch, gpu=True, available=2**40, info={WORKING_SET: TOTAL + MARGIN + 5})
    set_limits(NEED, 1000)
    assert (machine.wired, machine.cached) == ([TOTAL + MARGIN + 5], [(TOTAL + MARGIN) // 8])
    machine = Machine(monkeypatch, gpu=True, available=2**40, info={})
    set_limits(NEED, 1000)
    assert machine.wired == [], "a device that recommends nothing"


def test_limits_on_a_cpu(monkeypatch: pytest.MonkeyPatch):
    machine = Machine(monkeypatch, gpu=False, available=2**40, info={WORKING_SET: 1000})
    set_limits(Need(0, 0, 0), 0)
    set_limits(Need(10**13, 0, 0), 0)
    assert (machine.wired, machine.cached) == ([], [64 * 2**20, 2 * 2**30])


def test_this_machine_has_free_bytes():
    assert free_bytes() > 0
    assert memory.on_gpu() == (mx.default_device() == mx.Device(mx.gpu))
