"""Drafts with heads (``models.heads``) on the last stage, behind each step, in one graph.

Nothing is read between the step and its drafts: which row is the last right one is computed from the sampled tokens and
the drafts that they are compared with.

    step     rows of a slice          t3   d4   d5   d6        sampled s4 s5 s6 s7; r = 1 if s4 = d4 and s5 is not d5
    heads    entries of these tokens  t3   d4   d5   d6        from the hidden states of the rows before them
             and the first draft                         s5    from that of row r: predicts the token behind s5
             and each further one                        ...   from the heads' own hidden state
    at once  a block                                     s5   mask mask mask     sees all entries up to r, and itself

The heads' KV gets an entry for each of the slice's tokens, and is rolled back with the layers'; those of the drafts are
taken out again at once. What a slice's first entry needs of the slice before is one hidden state (``_tails``); where a
sequence begins from stored blocks, zeros are taken: a draft may be worse, and the tokens are the target's in any case.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import Any, cast

import mlx.core as mx

from splitinfer.core.plan import Slice
from splitinfer.core.rng import position_key
from splitinfer.engine.stage.history import Row
from splitinfer.engine.stage.sampler import Choice, Sampler
from splitinfer.models.cohort import SequenceCaches
from splitinfer.models.dflash import DFlash
from splitinfer.models.heads import BlockPart
from splitinfer.models.rows import Part
from splitinfer.models.trained import WithHeads


@dataclass(frozen=True, slots=True)
class HeadDrafts:
    """Drafts of a step, not yet evaluated. ``rounds``: [sequences, n] ids each, n made at once; ``counts``: by
    sequence, in their order, how many it asked for."""

    rounds: tuple[mx.array, ...] = ()
    counts: dict[int, int] = field(default_factory=dict)

    def read(self) -> dict[int, tuple[int, ...]]:
        """By sequence its drafts. Waits until they are computed."""
        if not self.rounds:
            return {}
        rounds = [cast(list[list[int]], one.tolist()) for one in self.rounds]
        lines = (tuple(chain.from_iterable(line)) for line in zip(*rounds, strict=True))
        return {seq: line[:count] for (seq, count), line in zip(self.counts.items(), lines, strict=True)}


@dataclass(frozen=True, slots=True)
class _Line:
    """A slice that gets drafts. ``row``: of its first row with logits among the step's; ``right``: how many of the
    tokens before its last right row were drafts, an int32 array; ``token``: the one sampled there, [1]."""

    part: Slice
    caches: SequenceCaches
    right: mx.array
    token: mx.array
    hidden: mx.array  # [d], of that row

    @property
    def first(self) -> int:
        """The position of the first token that may have been sampled."""
        return self.part.end - self.part.num_logits + 1

    @property
    def position(self) -> mx.array:
        """That of ``token``."""
        return self.first + self.right

    def visible(self, number: int) -> mx.array:
        """Bool [end + number + 1]: what the entry of draft ``number`` sees: right tokens, and the drafts before it."""
        entries = mx.arange(self.part.end + number + 1)
        return ((entries > 0) & (entries < self.position)) | (entries >= self.part.end)


class HeadDrafter:
    """Makes drafts for the slices of steps. Keeps one hidden state of each sequence for its next slice."""

    def __init__(self, model: WithHeads, sampler: Sampler) -> None:
        self._model, self._sampler = model, sampler
        self._tails: dict[int, tuple[int, mx.array]] = {}  # by sequence: a position, and hidden states from there on

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Sequences were freed."""
        for seq_id in seq_ids:
            self._tails.pop(seq_id, None)

    def clear(self) -> None:
        """All were."""
        self._tails.clear()

    def of(
        self,
        slices: Sequence[Slice],
        parts: Sequence[Part],
        hidden: mx.array,
        rows: Sequence[Row],
        choices: Sequence[Choice],
    ) -> HeadDrafts:
        """The drafts behind a step's slices, by a graph that is not computed yet.

        Args:
            parts: as they were run; ``hidden``: [T, d], what the last layer returned for their rows.
            rows, choices: what is sampled for the rows with logits.
        """
        states, sampled = self._model.heads.states(hidden), _in_order(choices)
        entries, lines, at, logit = [], list[_Line](), 0, 0
        for part, run in zip(slices, parts, strict=True):
            own = states[at : (at := at + len(part.token_ids))]
            entries += [self._before(part, own), own[:-1]]
            self._tails[part.seq_id] = (part.start, own)
            tokens = None if sampled is None else sampled[logit : (logit := logit + part.num_logits)]
            if part.num_next and tokens is not None:
                lines.append(_line(part, run.caches, own, tokens))
        if self._model.heads.at_once:
            drafts = self._at_once(slices, parts, states, lines, rows)
        else:
            drafts = self._one_by_one(slices, parts, mx.concatenate(entries), lines, rows)
        for run, part in zip(parts, slices, strict=True):
            for cache in self._caches(run.caches):
                cache.trim(cache.offset - part.end)
        return drafts

    def _caches(self, caches: SequenceCaches) -> list[Any]:
        return list(caches.own[-len(self._model.heads.layers) :])

    def _before(self, part: Slice, own: mx.array) -> mx.array:
        """[1, d]: the hidden state before a slice."""
        start, states = self._tails.get(part.seq_id, (0, own[:0]))
        at = part.start - 1 - start
        return states[at : at + 1] if 0 <= at < len(states) else mx.zeros_like(own[:1])

    def _at_once(
        self,
        slices: Sequence[Slice],
        parts: Sequence[Part],
        states: mx.array,
        lines: Sequence[_Line],
        rows: Sequence[Row],
    ) -> HeadDrafts:
        """Write the entries of all slices, and run a block for each line."""
        heads, of_line = cast(DFlash, self._model.heads), {line.part.seq_id: line for line in lines}
        counts = {line.part.seq_id: min(line.part.num_next, heads.at_once) for line in lines}
        blocks = []
        for part, run in zip(slices, parts, strict=True):
            line, count = of_line.get(part.seq_id), counts.get(part.seq_id, -1)
            position = mx.array(part.end) if line is None else line.position
            blocks.append(BlockPart(run.caches, part.start, len(part.token_ids), position, count + 1))
        if not lines:
            self._model.run_blocks(None, states, blocks)
            return HeadDrafts()
        ids = [mx.concatenate([line.token.astype(mx.int32), heads.masks(counts[line.part.seq_id])]) for line in lines]
        hidden = self._model.run_blocks(mx.concatenate(ids), states, blocks)
        assert hidden is not None
        logits, of_seq, tokens = self._model.logits(hidden), _rows_of(lines, rows, slices), list[mx.array]()
        before, firsts = mx.concatenate([line.token for line in lines]), _firsts(len(one) for one in ids)
        for number in range(max(counts.values())):  # of who has fewer, the last is taken again, and is not read
            at = mx.array([first + min(number + 1, n) for first, n in zip(firsts, counts.values(), strict=True)])
            found = heads.behind(logits[at], hidden[at], before)
            tokens.append(before := self._choose(found, lines, of_seq, number))
        return HeadDrafts((mx.stack(tokens, axis=1),), counts)

    def _one_by_one(
        self,
        slices: Sequence[Slice],
        parts: Sequence[Part],
        before: mx.array,
        lines: Sequence[_Line],
        rows: Sequence[Row],
    ) -> HeadDrafts:
        """Run the entries of all slices with the first draft of each line, then the further drafts in rounds."""
        found, places = self._run_entries(slices, parts, before, lines)
        if not lines:
            return HeadDrafts()
        states = found[mx.array([places[line.part.seq_id] for line in lines])]
        of_seq = _rows_of(lines, rows, slices)
        rounds = max(line.part.num_next for line in lines)
        tokens = [self._choose(self._model.logits(states), lines, of_seq, 0)]
        for number in range(1, rounds):
            runs = [(line.caches, 1, line.visible(number)[None]) for line in lines]
            at_end = mx.stack([line.position + number for line in lines])
            states = self._model.run(tokens[-1], states, runs, at_end)
            tokens.append(self._choose(self._model.logits(states), lines, of_seq, number))
        counts = {line.part.seq_id: line.part.num_next for line in lines}
        return HeadDrafts(tuple(one[:, None] for one in tokens), counts)

    def _run_entries(
        self, slices: Sequence[Slice], parts: Sequence[Part], before: mx.array, lines: Sequence[_Line]
    ) -> tuple[mx.array, dict[int, int]]:
        """Run the entries of all slices, and behind them the first draft's entry of each line. The heads' states, and
        by sequence the place of its line's among them."""
        of_line = {line.part.seq_id: line for line in lines}
        ids, hidden, positions, runs, places, at, total = [], [], [], [], dict[int, int](), 0, 0
        for part, run in zip(slices, parts, strict=True):
            count, line = len(part.token_ids), of_line.get(part.seq_id)
            ids.append(mx.array(part.token_ids, dtype=mx.int32))
            hidden.append(before[at : (at := at + count)])
            positions.append(mx.arange(part.start, part.end))
            room = part.end + (line is not None)
            visible = _visible(room, positions[-1])
            if line is not None:
                ids.append(line.token.astype(mx.int32))
                hidden.append(line.hidden[None])
                positions.append(line.position[None])
                visible = mx.concatenate([visible, line.visible(0)[None]])
                places[part.seq_id] = total + count
            runs.append((run.caches, count + (line is not None), visible))
            total += count + (line is not None)
        return self._model.run(mx.concatenate(ids), mx.concatenate(hidden), runs, mx.concatenate(positions)), places

    def written(self, parts: Sequence[Part]) -> list[mx.array]:
        """The arrays that the heads' caches hold, to be computed with the drafts."""
        caches = [cache for part in parts for cache in self._caches(part.caches)]
        return [array for cache in caches for array in (cache.keys, cache.values) if array is not None]

    def _choose(self, logits: mx.array, lines: Sequence[_Line], of_seq: dict[int, Row], number: int) -> mx.array:
        """[lines] int32: drafts, drawn with the keys of their positions, as the target's tokens will be."""
        wanted = [of_seq[line.part.seq_id] for line in lines]
        if all(row.params.temperature == 0 for row in wanted):
            return mx.argmax(logits, axis=-1).astype(mx.int32)
        keys = mx.stack([_key(row, line, number) for row, line in zip(wanted, lines, strict=True)])
        found = _in_order(self._sampler.choose(logits, wanted, keys))
        assert found is not None
        return found.astype(mx.int32)


