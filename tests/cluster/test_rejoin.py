"""A lost worker is waited for: what is said meanwhile, who is replaced and who is not.

That no token changes is in ``test_kills.py``.
"""

import signal
from pathlib import Path

import psutil
import pytest
from effort import long
from interrupts import freeze
from processes import coordinator, until, worker, write_layout

import splitinfer
from splitinfer.core.layout import StageSpec
from splitinfer.engine.coordinator.worker_group import WorkerGroup
from splitinfer.llm import LLM

THREE = {
    "model": "demo",
    "stages": [{"name": "a", "layers": 4}] + [{"name": n, "layers": 4, "address": "local"} for n in "bc"],
}
PARAMS = splitinfer.SamplingParams(max_tokens=100, ignore_eos=True)
TALE = ("--raw", "--prompt", "Once upon a time", "--max-tokens", "90", "--temp", "0.9", "--seed", "1")


def workers() -> dict[str, psutil.Process]:
    """Our local workers, by name."""
    lines = ((child, child.cmdline()) for child in psutil.Process().children())
    return {line[line.index("--name") + 1]: child for child, line in lines}


@pytest.mark.parametrize("victim", [long("b"), "c"])
def test_a_frozen_local_worker_is_replaced_unasked(victim: str, monkeypatch: pytest.MonkeyPatch):
    greeted: list[tuple[str, str]] = []
    connect = WorkerGroup.connect

    def note(self: WorkerGroup, stage: int, spec: StageSpec, address: str, timeout: float) -> None:
        greeted.append((spec.name, address))
        connect(self, stage, spec, address, timeout)

    monkeypatch.setattr(WorkerGroup, "connect", note)
    with LLM(THREE) as llm:
        expected = llm.generate("The king", PARAMS)[0].token_ids
        before, met = workers(), dict(greeted)
        other = "c" if victim == "b" else "b"
        greeted.clear()
        request = llm.submit("The king", PARAMS)
        events = iter(request)
        for _ in range(5):
            next(events)
        freeze(before[victim])
        assert request.result().token_ids == expected
        after = workers()
        assert not before[victim].is_running(), "the frozen one is gone"
        assert after[victim].pid != before[victim].pid, "a new one serves"
        assert after[other].pid == before[other].pid, "its neighbour only told of it, and stays"
        assert met[victim] not in dict(greeted).values(), "nobody waited for the frozen one to answer"
        assert sorted(name for name, _ in greeted) == ["b", "c"], "one attempt was enough"
        assert llm.stats()["rejoins"] == 1
        assert llm.stats()["losses"] == {victim: 1}


def test_what_to_do_is_said_and_the_answer_goes_on(tmp_path: Path):
    with worker() as first:
        layout, port = write_layout(tmp_path, [first.address]), first.address.rpartition(":")[2]
        with coordinator(layout, *TALE) as undisturbed:
            assert undisturbed.wait(60) == 0
        with coordinator(layout, *TALE) as running:
            running.prints(".{60}")
            first.signal(signal.SIGKILL)
            running.sees("waiting up to 60 s")
            with worker("--port", port):
                assert running.wait(30) == 0
            assert running.out == undisturbed.out
            said, back = running.complaints
            assert f"worker b ({first.address}) is gone" in said
            assert said.endswith(
                f"waiting up to 60 s for it: start it there again with: splitinfer worker --host 0.0.0.0 --port {port}"
            )
            assert "all stages are back" in back


def test_a_local_worker_is_said_to_be_started_again(tmp_path: Path):
    with coordinator(write_layout(tmp_path, ["local"]), *TALE) as running:
        running.prints(".{60}")
        running.children()[0].kill()
        running.sees("waiting up to 60 s for it: restarting it")
        assert running.wait(30) == 0
        assert len(running.complaints) == 2


def test_sigterm_while_a_worker_is_waited_for(tmp_path: Path):
    with worker() as remote, coordinator(write_layout(tmp_path, [remote.address]), *TALE) as running:
        running.prints(".{60}")
        remote.signal(signal.SIGKILL)
        running.sees("waiting up to")
        text = running.out
        running.signal(signal.SIGTERM)
        assert running.wait(15) == 143
        assert running.out.startswith(text)
        until(lambda: not running.children(), "nobody is left", 3)
