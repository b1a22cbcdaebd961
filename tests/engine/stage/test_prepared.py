"""Graphs that are built ahead change nothing: a runner that prepares after its steps gives, bit for bit, what one gives
that never does, whatever plans come."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny
from effort import thorough
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache
from stages import prompt

from splitinfer.core.kv.format import format_of
from splitinfer.core.plan import NewSequence, SampledToken, Save, Slice, StepPlan
from splitinfer.core.sequence import SamplingParams
from splitinfer.engine.device.mlx_device import MlxDevice
from splitinfer.engine.stage.launched import Finished
from splitinfer.engine.stage.masking import RowMasks, mask_of
from splitinfer.engine.stage.prepared import PreparedStep, PreparedSteps
from splitinfer.engine.stage.runner import StageRunner
from splitinfer.engine.stage.step_graph import StepGraph
from splitinfer.models.caches import Place, WindowKVCache
from splitinfer.models.checkpoint import open_folder
from splitinfer.models.cohort import SequenceCaches
from splitinfer.models.cut import StageModel
from splitinfer.models.hidden_states import ReceivedRows
from splitinfer.models.loader import load_stage, survey
from splitinfer.models.mlx_lm import CacheList, KVCache
from splitinfer.models.snapshot import Snapshot
from splitinfer.models.step import StepModel
from splitinfer.models.tensors import spec_of, to_buffer

VOCAB = 160
PARAMS = (
    SamplingParams(),
    SamplingParams(temperature=0.8, top_k=20),
    SamplingParams(temperature=0.7, logprobs=2),
    SamplingParams(repetition_penalty=1.2),
    SamplingParams(frequency_penalty=0.9, presence_penalty=0.3),
    SamplingParams(temperature=0.7, logit_bias={3: 2.0}),
)
MODELS = [  # model, changes to it, KV format, layers of the first stage, whether sequences of any length share calls
    ("llama", {}, "exact", 2, True),
    ("llama", {"head_dim": 64}, "k8v4", 1, True),
    ("gemma3_text", {}, "exact", 2, False),
    ("qwen3_next", {}, "exact", 2, False),
]
STATES = ("qwen3_next",)


def load(folder: Path, kv_format: str, cut: int) -> list[StageModel]:
    checkpoint, made = open_folder(folder), []
    num_layers = checkpoint.config["num_hidden_layers"]
    for start, end in ((0, cut), (cut, num_layers)):
        found = survey(checkpoint, start, end, "float32", format_of(kv_format))
        made.append(load_stage(checkpoint, found, start, end, "float32", lambda _done, _total: None))
    return made


def runners(models: Sequence[StageModel], *, share: bool) -> list[StageRunner]:
    made = [StageRunner(model, i, VOCAB, MlxDevice(computes_at_launch=False)) for i, model in enumerate(models)]
    for runner, model in zip(made, models, strict=True):
        if share:
            runner._step = StepModel(model, exact=False)
        runner.prepare()
    return made


@dataclass
class Open:
    """A sequence: its tokens, and how many of them the stages have computed."""

    tokens: list[int]
    at: int = 0
    num_prompt: int = 0
    blocks: int = 0


@dataclass
class Script:
    """Makes plans from numbers, and has both pipelines carry them out."""

    plain: list[StageRunner]
    ahead: list[StageRunner]
    has_states: bool
    sequences: dict[int, Open] = field(default_factory=dict)
    blocks: dict[int, list[int]] = field(default_factory=dict)  # tokens of stored blocks
    pending: dict[str, list[Any]] = field(default_factory=dict)  # for the next plan
    num_steps: int = 0
    last: list[int] = field(default_factory=list)
    num_opened: int = 0

    def __post_init__(self) -> None:
        for runner in (*self.plain, *self.ahead):
            runner.reset()

    def play(self, ops: Sequence[tuple[int, int, int]]) -> None:
        acts = [self.begin, self.begin_in_chunks, self.decode, self.draft, self.free, self.save, self.continue_block,
                self.decode_all, self.repeat, self.repeat]  # fmt: skip
        for kind, number, prepares in ops:
            acts[kind](number, prepares)

    # -- what may happen -----------------------------------------------------------------------

    def begin(self, number: int, prepares: int) -> None:
        self._open(prompt((1, 3, 9, 30, 70)[number % 5], VOCAB, seed=number), number)
        self._advance([self.num_opened], prepares)

    def begin_in_chunks(self, number: int, prepares: int) -> None:
        """A chunk without logits, beside whatever decodes."""
        beside = self._ready()[: number % 3]
        self._open(prompt(12 + number, VOCAB, seed=number), number)
        one = self.sequences[self.num_opened]
        chunk = Slice(self.num_opened, 0, tuple(one.tokens[:5]), 0)
        one.at = 5
        self._run([chunk, *map(self._rest, beside)], prepares)

    def decode(self, number: int, prepares: int) -> None:
        ready = self._ready()
        self._advance([seq_id for i, seq_id in enumerate(ready) if number >> (i % 4) & 1], prepares)

    def decode_all(self, _number: int, prepares: int) -> None:
        self._advance(self._ready()[::-1], prepares)

    def repeat(self, number: int, prepares: int) -> None:
        """The last group decodes again, as groups do."""
        for _ in range(1 + number % 4):
            self._advance([seq_id for seq_id in self.last if seq_id in self.sequences], prepares)

    def draft(self, number: int, prepares: int) -> None:
        for seq_id in self._ready()[number % 3 :][:1]:
            one = self.sequences[seq_id]
            if len(one.tokens) - one.at == 1:
                drafts = tuple((one.tokens[-1] + i) % VOCAB for i in range(1 + number % 3))
                part = Slice(seq_id, one.at, (one.tokens[-1], *drafts), len(drafts) + 1, len(drafts))
                self._run([part], prepares)

    def free(self, number: int, _prepares: int) -> None:
        for seq_id in list(self.sequences)[number % 4 :][:1]:
            del self.sequences[seq_id]
            self._later("freed", seq_id)

    def save(self, number: int, _prepares: int) -> None:
        for seq_id in list(self.sequences)[number % 4 :][:1]:
            one, block_id = self.sequences[seq_id], 100 + len(self.blocks)
            if one.at and seq_id not in {save.seq_id for save in self.pending.get("saves", ())}:
                self.blocks[block_id] = one.tokens[: one.at]
                self._later("saves", Save(block_id, seq_id, 0, one.at))

    def continue_block(self, number: int, prepares: int) -> None:
        for block_id, tokens in list(self.blocks.items())[number % 3 :][:1]:
            length = len(tokens) if self.has_states else max(1, len(tokens) - number % 3)
            self._open([*tokens[:length], *prompt(1 + number % 2, VOCAB, seed=number)], number, (block_id,), length)
            self._advance([self.num_opened], prepares)

    # -- plans ---------------------------------------------------------------------------------

    def _open(self, tokens: list[int], number: int, blocks: tuple[int, ...] = (), length: int = 0) -> None:
        self.num_opened += 1
        self.sequences[self.num_opened] = Open(tokens, length, len(tokens))
        params = PARAMS[number % len(PARAMS)]
        new = NewSequence(self.num_opened, params, number, blocks, tuple(tokens[:length]), len(tokens))
        self._later("new", new)

    def _later(self, name: str, command: Any) -> None:
        self.pending.setdefault(name, []).append(command)

    def _ready(self) -> list[int]:
        return [seq_id for seq_id, one in self.sequences.items() if one.at < len(one.tokens)]

    def _rest(self, seq_id: int) -> Slice:
        one = self.sequences[seq_id]
        return Slice(seq_id, one.at, tuple(one.tokens[one.at :]), 1)

    def _advance(self, seq_ids: Sequence[int], prepares: int) -> None:
        if seq_ids:
            self._run([self._rest(seq_id) for seq_id in seq_ids], prepares)

    def _run(self, slices: list[Slice], prepares: int) -> None:
        commands = {name: tuple(values) for name, values in self.pending.items()}
        self.pending.clear()
        plan = StepPlan(self.num_steps, slices=tuple(slices), **commands)
        self.num_steps += 1
        self.last = [part.seq_id for part in slices]
        done = self._carry_out(plan, prepares)
        tokens = {sampled.seq_id: sampled.tokens for sampled in done.sampled}
        for part in slices:
            self._learn(part, [token.token_id for token in tokens.get(part.seq_id, ())])

    def _learn(self, part: Slice, sampled: list[int]) -> None:
        one = self.sequences[part.seq_id]
        one.at = part.end
        one.tokens += sampled
        if part.num_drafts and len(sampled) < part.num_logits:
            one.at = len(one.tokens) - 1

    def _carry_out(self, plan: StepPlan, prepares: int) -> Finished:
        before, hidden, masks = prepares & 1, None, _masks(plan)
        for stage, (plain, ahead) in enumerate(zip(self.plain, self.ahead, strict=True)):
            given = partial(dict, masks) if stage and masks else None
            expected = plain.finish(plain.launch(plan, hidden, given))
            launched = ahead.launch(plan, hidden, given)
            got = None if before else ahead.finish(launched)
            for _ in range(prepares >> 1):
                ahead.prepare_next()
            got = got or ahead.finish(launched)
            assert _same(got.hidden, expected.hidden), f"step {plan.step} on stage {stage}"
            assert _tokens(got) == _tokens(expected), f"step {plan.step}"
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


def _tokens(done: Finished) -> list[tuple[SampledToken, ...]]:
    return [part.tokens for part in done.sampled]


def _sent(hidden: mx.array) -> ReceivedRows:
    """Hidden states as they come from a link."""
    return ReceivedRows(spec_of(hidden), None, (memoryview(bytes(to_buffer(hidden))),))


Pair = tuple[list[StageRunner], list[StageRunner]]


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: f"{model[0]}-{model[2]}")
def pair(request: pytest.FixtureRequest, tiny_folder: Callable[..., Path]) -> tuple[str, Pair]:
    name, changes, kv_format, cut, share = request.param
    models = load(tiny_folder(name, **changes), kv_format, cut)
    return name, (runners(models, share=share), runners(models, share=share))


OP = st.tuples(st.integers(0, 9), st.integers(0, 15), st.integers(0, 7))


@settings(max_examples=thorough(8, 60))
@given(ops=st.lists(OP, min_size=4, max_size=20))
def test_preparing_changes_no_bit(pair: tuple[str, Pair], ops: list[tuple[int, int, int]]) -> None:
    name, (plain, ahead) = pair
    Script(plain, ahead, name in STATES).play([(0, 1, 4), (0, 6, 4), (0, 2, 4), *ops])


DBRX = {
    "model_type": "dbrx", "d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": VOCAB,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
    "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
}  # fmt: skip


def test_a_model_that_looks_at_values_is_not_prepared(
    tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its graph would be that of token 0, whose experts are others."""
    monkeypatch.setitem(tiny.CONFIGS, "dbrx", DBRX)
    checkpoint = open_folder(tiny_folder("dbrx"))
    found, tokens = survey(checkpoint, 0, 2, "float32"), list[list[int]]()
    model = load_stage(checkpoint, found, 0, 2, "float32", lambda _done, _total: None)
    for prepares in (False, True):
        (runner,) = runners([model], share=False)
        chunk = Slice(1, 0, tuple(prompt(8)), 1)
        plan, answer = StepPlan(0, new=(NewSequence(1, PARAMS[0], 0),), slices=(chunk,)), list[int]()
        for step in range(12):
            (sampled,) = runner.finish(runner.launch(plan, None)).sampled
            answer.append(sampled.tokens[0].token_id)
            while prepares and runner.prepare_next():
                pass
            plan = StepPlan(step + 1, slices=(Slice(1, 8 + step, (answer[-1],), 1),))
        tokens.append(answer)
    assert tokens[0] == tokens[1]
    assert len(set(tokens[0])) > 2


