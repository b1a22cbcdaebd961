"""States go back to any row of a block of drafts, and go on from there as if the drafts had never been."""

import mlx.core as mx
import pytest
import tiny
from plans import Planned, cut_at

from splitinfer.core.kv.rewind import WITHIN_DRAFTS
from splitinfer.models.caches import rollback as kept
from splitinfer.models.caches.caches import rewind_limit
from splitinfer.models.caches.rollback import Rollback
from splitinfer.models.rows.kv_trial import try_rollback
from splitinfer.models.rows.step import Way

PROMPT, RIGHT, WRONG = 9, 3, 4


def stages_at(borders: tuple[int, ...], way: Rollback = Rollback.MODULES) -> Planned:
    """The stages of a model with recurrent layers."""
    return Planned(cut_at(tiny.build("qwen3_next")[0], *borders), way, exact=True)


def tokens_of(seq_id: int, count: int = PROMPT + RIGHT + WRONG) -> list[int]:
    return [(31 * seq_id + 7 * i) % 150 for i in range(count)]


def wrong(tokens: list[int]) -> list[int]:
    return [(token + 1) % 150 for token in tokens]


@pytest.mark.parametrize(("borders", "way"), [((), Rollback.STAGE), ((1, 3), Rollback.MODULES)], ids=str)
def test_to_every_row_of_a_block(borders: tuple[int, ...], way: Rollback) -> None:
    stages, tokens = stages_at(borders, way), tokens_of(1)
    for right in range(RIGHT + 1):
        stages.open(right, 100 + right)
        at = PROMPT + right
        stages.run((right, 0, tokens[:PROMPT], 0))
        stages.run((right, PROMPT, tokens[PROMPT:at] + wrong(tokens[at:]), RIGHT + WRONG - 1))
        stages.run((100 + right, 0, tokens[:PROMPT], 0))
        if right:
            stages.run((100 + right, PROMPT, tokens[PROMPT:at], 0))
        expected = stages.run((100 + right, at, tokens[at:], 0))
        assert mx.array_equal(stages.run((right, at, tokens[at:], 0)), expected), right


def test_across_blocks_in_flight_and_again() -> None:
    stages, tokens = stages_at((2,)), tokens_of(2, 30)
    stages.open(1, 2)
    stages.run((1, 0, tokens[:9], 0))
    stages.run((1, 9, tokens[9:12], 2))
    stages.run((1, 12, [tokens[12], *wrong(tokens[13:16])], 4), follows=True)
    stages.run((1, 16, wrong(tokens[16:18]), 2), follows=True)
    stages.run((1, 13, [tokens[13], *wrong(tokens[14:17])], 3))  # a draft of the second block was wrong
    again = stages.run((1, 14, tokens[14:20], 0))
    stages.run((2, 0, tokens[:9], 0))
    for start, end in ((9, 12), (12, 13), (13, 14)):
        stages.run((2, start, tokens[start:end], 0))
    assert mx.array_equal(again, stages.run((2, 14, tokens[14:20], 0)))


def test_blocks_of_several_sequences_in_one_step() -> None:
    stages = stages_at((1,))
    assert all(step.way is Way.MIXED for step in stages.steps)
    stages.open(*range(6))
    for seq_id in range(6):
        stages.run((seq_id, 0, tokens_of(seq_id % 3)[: PROMPT + seq_id % 3], 0))
    blocks, expected = [], []
    for seq_id in range(3):
        start, tokens = PROMPT + seq_id, tokens_of(seq_id)
        blocks.append((seq_id, start, [*tokens[start : start + 2], *wrong(tokens[start + 2 : start + 4])], 3))
        stages.run((3 + seq_id, start, tokens[start : start + 2], 0))
        expected.append(stages.run((3 + seq_id, start + 2, tokens[start + 2 : start + 4], 0)))
    stages.run(*blocks)
    slices = [(i, PROMPT + i + 2, tokens_of(i)[PROMPT + i + 2 : PROMPT + i + 4], 0) for i in range(3)]
    assert mx.array_equal(stages.run(*slices), mx.concatenate(expected))


def test_no_projection_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stages, tokens, products = stages_at(()), tokens_of(1), []
    stages.open(1)
    stages.run((1, 0, tokens[:PROMPT], 0))
    stages.run((1, PROMPT, wrong(tokens[PROMPT:]), RIGHT + WRONG - 1))
    for linear in (kept.nn.Linear, kept.nn.QuantizedLinear):
        monkeypatch.setattr(linear, "__call__", lambda self, _x: products.append(self))
    states = kept.state_caches(stages.pools[0].at(1, PROMPT + 2))
    mx.eval([state.state for state in states])
    assert states
    assert not products


def test_the_trial_finds_a_state_that_did_not_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = stages_at((1,))
    for stage, step in zip(stages.stages, stages.steps, strict=True):
        assert min(limit for limit in map(rewind_limit, stage.make_caches().own) if limit is not None) == WITHIN_DRAFTS
        assert try_rollback(stage, step) is Rollback.MODULES
    again = kept._Call.again
    monkeypatch.setattr(kept._Call, "again", lambda call, count: again(call, count - 1))
    assert [try_rollback(*pair) for pair in zip(stages.stages, stages.steps, strict=True)] == [Rollback.STAGE] * 2
    monkeypatch.setattr(kept.DraftedBlock, "restore", lambda *_: None)
    assert try_rollback(stages.stages[0], stages.steps[0]) is None
