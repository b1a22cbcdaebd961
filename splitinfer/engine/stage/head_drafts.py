"""Drafts with heads (``models.drafters.heads``) on the last stage, after each step, in one graph.

The graph finds the last right row r by comparing the sampled tokens with the drafts:

    step     rows of a slice          t3   d4   d5   d6        sampled s4 s5 s6 s7; r = 1 if s4 = d4 and s5 is not d5
    heads    entries of these tokens  t3   d4   d5   d6        from the hidden states of the rows before them
             and the first draft                         s5    from row r's hidden state: predicts the token after s5
             and each further one                        ...   from the heads' own hidden state
    at once  a block                                     s5   mask mask mask     sees all entries up to r, and itself

The heads' KV gets an entry for each of the slice's tokens and is rolled back with the layers' KV. The entries of drafts
are removed at once. A slice's first entry needs one hidden state of the previous slice (``tail``). If a sequence
begins with stored blocks, zeros replace it: a draft may be worse, but the tokens are the target's in any case.

Heads that run one sequence after the other (``sequence_heads``) wait for the step's tokens, because their entries are
those of right tokens alone. The entry of a chunk's last token is made of a wrong token until the next slice comes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain
from typing import cast

import mlx.core as mx

from splitinfer.core.plan import Slice
from splitinfer.core.rng import position_key
from splitinfer.engine.stage.history import Row
from splitinfer.engine.stage.sampler import Sampler, TokenChoice, in_order
from splitinfer.models.caches.caches import arrays_of
from splitinfer.models.caches.rows import SequenceRows
from splitinfer.models.drafters.dflash import DFlash
from splitinfer.models.drafters.eagle3 import Eagle3
from splitinfer.models.drafters.heads import BlockPart
from splitinfer.models.drafters.mtp import PredictionHeads
from splitinfer.models.drafters.sequence_heads import OfSequences
from splitinfer.models.load.trained import WithHeads


@dataclass(frozen=True, slots=True)
class HeadDrafts:
    """Drafts of a step, not yet evaluated. ``rounds``: [sequences, n] ids for each round that made n drafts at once.
    ``counts``: by sequence, in the same order, how many drafts it asked for."""

    rounds: tuple[mx.array, ...] = ()
    counts: dict[int, int] = field(default_factory=dict)

    def read(self) -> dict[int, tuple[int, ...]]:
        """Wait until the drafts are computed, and return them by sequence."""
        if not self.rounds:
            return {}
        rounds = [cast(list[list[int]], one.tolist()) for one in self.rounds]
        lines = (tuple(chain.from_iterable(line)) for line in zip(*rounds, strict=True))
        return {seq: line[:count] for (seq, count), line in zip(self.counts.items(), lines, strict=True)}


@dataclass(frozen=True, slots=True)
class _Entries(BlockPart):
    """A slice, whose n tokens get entries. ``states``: [n, ...], the hidden states of its rows."""

    part: Slice
    states: mx.array

    def entries(self) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """Return [n] ids, [n, d] hidden states before them, [n] positions, and bool [n, entries]: the entries that each
        of them sees."""
        start, states = self.caches.tail or (0, self.states[:0])
        at, positions = self.start - 1 - start, mx.arange(self.start, self.end)
        before = states[at : at + 1] if 0 <= at < len(states) else mx.zeros_like(self.states[:1])
        ids = mx.array(self.part.token_ids, dtype=mx.int32)
        return ids, mx.concatenate([before, self.states[:-1]]), positions, _visible(self.end, positions)


@dataclass(frozen=True, slots=True)
class _Line(_Entries):
    """A slice that gets ``count`` drafts, with the settings of ``row``. ``right``: an int32 array, how many of its
    drafts were right; ``token``: int32 [1], the token sampled in the last right row; ``hidden``: [d], that row's
    state."""

    row: Row
    count: int
    right: mx.array
    token: mx.array
    hidden: mx.array

    def visible(self, number: int) -> mx.array:
        """Return bool [end + number + 1]: the entries that draft ``number`` sees, the right tokens and the drafts
        before it."""
        entries = mx.arange(self.end + number + 1)
        return ((entries > 0) & (entries < self.position)) | (entries >= self.end)

    def entries(self) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """Return the slice's entries, followed by the first draft's."""
        ids, hidden, positions, _ = _Entries.entries(self)
        visible = [_visible(self.end + 1, positions), self.visible(0)[None]]
        more = [[ids, self.token], [hidden, self.hidden[None]], [positions, self.position[None]], visible]
        ids, hidden, positions, seen = (mx.concatenate(both) for both in more)
        return ids, hidden, positions, seen

    def key(self, number: int) -> mx.array:
        """Return [2] uint32: the random key of the position that draft ``number`` fills."""
        num_logits = self.part.num_logits
        first = self.end - num_logits + 2 + number
        keys = mx.array([position_key(self.row.seed, first + i) for i in range(num_logits)], dtype=mx.uint32)
        return keys[self.right[None]][0]


class HeadDrafter:
    """Makes drafts for the slices of steps. Keeps the hidden states of each sequence's last slice for its next one."""

    def __init__(self, model: WithHeads, sampler: Sampler) -> None:
        self._model, self._sampler = model, sampler

    def of(
        self,
        slices: Sequence[Slice],
        parts: Sequence[SequenceRows],
        hidden: mx.array,
        rows: Sequence[Row],
        choices: Sequence[TokenChoice],
    ) -> HeadDrafts:
        """Return the drafts after a step's slices, as a graph that is not computed yet.

        Args:
            parts: the slices' rows as they were run. hidden: [T, d], the last layer's output for these rows.
            rows, choices: the rows with logits, and the tokens chosen for them.
        """
        heads, sampled = self._model.heads, in_order(choices) if choices else mx.zeros((0,), mx.int32)
        states, entries, at, logit = self._model.states(hidden), list[_Entries](), 0, 0
        for part, run in zip(slices, parts, strict=True):
            own = states[at : (at := at + len(part.token_ids))]
            one = _Entries(run.caches, part.start, part.end, mx.array(part.end), 0, part, own)
            first, logit = logit, logit + part.num_logits
            if count := min(part.num_next, heads.at_once or part.num_next):
                one = _line(one, rows[first], count, sampled[first:logit])
            entries.append(one)
        lines = [one for one in entries if isinstance(one, _Line)]
        if isinstance(heads, OfSequences):
            rounds = self._by_sequence(heads, entries, sampled)
        else:
            rounds = self._at_once(states, entries, lines) if heads.at_once else self._one_by_one(entries, lines)
            for one in entries:
                one.caches.heads_at = one.end
                for cache in one.caches.heads:
                    cache.trim(cache.offset - one.end)
        return HeadDrafts(rounds, {line.part.seq_id: line.count for line in lines})

    def _at_once(self, states: mx.array, entries: Sequence[_Entries], lines: Sequence[_Line]) -> tuple[mx.array, ...]:
        """Write the entries of all slices, run a block for each line, and return its drafts."""
        heads = cast(DFlash, self._model.heads)
        heads.keep(states, entries)
        if not lines:
            return ()
        tokens, firsts = [line.token for line in lines], list(accumulate((line.rows for line in lines), initial=0))
        hidden = heads.run_blocks(tokens, lines)
        logits, drafts, before = heads.logits(hidden), list[mx.array](), mx.concatenate(tokens)
        for number in range(max(line.count for line in lines)):  # a line with fewer repeats its last, which is not read
            at = mx.array([firsts[i] + min(number + 1, line.count) for i, line in enumerate(lines)])
            before = self._choose(heads.behind(logits[at], hidden[at], before), lines, number)
            drafts.append(before)
        return (mx.stack(drafts, axis=1),)

    def _one_by_one(self, entries: Sequence[_Entries], lines: Sequence[_Line]) -> tuple[mx.array, ...]:
        """Run the entries of all slices with each line's first draft, then the other drafts in rounds. Return them."""
        heads, each = cast(PredictionHeads | Eagle3, self._model.heads), [one.entries() for one in entries]
        ids, hidden, positions = (mx.concatenate(list(of_all)) for of_all in list(zip(*each, strict=True))[:3])
        runs = [(one.caches, len(own), seen) for one, (own, _, _, seen) in zip(entries, each, strict=True)]
        found, ends = heads.run(ids, hidden, runs, positions), accumulate(count for _, count, _ in runs)
        for one in entries:
            one.caches.tail = one.start, one.states
        if not lines:
            return ()
        last = [end - 1 for one, end in zip(entries, ends, strict=True) if isinstance(one, _Line)]
        states = found[mx.array(last)]
        tokens = [self._choose(heads.logits(states), lines, 0)]
        for number in range(1, max(line.count for line in lines)):
            runs = [(line.caches, 1, line.visible(number)[None]) for line in lines]
            states = heads.run(tokens[-1], states, runs, mx.stack([line.position + number for line in lines]))
            tokens.append(self._choose(heads.logits(states), lines, number))
        return tuple(one[:, None] for one in tokens)

    def _by_sequence(self, heads: OfSequences, entries: Sequence[_Entries], sampled: mx.array) -> tuple[mx.array, ...]:
        """Write the entries of all slices' right tokens, and return the drafts after them. Waits for the step."""
        tokens, made, at = cast(list[int], sampled.tolist()), list[mx.array](), 0
        for one in entries:
            own = tokens[at : (at := at + one.part.num_logits)]
            right = own[: one.part.num_accepted(own)]
            known = len(one.part.token_ids) - len(own) + len(right)
            count, sample = (one.count, partial(self._sample, one, [])) if isinstance(one, _Line) else (0, None)
            found = heads.draft(one.caches, one.part.token_ids[:known], one.states[:known], right[-1:], count, sample)
            made += [] if found is None else [found]
        longest = max(map(len, made), default=0)
        return (mx.stack([mx.pad(one, (0, longest - len(one))) for one in made]),) if made else ()

    def written(self, parts: Sequence[SequenceRows]) -> list[mx.array]:
        """Return the arrays of the heads' caches, which are computed with the drafts."""
        return [array for part in parts for cache in part.caches.heads for array in arrays_of(cache)]

    # -- tokens ------------------------------------------------------------------------------

    def _sample(self, line: _Line, made: list[mx.array], logits: mx.array) -> mx.array:
        """Return tokens [..., n] of a line's next drafts' logits [..., n, vocabulary]. ``made``: the drafts so far."""
        rows = logits.reshape(-1, logits.shape[-1])
        found = [self._choose(row[None], [line], len(made) + i) for i, row in enumerate(rows)]
        made += found
        return mx.concatenate(found).reshape(logits.shape[:-1])

    def _choose(self, logits: mx.array, lines: Sequence[_Line], number: int) -> mx.array:
        """Return int32 [lines]: one draft each, drawn with the key of its position, as the target's token will be."""
        rows = [line.row for line in lines]
        is_greedy = all(row.params.temperature == 0 for row in rows)
        keys = None if is_greedy else mx.stack([line.key(number) for line in lines])
        return self._sampler.tokens(logits, rows, keys).astype(mx.int32)