# -- the parts -------------------------------------------------------------------------------------


def decode(seq_id: int, start: int) -> Slice:
    return Slice(seq_id, start, (7,), 1)


class Undone:
    """Stands for a snapshot; counts."""

    def __init__(self) -> None:
        self.count = 0

    def restore(self) -> None:
        self.count += 1


def prepared(*slices: Slice) -> tuple[PreparedStep, Undone]:
    undone, graph = Undone(), StepGraph(None, None, (), (), ())
    return PreparedStep(slices, graph, [], memoryview(bytearray(4)), None, undone), undone  # type: ignore[arg-type]


def test_only_the_step_that_comes_is_taken_and_what_it_makes_impossible_is_undone() -> None:
    steps, (one, first), (two, second), (three, third) = (
        PreparedSteps(), prepared(decode(1, 4)), prepared(decode(2, 4), decode(3, 4)), prepared(decode(4, 4)),
    )  # fmt: skip
    for step in (one, two, three):
        steps.add(step)
    assert steps.take(StepPlan(0, slices=(decode(1, 4),)), None) is one
    assert one.snapshot is None, "or computing would copy what it could write in place"
    assert steps.take(StepPlan(1, slices=(decode(2, 4),)), None) is None
    assert (first.count, second.count, third.count) == (0, 1, 0), "another group goes on"
    assert steps.take(StepPlan(2, slices=(decode(4, 4),), freed=(9,)), None) is three
    late, fourth = prepared(decode(5, 4))
    steps.add(late)
    assert steps.take(StepPlan(3, slices=(decode(5, 5),)), None) is None, "it is elsewhere"
    assert fourth.count == 1
    ended, fifth = prepared(decode(6, 4))
    steps.add(ended)
    assert steps.take(StepPlan(4, freed=(6,)), None) is None
    assert fifth.count == 1


