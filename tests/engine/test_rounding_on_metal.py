"""Tokens where rows round as Metal's kernels do, by MLX's source: what a GPU alone would show, shown here.

Whatever is computed together, in whatever chunks, with drafts, from kept KV or after a loss, each token is plain
mlx-lm's choice up to rounding (``door``), and the trials at loading find the same as without rounding.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny
from engine.door import QUICK, Guesses, Open, ask, some_wrong, streams_of, worker_lost
from tiny import Folder

from splitinfer import Flight
from splitinfer.engine.stage import runner
from splitinfer.engine.stage.outcomes import TrialOutcome, try_stage
from splitinfer.kvstore.store import Disk
from splitinfer.models import blas
from splitinfer.models.cut.cut import StageModel
from tests.emulation.metal import CHIPS
from tests.emulation.rounding import _SIZE, RowNoise

NIGHTLY = pytest.mark.nightly
ASKS = (ask(70, max_tokens=24), ask(9, max_tokens=24), ask(23, max_tokens=24, temperature=0.9), ask(14, max_tokens=24))


def usual(first: Any, *others: Any) -> list[Any]:
    return [first, *(pytest.param(other, marks=NIGHTLY) for other in others)]


@pytest.fixture(params=usual("M4 Max", "M1", "M3 Ultra", "M5 Max"))
def chip(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    RowNoise(_SIZE, chip=CHIPS[request.param]).install(monkeypatch.setattr)
    return str(request.param)


@pytest.mark.parametrize("bits", usual(4, None))
@pytest.mark.parametrize("name", usual("llama", "gemma3_text", "qwen3_moe", "gpt_oss", "qwen3_next", "deepseek_v3"))
def test_several_at_once_with_drafts(
    name: str, bits: int | None, chip: str, pipeline: Open, tiny_folder: Folder
) -> None:
    folder = tiny_folder(name, **({} if bits is None else {"bits": bits}))
    streams, layers = streams_of(folder, ASKS), tiny.CONFIGS[name]["num_hidden_layers"]
    made = {"drafter": lambda: Guesses(streams, some_wrong), "accelerator": QUICK, "token_budget": 16}
    for flight in (None, Flight(3, 4, 2)):
        with pipeline(folder, [1, layers - 1], scheme="tcp", **made) as there:
            there.answers(*(replace(one, flight=flight) for one in ASKS))
            assert flight is None or there.stats["speculation"]["accepted"] > 5


def test_after_a_loss_and_from_kept_kv(chip: str, tmp_path: Path, pipeline: Open) -> None:
    disks = [Disk(tmp_path / str(stage), 2**24) for stage in range(2)]
    made = {"disks": disks, "block": 8, "accelerator": QUICK, "token_budget": 16}
    with pipeline("llama", [1, 3], fault=worker_lost(), **made) as there:
        there.answers(*ASKS)
    with pipeline("llama", [1, 3], **made) as there:
        outputs = there.outputs(*ASKS)
    assert sum(output.num_cached_tokens for output in outputs) > 60


def test_a_wrong_token_is_not_taken_for_rounding(chip: str, pipeline: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    read = runner.read

    def wrong(choices: Any, rows: Any) -> Any:
        return [
            replace(one, token_id=one.token_id ^ (row.position == 12))
            for one, row in zip(read(choices, rows), rows, strict=True)
        ]

    monkeypatch.setattr(runner, "read", wrong)
    with pytest.raises(AssertionError, match="logits below mlx-lm's choice"), pipeline("llama", [2, 2]) as there:
        there.answers(ask(9, max_tokens=8))


def outcome(name: str, bits: int | None, patch: pytest.MonkeyPatch, chip: str = "") -> TrialOutcome:
    """What the trials of a whole model find, on a chip or where rows might round otherwise and do not."""
    model, layers = tiny.build(name)[0], tiny.CONFIGS[name]["num_hidden_layers"]
    if bits is not None:
        has_words = lambda _, each: hasattr(each, "to_quantized") and each.weight.shape[-1] % 32 == 0  # noqa: E731
        nn.quantize(model, 32, bits, class_predicate=has_words)
    mx.eval(model.parameters())
    with patch.context() as here:
        here.setattr(blas, "_maps", lambda: None)
        if chip:
            RowNoise(_SIZE, chip=CHIPS[chip]).install(here.setattr)
        return try_stage(StageModel(model, 0, layers), "exact", lambda _subject: None)


@pytest.mark.parametrize("bits", usual(4, None))
@pytest.mark.parametrize("name", usual("qwen3_moe", *sorted(tiny.CONFIGS.keys() - {"qwen3_moe"})))
def test_the_trials_find_what_they_find_without_rounding(
    name: str, bits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = outcome(name, bits, monkeypatch)
    assert {chip: outcome(name, bits, monkeypatch, chip) for chip in ("M1", "M4 Max", "M5 Max")} == dict.fromkeys(
        ("M1", "M4 Max", "M5 Max"), expected
    )
