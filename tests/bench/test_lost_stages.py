"""What was measured before a stage was lost is kept, and what it disturbed is left out."""

from types import SimpleNamespace
from typing import Any

import pytest

from splitinfer.bench import speed
from splitinfer.bench.options import Options
from splitinfer.bench.parts import STREAMS, Cell, Part, speed_parts
from splitinfer.errors import WorkerLost


class Losing:
    """A system whose stage is lost in the second trial: for a while, or for good."""

    name, rejoins, is_gone = speed.PIPELINE, 0, False

    def __init__(self, *_: object) -> None:
        self.answers: dict[str, tuple[int, ...]] = {}

    def do(self, part: Part, trial: int) -> Cell:
        if trial == 1 and part.kind == STREAMS:
            if Losing.is_gone:
                raise WorkerLost("worker back is gone")
            Losing.rejoins += 1
        return Cell([10.0 + trial])


@pytest.mark.parametrize(
    ("is_gone", "streams", "prompts", "note"),
    [
        (False, [10.0, 12.0], [10.0, 11.0, 12.0], "trial 2, 2 streams: left out, as a stage was lost meanwhile"),
        (True, [10.0], [10.0], "ended in trial 2, 2 streams: worker back is gone"),
    ],
)
def test_what_was_measured_before_a_stage_was_lost_is_kept(
    is_gone: bool, streams: list[float], prompts: list[float], note: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(Losing, "is_gone", is_gone)
    for name, value in (("PipelineSystem", Losing), ("vocabulary", lambda *_: 300), ("_SETTLE", 0)):
        monkeypatch.setattr(speed, name, value)
    llm: Any = SimpleNamespace(has_tokenizer=False, stats=lambda: {"rejoins": Losing.rejoins})
    parts, notes = speed_parts(8, 40, (2,)), list[str]()
    cells, _ = speed._take_turns(Options("demo.yaml", trials=3), llm, None, parts, notes)
    assert [cells[speed.PIPELINE][name].values for name in ("streams_2", "prompt_40")] == [streams, prompts]
    assert notes == [note]
    assert "3 trials will take about" in capsys.readouterr().err
    monkeypatch.setattr(Losing, "do", lambda *_: (_ for _ in ()).throw(WorkerLost("gone")))
    with pytest.raises(WorkerLost):  # nothing was measured yet
        speed._take_turns(Options("demo.yaml"), llm, None, parts, notes)