def test_hidden_states_of_another_size_do_not_fill_a_prepared_step() -> None:
    steps, (one, undone) = PreparedSteps(), prepared(decode(1, 4))
    one.hidden = memoryview(bytearray(64 * 4))
    steps.add(one)
    assert steps.take(StepPlan(0, slices=(decode(1, 4),)), memoryview(bytes(64 * 2))) is None
    assert undone.count == 1


@pytest.mark.parametrize("kind", ["plain", "window", "state", "list"])
def test_a_snapshot_puts_back_what_was_written_in_place(kind: str) -> None:
    """Also beyond what the caches would read: else the graph that is not wanted any more would be computed."""
    cache = {
        "plain": KVCache, "window": partial(WindowKVCache, 24), "state": partial(ArraysCache, 2),
        "list": lambda: CacheList(KVCache(), ArraysCache(1)),
    }[kind]()  # fmt: skip
    caches = SequenceCaches([cache], [cache], Place())

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
    return list(cache.caches) if isinstance(cache, CacheList) else [cache]


def test_most_steps_are_prepared(pair: tuple[str, Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a group decodes again and again, every graph but the first is there when the step comes; so it is where one
    of its sequences has masks."""
    name, (plain, ahead) = pair
    taken = list[bool]()
    take = PreparedSteps.take

    def note(self: PreparedSteps, plan: StepPlan, *inputs: Any) -> PreparedStep | None:
        found = take(self, plan, *inputs)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(PreparedSteps, "take", note)
    script = Script(plain, ahead, name in STATES)
    script.play([(0, 5, 4), (0, 6, 4), (7, 0, 4), *[(8, 3, 4)] * 3])
    assert not any(taken[0::2]), "that pipeline never prepares"
    assert taken[1::2][-24:] == [True] * 24, "both stages, twelve steps"
