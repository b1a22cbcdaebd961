"""Graphs that are built ahead change nothing: a runner that prepares after its steps gives, bit for bit, what one gives
that never does, whatever plans come."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny
from engine.door import num_layers
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache
from stages import loaded, prompt
from tiny import Folder

from splitinfer.core.plan import NewSequence, Save, Slice, StepPlan
from splitinfer.core.sequence import SamplingParams
from splitinfer.engine.device.device import Device
from splitinfer.engine.stage.launched import Finished
from splitinfer.engine.stage.masking import RowMasks, mask_of
from splitinfer.engine.stage.outcomes import try_stage
from splitinfer.engine.stage.prepared import Snapshot
from splitinfer.engine.stage.runner import StageRunner
from splitinfer.models.border.hidden_states import ReceivedRows
from splitinfer.models.border.tensors import spec_of, to_buffer
from splitinfer.models.caches.caches import CachePlace, WindowKVCache
from splitinfer.models.caches.cohort import SequenceCaches
from splitinfer.models.cut.cut import StageModel
from splitinfer.models.library.mlx_lm import cache as mlx_caches
from tests.matrix.configs import configurations

VOCAB = 160
PARAMS = (
    SamplingParams(),
    SamplingParams(temperature=0.8, top_k=20),
    SamplingParams(temperature=0.7, logprobs=2),
    SamplingParams(repetition_penalty=1.2),
    SamplingParams(frequency_penalty=0.9, presence_penalty=0.3),
    SamplingParams(temperature=0.7, logit_bias={3: 2.0}),
)
MODELS = [  # model, changes to it, KV format, layers of the first stage
    ("llama", {}, "exact", 2),
    pytest.param(("llama", {"head_dim": 64}, "k8v4", 1), marks=pytest.mark.nightly, id="llama-k8v4"),
    pytest.param(("gemma3_text", {}, "exact", 2), marks=pytest.mark.nightly, id="gemma3_text"),
    ("qwen3_next", {}, "exact", 2),
]
STATES = ("qwen3_next",)


def runners(models: list[StageModel], kv_format: str = "exact") -> list[StageRunner]:
    made = [StageRunner(model, i, VOCAB, Device(computes_at_launch=False)) for i, model in enumerate(models)]
    for model, runner in zip(models, made, strict=True):
        runner.use(try_stage(model, kv_format, lambda _what: None))
    return made


@dataclass
class Sequence:
    """Its tokens, and how many of them the stages have computed."""

    tokens: list[int]
    at: int = 0


class Twice:
    """Two pipelines of the same stages carry out the same plans: one prepares after its steps, the other never does."""

    def __init__(self, plain: list[StageRunner], ahead: list[StageRunner], seed: int) -> None:
        self.plain, self.ahead, self.random = plain, ahead, Random(seed)
        self.sequences: dict[int, Sequence] = {}
        self.num_opened = self.num_steps = self.num_prepared = 0
        for runner in (*plain, *ahead):
            runner.reset()

    def open(self, tokens: list[int], blocks: tuple[int, ...] = (), length: int = 0) -> NewSequence:
        self.num_opened += 1
        self.sequences[self.num_opened] = Sequence(tokens, length)
        params = PARAMS[self.num_opened % len(PARAMS)]
        return NewSequence(self.num_opened, params, self.num_opened, blocks, tuple(tokens[:length]), len(tokens))

    def rest(self, seq_id: int) -> Slice:
        one = self.sequences[seq_id]
        return Slice(seq_id, one.at, tuple(one.tokens[one.at :]), 1)

    def decode(self, seq_ids: Iterable[int], times: int = 1, **commands: tuple[Any, ...]) -> None:
        for _ in range(times):
            self.run([self.rest(seq_id) for seq_id in seq_ids], **commands)
            commands = {}

    def run(self, slices: list[Slice], **commands: tuple[Any, ...]) -> None:
        plan = StepPlan(self.num_steps, slices=tuple(slices), **commands)
        self.num_steps += 1
        tokens = {part.seq_id: [token.token_id for token in part.tokens] for part in self._carry_out(plan).sampled}
        for part in slices:
            one, sampled = self.sequences[part.seq_id], tokens.get(part.seq_id, [])
            one.tokens, one.at = one.tokens + sampled, part.end
            if part.num_drafts and len(sampled) < part.num_logits:
                one.at = len(one.tokens) - 1

    def _carry_out(self, plan: StepPlan) -> Finished:
        hidden, masks = None, _masks(plan)
        for stage, (plain, ahead) in enumerate(zip(self.plain, self.ahead, strict=True)):
            given = partial(dict, masks) if stage and masks else None
            expected = plain.finish(plain.launch(plan, hidden, given))
            launched, before = ahead.launch(plan, hidden, given), self.random.random() < 0.5
            got = None if before else ahead.finish(launched)
            self.num_prepared += sum(ahead.prepare_next() for _ in range(self.random.choice((0, 1, 2, 2))))
            got = got or ahead.finish(launched)
            assert _same(got.hidden, expected.hidden), f"step {plan.step} on stage {stage}"
            assert [part.tokens for part in got.sampled] == [part.tokens for part in expected.sampled]
            hidden = None if got.hidden is None else _sent(got.hidden)
        return got


def _masks(plan: StepPlan) -> RowMasks:
    """Of every third sequence always, of every third now and then, of the others none. Many leave one token."""
    return {
        (part.seq_id, row): mask_of(_words(np.random.default_rng((plan.step, part.seq_id, row))), VOCAB)
        for part in plan.slices
        for row in range(part.num_logits)
        if part.seq_id % 3 == 1 or (part.seq_id % 3 == 0 and plan.step % 4)
    }


def _words(drawn: np.random.Generator) -> bytes:
    allowed = drawn.random(VOCAB) < 0.5 if drawn.random() < 0.6 else np.arange(VOCAB) == drawn.integers(VOCAB)
    return np.packbits(allowed, bitorder="little").tobytes()


def _same(a: mx.array | None, b: mx.array | None) -> bool:
    return (a is None and b is None) or bool(np.array_equal(np.array(a), np.array(b)))


def _sent(hidden: mx.array) -> ReceivedRows:
    """Hidden states as they come from a link."""
    return ReceivedRows(spec_of(hidden), None, (memoryview(bytes(to_buffer(hidden))),))


Pair = tuple[list[StageRunner], list[StageRunner]]


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: f"{model[0]}-{model[2]}")
def pair(request: pytest.FixtureRequest, tiny_folder: Folder) -> tuple[str, Pair]:
    name, changes, kv_format, cut = request.param
    folder = tiny_folder(name, **changes)
    models = loaded(folder, cut, num_layers(folder), kv_format=kv_format)
    return name, (runners(models, kv_format), runners(models, kv_format))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 12))])
def test_preparing_changes_no_bit(pair: tuple[str, Pair], seed: int) -> None:
    """Groups that decode again and again, join, part, draft, end, and begin with blocks; with masks now and then."""
    name, (plain, ahead) = pair
    twice = Twice(plain, ahead, seed)
    choose = twice.random
    for length in (9, 1, 70, 3, 30, 12):
        new = twice.open(prompt(length, VOCAB, seed=length))
        twice.decode([new.seq_id], new=(new,))
    for _ in range(3):
        some = choose.sample(list(twice.sequences), choose.randint(1, len(twice.sequences)))
        twice.decode(some, 3)
    assert twice.num_prepared > 0
    one = twice.sequences[2]
    twice.run([Slice(2, one.at, (*one.tokens[one.at :], 4, 5, 6), 4, 3)])  # drafts, mostly wrong
    twice.decode(twice.sequences, 2)
    stored = twice.sequences[1].tokens[: twice.sequences[1].at]
    length = len(stored) - (0 if name in STATES else 2)
    del twice.sequences[3]
    others = list(twice.sequences)
    new = twice.open([*stored[:length], *prompt(2, VOCAB, seed=3)], (100,), length)
    twice.decode(others, saves=(Save(100, 1, 0, len(stored)),), freed=(3,))
    chunk = twice.open(prompt(20, VOCAB, seed=8))
    twice.run([Slice(chunk.seq_id, 0, tuple(prompt(20, VOCAB, seed=8)[:5]), 0), *map(twice.rest, others)], new=(chunk,))
    twice.decode([new.seq_id], new=(new,))
    twice.decode(list(twice.sequences)[::-1], 3)
    twice.decode([1, 5], 3)


def test_a_model_that_looks_at_values_is_not_prepared(tmp_path: Path) -> None:
    """Its graph would be that of token 0, whose experts are others."""
    dbrx = {**configurations()["dbrx"], "vocab_size": VOCAB}
    models = loaded(tiny.save(tmp_path / "dbrx", "llama", **dbrx), 4)
    twice = Twice(runners(models), runners(models), 0)
    new = twice.open(prompt(8))
    twice.decode([new.seq_id], new=(new,))
    twice.decode([new.seq_id], 11)
    assert len(set(twice.sequences[new.seq_id].tokens[8:])) > 2


@pytest.mark.parametrize("kind", ["plain", "window", "state", "list"])
def test_a_snapshot_puts_back_what_was_written_in_place(kind: str) -> None:
    """Also beyond what the caches would read: else the graph that is not wanted any more would be computed."""
    cache = {
        "plain": mlx_caches.KVCache, "window": partial(WindowKVCache, 24), "state": partial(ArraysCache, 2),
        "list": lambda: mlx_caches.CacheList(mlx_caches.KVCache(), ArraysCache(1)),
    }[kind]()  # fmt: skip
    caches = SequenceCaches([cache], [cache], CachePlace())

    def write(value: float) -> None:
        new = mx.full((1, 2, 1, 8), value)
        for one in _leaves(cache):
            if isinstance(one, ArraysCache):
                one[0] = new
            else:
                one.update_and_fetch(new, new)
        caches.place.position += 1

    def read() -> list[Any]:
        arrays = [array for one in _leaves(cache) for _, array in tree_flatten(one.state)]
        return [array.tolist() if isinstance(array, mx.array) else array for array in arrays]

    write(1.0)
    before, snapshot = read(), Snapshot([caches])
    write(2.0)
    assert read() != before
    snapshot.restore()
    assert read() == before
    assert caches.place.position == 1


def _leaves(cache: Any) -> list[Any]:
    return list(cache.caches) if isinstance(cache, mlx_caches.CacheList) else [cache]
