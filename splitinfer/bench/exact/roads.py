"""The roads: every way in which a pipeline may compute the same positions, on the whole model in this process.

    alone       the prompt in the usual chunks, then one row at a time: the reference
    together    the same beside other sequences, whose rows are in each step
    beside      the same beside a prompt that is being read, a chunk in each step
    chunks      the prompt in chunks of another size
    drafts      the answer in blocks, as when drafts are verified
    replay      prompt and answer computed again in chunks, as when KV was lost

The cut of a layout adds nothing to that: hidden states cross as they are, and the same kernels compute each layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from splitinfer.bench.exact.partings import Reference, Taken
from splitinfer.bench.shared.workload import made_up
from splitinfer.models.cohort import SequenceCaches
from splitinfer.models.cut import StageModel
from splitinfer.models.rows import Part
from splitinfer.models.step import StepModel, arrays_to_evaluate

CHUNK = 512  # rows of a step, as on a GPU
_NEIGHBOUR = 16  # tokens, at least, of a neighbour's prompt
_BESIDE = 64  # rows of a neighbour's prompt in each step


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt, its greedy answer by one row at a time, and that answer's logits [N, vocabulary]."""

    prompt: tuple[int, ...]
    reference: Reference
    logits: mx.array

    @property
    def inputs(self) -> list[int]:
        """The tokens whose rows give the answer's logits, but for the first, which the prompt gives."""
        return list(self.reference.tokens[:-1])


@dataclass(frozen=True, slots=True)
class Road:
    """``name``: for people; ``logits``: [N, vocabulary] of an answer's positions, given its tokens."""

    name: str
    logits: Callable[[Answer], mx.array]


class Model:
    """A whole model and its steps."""

    def __init__(self, stage: StageModel, vocab_size: int) -> None:
        self.stage, self.step, self.vocab_size = stage, StepModel(stage), vocab_size

    def answer(self, prompt: Sequence[int], num_tokens: int) -> Answer:
        """The reference."""
        caches = self.stage.make_caches()
        rows = [self.read(caches, prompt, CHUNK)]
        while len(rows) < num_tokens:
            rows.append(self.read(caches, [cast(int, mx.argmax(rows[-1][-1]).item())], 1))
        logits = mx.concatenate(rows)
        top = mx.sort(mx.topk(logits, 2, axis=-1), axis=-1)
        tokens, margins = mx.argmax(logits, axis=-1).tolist(), (top[:, 1] - top[:, 0]).tolist()
        return Answer(tuple(prompt), Reference(tuple(tokens), tuple(margins)), logits)  # type: ignore[arg-type]

    def read(self, caches: SequenceCaches, tokens: Sequence[int], chunk: int, wanted: int = 1) -> mx.array:
        """The logits [``wanted``, vocabulary] of the last rows of tokens computed in chunks."""
        found, left = list[mx.array](), len(tokens)
        for at in range(0, len(tokens), chunk):
            ids = list(tokens[at : at + chunk])
            left -= len(ids)
            rows = min(len(ids), max(0, wanted - left))
            found += self.run([Part(caches, caches.place.position, len(ids), rows)], ids)
        return mx.concatenate(found)

    def run(self, parts: Sequence[Part], ids: Sequence[int]) -> list[mx.array]:
        """The logits of one step, in float32, evaluated; none if no row wants any."""
        outputs = [rows[:, : self.vocab_size].astype(mx.float32) for rows in self.step.run(parts, ids, None)]
        mx.eval(outputs, arrays_to_evaluate(parts))
        return outputs


def take(road: Road, answer: Answer) -> Taken:
    """What a road chooses along an answer."""
    logits = road.logits(answer)
    tokens = mx.argmax(logits, axis=-1).tolist()
    return Taken(tuple(tokens), mx.abs(logits - answer.logits).max().item())  # type: ignore[arg-type]


def together(model: Model, num_rows: int) -> Road:
    """Beside ``num_rows`` - 1 other sequences, of other lengths, each with one row in every step."""

    def logits(answer: Answer) -> mx.array:
        neighbours = [_Neighbour(model, i, 1) for i in range(1, num_rows)]
        return _beside(model, answer, neighbours)

    return Road(f"{num_rows} rows together", logits)


def beside_a_prompt(model: Model) -> Road:
    """Beside a prompt that is read in chunks meanwhile."""
    return Road(
        f"beside {_BESIDE} rows of a prompt", lambda answer: _beside(model, answer, [_Neighbour(model, 0, _BESIDE)])
    )


def chunked(model: Model, size: int) -> Road:
    """The prompt in chunks of ``size``, then one row at a time."""

    def logits(answer: Answer) -> mx.array:
        caches = model.stage.make_caches()
        first = model.read(caches, answer.prompt, size)
        return mx.concatenate([first, *(model.read(caches, [token], 1) for token in answer.inputs)])

    return Road(f"prompt in chunks of {size:,}", logits)


def verified(model: Model, size: int) -> Road:
    """The answer in blocks of ``size`` rows."""

    def logits(answer: Answer) -> mx.array:
        caches = model.stage.make_caches()
        first = model.read(caches, answer.prompt, CHUNK)
        return mx.concatenate([first, model.read(caches, answer.inputs, size, len(answer.inputs))])

    return Road(f"drafts in blocks of {size}", logits)


def replayed(model: Model, size: int) -> Road:
    """Prompt and answer as one prompt, in chunks of ``size``."""

    def logits(answer: Answer) -> mx.array:
        tokens = [*answer.prompt, *answer.inputs]
        return model.read(model.stage.make_caches(), tokens, size, len(answer.reference.tokens))

    return Road(f"replay in chunks of {size:,}", logits)


class _Neighbour:
    """A sequence of made-up tokens, ``rows`` of them in each step."""

    def __init__(self, model: Model, number: int, rows: int) -> None:
        self._rows, self._vocab_size, self._number, self._step = rows, model.vocab_size, number, 0
        self._caches = model.stage.make_caches()
        model.read(self._caches, self._tokens(_NEIGHBOUR + number), CHUNK)

    def part(self) -> tuple[Part, tuple[int, ...]]:
        """Its rows of the next step, and their tokens."""
        self._step += 1
        return Part(self._caches, self._caches.place.position, self._rows, 0), self._tokens(self._rows)

    def _tokens(self, count: int) -> tuple[int, ...]:
        return made_up(f"neighbour {self._number} {self._step}", count, self._vocab_size)


def _beside(model: Model, answer: Answer, neighbours: Sequence[_Neighbour]) -> mx.array:
    """The answer's logits, its prompt read alone and each of its rows computed beside those of neighbours."""
    caches = model.stage.make_caches()
    rows = [model.read(caches, answer.prompt, CHUNK)]
    for token in answer.inputs:
        others = [one.part() for one in neighbours]
        parts = [Part(caches, caches.place.position, 1, 1), *(part for part, _ in others)]
        rows += model.run(parts, [token, *(token for _, tokens in others for token in tokens)])
    return mx.concatenate(rows)
