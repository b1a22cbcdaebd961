"""What a loop does beforehand: when, and that it works for every scheduler."""

import queue
import time

import pytest

from splitinfer.core.kv.budget import KVBudget, StageKV
from splitinfer.core.kv.prefix_cache import PrefixCacheConfig
from splitinfer.core.scheduler.config import SchedulerConfig
from splitinfer.engine import rehearsal
from splitinfer.engine.mailbox import Mailbox
from splitinfer.engine.rehearsal import AHEAD, OfLoop, When, of_worker
from splitinfer.wire import codec
from splitinfer.wire.messages import Message


@pytest.mark.parametrize(
    ("waits", "after"),
    [
        ((), None),
        ((0.02, 0.02), None),
        ((0.02, 0.03, 0.04), 0.02 - AHEAD),
        ((0.001, 0.02, 0.03, 0.04), 0.02 - AHEAD),
        ((0.02, 0.03, AHEAD + 0.0005), None),
    ],
)
def test_it_is_before_the_shortest_of_the_last_waits(waits: tuple[float, ...], after: float | None) -> None:
    when = When()
    for seconds in waits:
        when.waited(seconds)
    assert when.after == (after if after is None else pytest.approx(after))


def waited(seconds: float) -> Mailbox[str]:
    """A mailbox whose reader has waited so long each time."""
    box = Mailbox[str]()
    box.rehearse = lambda: box.put("rehearsed")
    for _ in range(3):
        with pytest.raises(queue.Empty):
            box.get(seconds)
    return box


class TestMailbox:
    @pytest.mark.parametrize("timeout", [None, 1.0])
    def test_a_rehearsal_comes_before_the_event_is_due(self, timeout: float | None) -> None:
        assert waited(0.004).get(timeout) == "rehearsed"

    def test_an_event_that_is_there_needs_none(self) -> None:
        box = waited(0.004)
        box.put("here")
        assert box.get(None) == "here"
        assert box.is_empty

    def test_there_is_none_where_nobody_waits_so_long(self) -> None:
        box, began = waited(0.05), time.monotonic()
        with pytest.raises(queue.Empty):
            box.get(0.004)
        assert time.monotonic() - began >= 0.004

    def test_the_time_runs_out_after_a_rehearsal(self) -> None:
        box, times = waited(0.004), list[float]()
        box.rehearse = lambda: times.append(time.monotonic())
        began = time.monotonic()
        with pytest.raises(queue.Empty):
            box.get(0.01)
        assert len(times) == 1
        assert time.monotonic() - began >= 0.01


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of messages that were read."""
    kinds, decode = list[str](), codec.decode

    def noted(header: bytes | memoryview) -> Message:
        message = decode(header)
        kinds.append(codec.kind_of(message))
        return message

    monkeypatch.setattr(rehearsal.codec, "decode", noted)
    return kinds


def config(**options: object) -> SchedulerConfig:
    plain = {"num_groups": 2, "max_in_flight": 3, "token_budget": 64, "max_running": 4, "max_len": 256, "num_stages": 2}
    return SchedulerConfig(**{**plain, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_groups": 1, "max_in_flight": 1, "num_stages": 0},
        {"forces": True},
        {"speculates": True, "drafts_at_end": True},
        {"blocks": PrefixCacheConfig(keeps_blocks=True), "kv": KVBudget((StageKV(1 << 20, 1),) * 2, block=4)},
    ],
)
def test_a_coordinator_reads_a_result_and_writes_a_step_each_time(options: dict[str, object], read: list[str]) -> None:
    rehearse = OfLoop(config(**options))
    for _ in range(30):
        rehearse()
    assert read == ["result", "step"] * 30


@pytest.mark.parametrize("options", [{"kv": KVBudget((StageKV(1, 1),))}, {"max_len": 2}])
def test_stages_without_room_are_no_error(options: dict[str, object]) -> None:
    rehearse = OfLoop(config(**options))
    for _ in range(3):
        rehearse()


def test_a_worker_reads_a_step_and_writes_a_result(read: list[str]) -> None:
    of_worker()
    assert read == ["step", "result"]
