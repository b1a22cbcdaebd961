"""A pipeline keeps its machines awake, has its threads scheduled for requests that wait, and announces its memory."""

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from processes import until
from stages import layout, pipeline, prompt, tokens_of, worker

from splitinfer.core.sequence import SamplingParams
from splitinfer.demo import TARGET
from splitinfer.engine.worker.worker import Worker
from splitinfer.errors import SplitinferError
from splitinfer.kvstore.store import Disk
from splitinfer.llm import LLM
from splitinfer.models import memory
from splitinfer.system import keep_awake, ledger, qos
from splitinfer.system.claims import Others
from splitinfer.system.ledger import Ledger

LINGER = 0.2  # seconds


class Power:
    """What is asked of the system, by thread."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {"coordinator": 0, "worker": 0}
        self.log: list[str] = []

    def prevent(self) -> Callable[[], None]:
        runs = threading.current_thread()._target.__self__  # type: ignore[attr-defined]
        side = "worker" if isinstance(runs, Worker) else "coordinator"
        self.log.append(side)
        self.held[side] += 1
        return lambda: self._release(side)

    def _release(self, side: str) -> None:
        self.held[side] -= 1


@pytest.fixture
def power(monkeypatch: pytest.MonkeyPatch) -> Power:
    found = Power()
    monkeypatch.setattr(keep_awake, "prevent_idle_sleep", found.prevent)
    monkeypatch.setattr(keep_awake, "LINGER", LINGER)
    return found


def test_the_coordinator_is_awake_while_requests_are_open_and_a_worker_while_it_is_used(power: Power):
    with worker("inproc") as address:
        assert power.log == [], "nobody has connected"
        with LLM(layout(TARGET, [6, 6], [address])) as llm:
            assert power.log == ["coordinator", "worker"], "while stages load, and no more than once each"
            until(lambda: power.held == {"coordinator": 0, "worker": 1}, "only the worker is kept awake", 10)
            long = SamplingParams(max_tokens=1000, ignore_eos=True)
            request = llm.submit(prompt(9), long)
            next(iter(request))
            assert power.held == {"coordinator": 1, "worker": 1}
            request.abort()
            until(lambda: power.held["coordinator"] == 0, "no request is open", 10)
            next(iter(llm.submit(prompt(9), long)))
            assert power.held["coordinator"] == 1
        assert power.held["coordinator"] == 0
        until(lambda: power.held["worker"] == 0, "the worker's coordinator is gone", 10)
    assert set(power.held.values()) == {0}


def test_a_system_that_refuses_changes_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    def refuse() -> None:
        raise OSError("no power daemon")

    monkeypatch.setattr(keep_awake, "prevent_idle_sleep", refuse)
    with pipeline(TARGET, [6, 6]) as llm:
        assert len(tokens_of(llm, prompt(9), max_tokens=4)) == 4
    assert sum("may go to sleep" in record.message for record in caplog.records) == 2, "once on either side"


def test_every_thread_on_a_tokens_way_is_scheduled_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    seen: dict[str, str] = {}

    def note(qos: str) -> None:
        seen[threading.current_thread().name] = qos

    monkeypatch.setattr(qos, "serve_requests", partial(note, "serves"))
    monkeypatch.setattr(qos, "write_behind", partial(note, "writes"))
    with pipeline(TARGET, [6, 6], disks=[Disk(tmp_path / "a", 10**8), Disk(tmp_path / "b", 10**8)]) as llm:
        tokens_of(llm, prompt(9), max_tokens=2)
    assert seen["engine"] == "serves"
    assert seen["kv-writer"] == "writes"


def test_what_is_announced_follows_a_stage_to_its_end(monkeypatch: pytest.MonkeyPatch):
    other = Ledger(ledger._default_folder(), group=1)
    with worker("inproc") as address:
        assert other.others() == Others()
        with LLM(layout(TARGET, [6, 6], [address])) as llm:
            growth = sum(int(ready.free_bytes * memory.KV_SHARE) for ready in llm._engine.pipeline.ready)
            assert other.others().to_come == pytest.approx(growth, rel=0.01), "of both stages, in one process"
            assert other.others().held > 10**6
        until(lambda: other.others().to_come == 0, "the worker only keeps its weights", 10)
        assert other.others().held > 0
    assert other.others() == Others()


def test_a_local_worker_belongs_to_its_coordinator():
    folder = ledger._default_folder()
    with LLM(layout(TARGET, [6, 6], ["local"])):
        reader = Ledger(folder, group=1)
        with reader.locked():
            assert [claim.group for claim in reader._read()] == [os.getpid()] * 2
        assert Ledger(folder, group=os.getpid()).others().to_come < reader.others().to_come, "they share what they have"
    until(lambda: not [path for path in folder.iterdir() if path.name != "lock"], "nothing is claimed any more", 10)


def test_a_stage_that_is_not_loaded_after_all_announces_nothing(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise SplitinferError("no such tensor")

    monkeypatch.setattr("splitinfer.engine.stage.loader.load_stage", fail)
    with pytest.raises(SplitinferError, match="no such tensor"):
        LLM(layout(TARGET, [12], []))
    assert Ledger(ledger._default_folder(), group=1).others() == Others()
