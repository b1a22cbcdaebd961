"""Drafts with heads (``models.drafters.heads``) on the last stage, after each step, in one graph.

The graph finds the last right row r by comparing the sampled tokens with the drafts:

    step     rows of a slice          t3   d4   d5   d6        sampled s4 s5 s6 s7; r = 1 if s4 = d4 and s5 is not d5
    heads    entries of these tokens  t3   d4   d5   d6        from the hidden states of the rows before them
             and the first draft                         s5    from row r's hidden state: predicts the token after s5
             and each further one                        ...   from the heads' own hidden state
    at once  a block                                     s5   mask mask mask     sees all entries up to r, and itself

The heads' KV gets an entry for each of the slice's tokens and is rolled back with the layers' KV. The entries of drafts
are removed at once. A slice's first entry needs one hidden state of the previous slice (``_tails``). If a sequence
begins with stored blocks, zeros replace it: a draft may be worse, but the tokens are the target's in any case.

Heads that run one sequence after the other (``sequence_heads``) wait for the step's tokens, because their entries are
those of right tokens alone. The entry of a chunk's last token is made of a wrong token until the next slice comes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain
from typing import cast

import mlx.core as mx

from splitinfer.core.plan import Slice
from splitinfer.core.rng import position_key
from splitinfer.engine.stage.history import Row
from splitinfer.engine.stage.sampler import Sampler, TokenChoice, in_order
from splitinfer.models.caches.caches import Mark, arrays_of
from splitinfer.models.caches.cohort import SequenceCaches
from splitinfer.models.caches.rows import SequenceRows
from splitinfer.models.drafters.dflash import DFlash
from splitinfer.models.drafters.heads import BlockPart
from splitinfer.models.drafters.sequence_heads import Assistant, LibraryBlocks
from splitinfer.models.load.trained import HeadsOfSequences, WithHeads


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
class _Entries:
    """A slice, whose n tokens get entries. ``before``: [n, d], the hidden state before each of its rows."""

    part: Slice
    caches: SequenceCaches
    before: mx.array

    def rows(self) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """Return [n] ids, [n, d] hidden states before them, [n] positions, and bool [n, entries]: the entries that each
        of them sees."""
        positions = mx.arange(self.part.start, self.part.end)
        ids = mx.array(self.part.token_ids, dtype=mx.int32)
        return ids, self.before, positions, _visible(self.part.end, positions)

    def block(self) -> BlockPart:
        """Return the slice for a drafter that makes drafts at once: a block without rows."""
        return BlockPart(self.caches, self.part.start, len(self.part.token_ids), mx.array(self.part.end), 0)


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

    @property
    def first(self) -> int:
        """The position of the first token that may have been sampled."""
        return self.part.end - self.part.num_logits + 1

    @property
    def position(self) -> mx.array:
        """The position of ``token``."""
        return self.first + self.right

    def visible(self, number: int) -> mx.array:
        """Return bool [end + number + 1]: the entries that draft ``number`` sees, the right tokens and the drafts
        before
        it."""
        entries = mx.arange(self.part.end + number + 1)
        return ((entries > 0) & (entries < self.position)) | (entries >= self.part.end)

    def rows(self) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """Return the slice's rows, followed by the first draft's."""
        ids, hidden, positions, _ = _Entries.rows(self)
        visible = [_visible(self.part.end + 1, positions), self.visible(0)[None]]
        more = [[ids, self.token], [hidden, self.hidden[None]], [positions, self.position[None]], visible]
        ids, hidden, positions, seen = (mx.concatenate(both) for both in more)
        return ids, hidden, positions, seen

    def block(self) -> BlockPart:
        """Return a block with a row for the token and one for each draft."""
        return replace(_Entries.block(self), position=self.position, rows=1 + self.count)

    def key(self, number: int) -> mx.array:
        """Return [2] uint32: the random key of the position that draft ``number`` fills."""
        first = self.first + 1 + number
        keys = mx.array([position_key(self.row.seed, first + i) for i in range(self.part.num_logits)], dtype=mx.uint32)
        return keys[self.right[None]][0]


@dataclass(frozen=True, slots=True)
class _Unpaired:
    """The last row of a prompt's chunk that ends at ``end``: its hidden state [1, ...], and the caches before its
    entry."""

    end: int
    hidden: mx.array
    before: Mark


class HeadDrafter:
    """Makes drafts for the slices of steps. Keeps the hidden states of each sequence's last slice for its next one."""

    def __init__(self, model: WithHeads, sampler: Sampler) -> None:
        self._model, self._sampler = model, sampler
        self._tails: dict[int, tuple[int, mx.array]] = {}  # by sequence: a position, and the hidden states from there
        self._unpaired: dict[int, _Unpaired] = {}  # by sequence, if its last slice was a chunk

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Forget sequences that were freed."""
        for seq_id in seq_ids:
            self._tails.pop(seq_id, None)
            self._unpaired.pop(seq_id, None)

    def clear(self) -> None:
        """Forget all sequences."""
        self._tails.clear()
        self._unpaired.clear()

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
        if isinstance(heads, HeadsOfSequences):
            return self._by_sequence(slices, parts, states, rows, sampled)
        for part, run in zip(slices, parts, strict=True):
            own = states[at : (at := at + len(part.token_ids))]
            one = _Entries(part, run.caches, mx.concatenate([self._before(part, own), own[:-1]]))
            self._tails[part.seq_id] = (part.start, own)
            first, logit = logit, logit + part.num_logits
            if count := min(part.num_next, heads.at_once or part.num_next):
                one = _line(one, own, rows[first], count, sampled[first:logit])
            entries.append(one)
        lines = [one for one in entries if isinstance(one, _Line)]
        rounds = self._at_once(states, entries, lines) if heads.at_once else self._one_by_one(entries, lines)
        for one in entries:
            one.caches.heads_at = one.part.end
            for cache in one.caches.heads:
                cache.trim(cache.offset - one.part.end)
        return HeadDrafts(rounds, {line.part.seq_id: line.count for line in lines})

    def _before(self, part: Slice, own: mx.array) -> mx.array:
        """Return [1, d]: the hidden state before a slice."""
        start, states = self._tails.get(part.seq_id, (0, own[:0]))
        at = part.start - 1 - start
        return states[at : at + 1] if 0 <= at < len(states) else mx.zeros_like(own[:1])

    def _at_once(self, states: mx.array, entries: Sequence[_Entries], lines: Sequence[_Line]) -> tuple[mx.array, ...]:
        """Write the entries of all slices, run a block for each line, and return its drafts."""
        heads, blocks = cast(DFlash, self._model.heads), [one.block() for one in entries]
        if not lines:
            self._model.run_blocks(None, states, blocks)
            return ()
        ids = [one for line in lines for one in (line.token, heads.masks(line.count))]
        hidden = self._model.run_blocks(mx.concatenate(ids), states, blocks)
        assert hidden is not None
        logits, tokens, before = self._model.logits(hidden), [], mx.concatenate([line.token for line in lines])
        firsts = list(accumulate((1 + line.count for line in lines), initial=0))
        for number in range(max(line.count for line in lines)):  # a line with fewer repeats its last, which is not read
            at = mx.array([firsts[i] + min(number + 1, line.count) for i, line in enumerate(lines)])
            before = self._choose(heads.behind(logits[at], hidden[at], before), lines, number)
            tokens.append(before)
        return (mx.stack(tokens, axis=1),)

    def _one_by_one(self, entries: Sequence[_Entries], lines: Sequence[_Line]) -> tuple[mx.array, ...]:
        """Run the entries of all slices with each line's first draft, then the other drafts in rounds. Return them."""
        each = [one.rows() for one in entries]
        ids, hidden, positions = (mx.concatenate(list(of_all)) for of_all in list(zip(*each, strict=True))[:3])
        runs = [(one.caches, len(own), seen) for one, (own, _, _, seen) in zip(entries, each, strict=True)]
        found, ends = self._model.run(ids, hidden, runs, positions), accumulate(count for _, count, _ in runs)
        if not lines:
            return ()
        last = [end - 1 for one, end in zip(entries, ends, strict=True) if isinstance(one, _Line)]
        states = found[mx.array(last)]
        tokens = [self._choose(self._model.logits(states), lines, 0)]
        for number in range(1, max(line.count for line in lines)):
            runs = [(line.caches, 1, line.visible(number)[None]) for line in lines]
            states = self._model.run(tokens[-1], states, runs, mx.stack([line.position + number for line in lines]))
            tokens.append(self._choose(self._model.logits(states), lines, number))
        return tuple(one[:, None] for one in tokens)

    def written(self, parts: Sequence[SequenceRows]) -> list[mx.array]:
        """Return the arrays of the heads' caches, which are computed with the drafts."""
        return [array for part in parts for cache in part.caches.heads for array in arrays_of(cache)]

    # -- one sequence after the other --------------------------------------------------------

    def _by_sequence(
        self,
        slices: Sequence[Slice],
        parts: Sequence[SequenceRows],
        states: mx.array,
        rows: Sequence[Row],
        sampled: mx.array,
    ) -> HeadDrafts:
        """Write the entries of all slices' right tokens, and return the drafts after them. Waits for the step."""
        heads, tokens = self._model.heads, cast(list[int], sampled.tolist())
        at, logit, counts, drafted = 0, 0, dict[int, int](), list[mx.array]()
        for part, run in zip(slices, parts, strict=True):
            own = states[at : (at := at + len(part.token_ids))]
            first, logit = logit, logit + part.num_logits
            right = tokens[first:logit][: part.num_accepted(tokens[first:logit])]
            count, line = min(part.num_next, heads.at_once or part.num_next), None
            if count:
                line = _line(_Entries(part, run.caches, own), own, rows[first], count, sampled[first:logit])
            if isinstance(heads, LibraryBlocks | Assistant):
                known = own[: len(own) - part.num_logits + len(right)]
                sample = None if line is None else partial(self._sample, line, [])
                found = heads.draft(run.caches, known, mx.array(right[-1:]), count, sample)
            else:
                read, kept = self._write(part, run.caches, own, right)
                found = None if line is None else self._one_after_the_other(line, read, kept)
            if found is not None:
                drafted.append(found)
                counts[part.seq_id] = count
        longest = max(counts.values(), default=0)
        padded = [mx.pad(one, (0, longest - len(one))) for one in drafted]
        return HeadDrafts((mx.stack(padded),) if padded else (), counts)

    def _one_after_the_other(self, line: _Line, read: mx.array, kept: mx.array) -> mx.array:
        """Return a line's drafts [count], made from the last hidden states that ``_write`` returned."""
        before, at, drafts = Mark(line.caches.heads), line.caches.heads_at, list[mx.array]()
        for number in range(line.count):
            if number:
                read, kept = self._model.run_sequence(line.caches, drafts[-1], kept[None], number)
            drafts.append(self._choose(self._model.logits(read[None]), [line], number))
        before.restore()
        line.caches.heads_at = at
        return mx.concatenate(drafts)

    def _sample(self, line: _Line, made: list[mx.array], logits: mx.array) -> mx.array:
        """Return tokens [..., n] of a line's next drafts' logits [..., n, vocabulary]. ``made``: the drafts so far."""
        rows = logits.reshape(-1, logits.shape[-1])
        found = [self._choose(row[None], [line], len(made) + i) for i, row in enumerate(rows)]
        made += found
        return mx.concatenate(found).reshape(logits.shape[:-1])

    def _write(
        self, part: Slice, caches: SequenceCaches, own: mx.array, right: Sequence[int]
    ) -> tuple[mx.array, mx.array]:
        """Write the entries of a slice with the hidden states ``own`` [n, ...], up to the last of the ``right`` tokens
        sampled for it. Return the last hidden states, as ``WithHeads.run_sequence``."""
        before = self._unpaired.pop(part.seq_id, None)
        ids = [*part.token_ids[1 : len(part.token_ids) - part.num_logits + len(right)], *right[-1:]]
        hidden = own[: len(ids)]
        if before is not None and before.end == part.start == caches.heads_at:
            before.before.restore()
            caches.heads_at -= 1
            ids, hidden = [part.token_ids[0], *ids], mx.concatenate([before.hidden, hidden])
        found = self._model.run_sequence(caches, mx.array(ids), hidden) if ids else None
        if not right:
            self._unpaired[part.seq_id] = _Unpaired(part.end, own[-1:], Mark(caches.heads))
            found = self._model.run_sequence(caches, mx.array(part.token_ids[-1:]), own[-1:])
        assert found is not None
        return found

    # -- tokens ------------------------------------------------------------------------------

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


def _line(entries: _Entries, states: mx.array, row: Row, count: int, tokens: mx.array) -> _Line:
    """Return the line of a slice that gets drafts. ``states``: [n, d], its rows' hidden states; ``row``: its first row
    with logits; ``tokens``: the tokens sampled for all its rows with logits."""
    part, num_logits = entries.part, entries.part.num_logits
    drafts, right = part.token_ids[len(part.token_ids) - num_logits + 1 :], mx.array(0, dtype=mx.int32)
    if part.num_drafts and drafts:
        right = mx.cumprod((tokens[: num_logits - 1] == mx.array(drafts)).astype(mx.int32)).sum()
    # Without penalties, because they depend on tokens that are not known yet.
    free = replace(row.params, logprobs=None, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
    own = Row(free, row.seed, row.position, ())
    token, hidden = tokens[right[None]].astype(mx.int32), states[-num_logits:][right[None]][0]
    return _Line(part, entries.caches, entries.before, own, count, right, token, hidden)