def _firsts(counts: Iterable[int]) -> list[int]:
    """Where each of several groups of rows begins."""
    return list(accumulate(counts, initial=0))[:-1]


def _visible(room: int, positions: mx.array) -> mx.array:
    """Bool [n, room]: which entries those at ``positions`` see. The first one has no hidden state before it; it sees
    itself alone, and no other sees it."""
    entries, own = mx.arange(room)[None], positions[:, None]
    return (entries <= own) & ((entries > 0) | (own == 0))


def _line(part: Slice, caches: SequenceCaches, own: mx.array, tokens: mx.array) -> _Line:
    drafts, count = part.token_ids[len(part.token_ids) - part.num_logits + 1 :], part.num_logits
    right = mx.array(0, dtype=mx.int32)
    if part.num_drafts and drafts:
        right = mx.cumprod((tokens[: count - 1] == mx.array(drafts)).astype(mx.int32)).sum()
    hidden = own[len(own) - count :][right[None]][0]
    return _Line(part, caches, right, tokens[right[None]], hidden)


def _rows_of(lines: Sequence[_Line], rows: Sequence[Row], slices: Sequence[Slice]) -> dict[int, Row]:
    """By sequence what its drafts depend on: its settings without penalties, whose tokens are not known yet."""
    found, at = dict[int, Row](), 0
    for part in slices:
        if part.num_logits:
            row = rows[at]
            free = replace(
                row.params, logprobs=None, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0
            )
            found[part.seq_id] = Row(free, row.seed, row.position, ())
        at += part.num_logits
    return found


def _key(row: Row, line: _Line, number: int) -> mx.array:
    """[2]: the random key of the position that draft ``number`` fills."""
    first = line.first + 1 + number
    keys = mx.array([position_key(row.seed, first + i) for i in range(line.part.num_logits)], dtype=mx.uint32)
    return keys[line.right[None]][0]


def _in_order(choices: Sequence[Choice]) -> mx.array | None:
    """[n] sampled tokens in the order of the rows; ``None`` if there are none."""
    if not choices:
        return None
    tokens = mx.concatenate([one.tokens for one in choices]) if len(choices) > 1 else choices[0].tokens
    order = [i for one in choices for i in one.rows]
    return tokens if order == sorted(order) else tokens[mx.argsort(mx.array(order))]
