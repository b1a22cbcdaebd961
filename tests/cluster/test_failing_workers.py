"""Workers whose device fails, has no memory left or stands still while their process lives: real processes, and the
same tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from failing_worker import CODE
from processes import START_SECONDS, coordinator, local_workers, worker, write_layout

import splitinfer
from splitinfer import cleanup
from splitinfer.core import liveness
from splitinfer.engine.coordinator import local_workers as product
from splitinfer.llm import LLM

pytestmark = pytest.mark.nightly

TWO = {"model": "demo", "stages": [{"name": "a", "layers": 6}, {"name": "b", "layers": 6, "address": "local"}]}
PARAMS = splitinfer.SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.8, seed=4)
PROMPTS = ["The king", "Once upon a time", "A dog"]


class _Starting:
    """What starts local workers: with that code in the place of ``-m splitinfer``."""

    @staticmethod
    def start(command: Sequence[str], **how: Any) -> Any:
        assert list(command[1:3]) == ["-m", "splitinfer"]
        return cleanup.start([command[0], "-c", CODE, *command[3:]], **how)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with LLM({"model": "demo", "stages": [{"name": "a", "layers": 12}]}) as llm:
        return [output.token_ids for output in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize(
    ("fails", "is_replaced"),
    [("wait:5", True), ("memory:9", False), ("launch:9", True), ("stands:12", True)],
)
def test_a_local_worker_whose_device_fails(
    fails: str, is_replaced: bool, expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that stands still sends heartbeats all the time: only what the steps should have taken gives it away. One
    whose device has no memory left keeps its weights."""
    monkeypatch.setattr(product, "cleanup", _Starting)
    monkeypatch.setattr(liveness, "_BEYOND", 1.0)
    monkeypatch.setattr(liveness, "_UNKNOWN", 3.0)
    monkeypatch.setenv("FAILS", f"{fails}:{tmp_path / 'mark'}")
    with LLM(TWO) as llm:
        before = local_workers()["b"]
        assert [output.token_ids for output in llm.generate(PROMPTS, PARAMS)] == expected
        assert (tmp_path / "mark").exists()
        assert llm.stats()["rejoins"] == 1
        assert before.is_running() != is_replaced


def test_a_worker_elsewhere_whose_device_fails_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides say why; whoever keeps it running starts it again."""
    monkeypatch.setenv("FAILS", f"wait:5:{tmp_path / 'mark'}")
    with worker(code=CODE) as remote:
        layout, port = write_layout(tmp_path, [remote.address]), remote.address.rpartition(":")[2]
        with coordinator(layout, "--raw", "--prompt", "The king", "--max-tokens", "40") as running:
            running.sees(r"worker b \(.*\) cannot go on: the device failed \(as a test wished\); waiting up to 60 s")
            assert remote.wait(START_SECONDS) == 1
            assert "session ended: the device failed (as a test wished)" in remote.err
            with worker("--port", port, code=CODE):
                assert running.wait(START_SECONDS) == 0
            said, back = running.complaints
            assert said.endswith(f"start it there again with: splitinfer worker --host 0.0.0.0 --port {port}")
            assert "all stages are back" in back
