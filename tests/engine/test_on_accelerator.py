"""A few of the tests of tokens on devices that compute while their hosts go on (``quick_accelerator.yaml``), and the
roads that only those take. All tests of the engine and of real processes can be run so: ``scripts/test --accelerator
FILE``."""

import threading
import time
from pathlib import Path
from typing import Any

import failing
import pytest
from engine.door import QUICK, SECONDS, Fault, Guesses, Open, ask, some_wrong, streams_of
from stages import worker
from tiny import Folder

from splitinfer import Flight
from splitinfer.engine.device.device import Device, DeviceSpan, Ticket
from splitinfer.engine.links.connection import reach
from splitinfer.models.rows import kv_pool
from splitinfer.system.gpu_roads import Road
from transports import Link, LinkOptions, connect

NIGHTLY = pytest.mark.nightly


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """Steps take so long, and launches so little, that the next step is launched long before a step ends."""
    path = tmp_path / "slow.yaml"
    path.write_text("{each_layer: {rows_ms: {1: 1}}, each_step_ms: 6, max_buffers: 100}")
    return path


@pytest.mark.parametrize(
    ("name", "cuts"),
    [
        ("gemma3_text", [1, 2, 3]),
        pytest.param("qwen3_next", [1, 2, 1], marks=NIGHTLY),
        pytest.param("gpt_oss", [2, 2], marks=NIGHTLY),
    ],
)
def test_windows_and_states(name: str, cuts: list[int], pipeline: Open) -> None:
    with pipeline(name, cuts, scheme="tcp", accelerator=QUICK, token_budget=16) as there:
        there.answers(ask(16, max_tokens=24))


@pytest.mark.parametrize(("cuts", "groups"), [pytest.param([4], 2, marks=NIGHTLY), ([1, 2, 1], 3)])
def test_drafts(cuts: list[int], groups: int, slow: Path, pipeline: Open, tiny_folder: Folder) -> None:
    """One stage with two groups has blocks of drafts behind each other, as several stages do. A block is built before
    the verdict on the one before it."""
    one = ask(40, max_tokens=24)
    streams = streams_of(tiny_folder("llama"), [one])
    made = {"drafter": lambda: Guesses(streams, some_wrong), "micro_batches": groups, "accelerator": slow}
    for flight in (None, Flight(3, 4, 3)):
        with pipeline("llama", cuts, flight=flight, **made) as there:
            there.answers(one)
            assert there.stats["speculation"]["accepted"] > 5


def test_the_loop_waits_for_steps_that_the_waiter_waits_for(
    slow: Path, pipeline: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with every chunk of a long prompt, whose KV must not be copied."""
    monkeypatch.setattr(kv_pool, "MAX_COPIED", 0)
    with pipeline("llama", [2, 2], token_budget=8, accelerator=slow) as there:
        there.answers(ask(90, max_tokens=12))


class Ahead(failing.FailingDevice):
    """Counts the steps that were launched while another was under way."""

    def __init__(self) -> None:
        super().__init__(computes_at_launch=False)
        self.count, self._last = 0, list[Ticket]()

    def launch(self, *args: object) -> Ticket:
        self.count += any(ticket.span is None for ticket in self._last)
        self._last[:] = [super().launch(*args)]  # type: ignore[arg-type]
        return self._last[0]

    def wait(self, ticket: Ticket) -> DeviceSpan:
        time.sleep(0.005 if ticket.span is None else 0.0)
        return super().wait(ticket)


@pytest.mark.parametrize("road", [None, Road.LAUNCH_AHEAD, Road.PREPARED_STEPS])
def test_each_road_can_be_closed(road: Road | None, pipeline: Open) -> None:
    """Tokens stay, and no step is launched ahead where it must not be."""
    devices: dict[int, Device] = {0: Ahead()}
    environment = {} if road is None else {str(road): "0"}
    with pipeline("llama", [4], fault=Fault(lambda: devices), environment=environment, micro_batches=2) as there:
        there.answers(*(ask(n, max_tokens=24) for n in (8, 9)))
    assert (devices[0].count > 0) == (road is not Road.LAUNCH_AHEAD)  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_open", [False, pytest.param(True, marks=NIGHTLY)])
def test_without_the_waiter_there_is_no_such_thread(is_open: bool, pipeline: Open) -> None:
    environment = {str(Road.WAITER): "1" if is_open else "0"}
    with pipeline("llama", [2, 2], accelerator=QUICK, environment=environment) as there:
        there.answers()
        assert any(thread.name == "waiter" for thread in threading.enumerate()) == is_open


@pytest.mark.parametrize("fallback", ["", "tcp://mini:5"])
@pytest.mark.parametrize(("value", "scheme"), [("1", "rdma"), ("0", "tcp")])
def test_rdma_can_be_closed(value: str, scheme: str, fallback: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(Road.RDMA, value)
    tried = list[str]()
    with worker("inproc") as address:

        def connect_to(asked: str, **named: Any) -> Link:
            tried.append(asked)
            return connect(address, **named)

        monkeypatch.setattr("splitinfer.engine.links.connection.connect", connect_to)
        reach("rdma://mini:5?backend=ring", fallback, SECONDS, LinkOptions()).link.close()
    assert tried == [{"rdma": "rdma://mini:5?backend=ring", "tcp": "tcp://mini:5"}[scheme]]