def _visible(room: int, positions: mx.array) -> mx.array:
    """Return bool [n, room]: which entries the entries at ``positions`` see. The first entry has no hidden state before
    it: it sees only itself, and no other entry sees it."""
    entries, own = mx.arange(room)[None], positions[:, None]
    return (entries <= own) & ((entries > 0) | (own == 0))


def _line(entries: _Entries, row: Row, count: int, tokens: mx.array) -> _Line:
    """Return the line of a slice that gets drafts. ``row``: its first row with logits; ``tokens``: the tokens sampled
    for all its rows with logits."""
    part, num_logits, right = entries.part, entries.part.num_logits, mx.array(0, dtype=mx.int32)
    drafts = part.token_ids[len(part.token_ids) - num_logits + 1 :]
    if part.num_drafts and drafts:
        right = mx.cumprod((tokens[: num_logits - 1] == mx.array(drafts)).astype(mx.int32)).sum()
    # Without penalties, because they depend on tokens that are not known yet.
    free = replace(row.params, logprobs=None, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
    own, token = Row(free, row.seed, row.position, ()), tokens[right[None]].astype(mx.int32)
    place, hidden = part.end - num_logits + 1 + right, entries.states[-num_logits:][right[None]][0]
    return _Line(
        entries.caches, part.start, part.end, place, 1 + count, part, entries.states, own, count, right, token, hidden
    )
