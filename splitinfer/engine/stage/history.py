"""The last stage's record of a sequence besides its KV: its tokens, for penalties and for the verdict on drafts."""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import mlx.core as mx

from splitinfer.core.plan import SampledSlice, SampledToken, Slice, StepPlan
from splitinfer.core.sampling_params import REPETITION_CONTEXT, SamplingParams


@dataclass(frozen=True, slots=True)
class Row:
    """The data that one row's token depends on: it fills ``position``, and ``recent`` are the tokens before it.

    ``answer``: the tokens of the answer so far; empty if no penalty depends on them. ``mask``: bool [vocabulary], the
    tokens that may be chosen; ``None``: any.
    """

    params: SamplingParams
    seed: int
    position: int
    recent: tuple[int, ...]
    answer: tuple[int, ...] = ()
    mask: mx.array | None = None


@dataclass(slots=True)
class History:
    """A sequence's tokens, for penalties and verification, and the token sampled last. The first ``num_prompt`` tokens
    are its prompt."""

    params: SamplingParams
    seed: int
    tokens: list[int]
    num_prompt: int
    next: int | None = None

    def rows(self, part: Slice) -> Iterator[Row]:
        """Append a slice's tokens; yield its rows that need logits."""
        self.tokens[part.start :] = part.token_ids
        for position in range(part.end - part.num_logits + 1, part.end + 1):
            recent = tuple(self.tokens[max(0, position - REPETITION_CONTEXT) : position])
            answer = tuple(self.tokens[self.num_prompt : position]) if self.params.has_answer_penalty else ()
            yield Row(self.params, self.seed, position, recent, answer)

    def verdict(self, part: Slice, sampled: Seq[SampledToken]) -> tuple[SampledToken, ...]:
        """Return the sampled tokens up to the first that differs from its draft, and drop the wrong drafts."""
        accepted = accepted_of(part, sampled)
        if accepted:
            del self.tokens[part.end - part.num_logits + len(accepted) :]
            self.next = accepted[-1].token_id
        return accepted


def accepted_of(part: Slice, sampled: Seq[SampledToken]) -> tuple[SampledToken, ...]:
    """Return the sampled tokens of a slice up to the first that differs from its draft."""
    return tuple(sampled[: part.num_accepted([token.token_id for token in sampled])])


def verdicts_of(
    plan: StepPlan,
    computed: Seq[Slice],
    tokens: Seq[SampledToken],
    histories: Mapping[int, History],
    scores: Mapping[int, tuple[SampledToken, ...]],
) -> tuple[SampledSlice, ...]:
    """Return the accepted tokens for each slice of a plan with logits. ``tokens``: the tokens sampled for the
    ``computed`` slices; the other slices are rejected and get no tokens. ``scores``: by sequence, the log
    probabilities of its slice's own tokens."""
    at, verdicts, were_computed = 0, [], {part.seq_id for part in computed}
    for part in plan.slices:
        if part.num_rows and part.seq_id in were_computed:
            sampled = tokens[at : (at := at + part.num_logits)]
            history = histories.get(part.seq_id)  # None if a later step has already freed the sequence
            counted = accepted_of(part, sampled) if history is None else history.verdict(part, sampled)
            verdicts.append(SampledSlice(part.seq_id, counted, scored=scores.get(part.seq_id, ())))
        elif part.num_rows:
            verdicts.append(SampledSlice(part.seq_id, ()))
    return tuple(verdicts)


def rows_of_prompts(slices: Seq[Slice], histories: Mapping[int, History], each: int = 1) -> list[int]:
    """Return the indices of a step's rows that belong to prompts. ``each``: the rows of one token."""
    rows, at = list[int](), 0
    for part in slices:
        history = histories.get(part.seq_id)
        limit = 0 if history is None else history.num_prompt
        rows += range(at, at + each * max(0, min(part.end, limit) - part.start))
        at += each * len(part.token_ids)
    return rows
