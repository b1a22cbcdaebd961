"""Runs the layers [start, end) of one mlx-lm model class, without code per architecture.

The class and its lists of layers keep their length, so ``zip(self.layers, cache)``, ``layer_types[i]`` and ``fa_idx``
stay valid, and its own ``__call__`` runs unchanged. Only what the lists hold changes, while this stage runs:

    index      0 ... start-1      start         ...      end-1           end
    holds      passthrough        inject(real)  real     real            border

A *passthrough* returns its arguments. *Inject* calls its layer with the arrays received. The *border* stores its
arguments for the next stage and ends the call. On the last stage a *tap* keeps only the rows that want logits. MLX is
lazy, so all else that the model would compute is never evaluated. Before a stage is used it is called once on marked
arrays. The cut is refused if a result depends on a passthrough, or on a parameter of an earlier layer.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from splitinfer.core.kv.format import KVFormat
from splitinfer.errors import CannotCut
from splitinfer.models.border.border import Border
from splitinfer.models.caches.caches import CachePlace, fresh_caches, make_list, share
from splitinfer.models.caches.cohort import SequenceCaches
from splitinfer.models.caches.rows import RowStep, attend_by_rows
from splitinfer.models.cut.stand_ins import BorderReached, Keep, Relay, add_deep, between, keep_rows, tap
from splitinfer.models.cut.structure import CannotTrace, ModelStructure
from splitinfer.models.library.graph import Graph, uncompiled
from splitinfer.models.library.layers import (
    LayerWatch,
    StandIn,
    Watched,
    call_model,
    find_layers,
    last_rows,
    replaced,
    type_name,
)

Positions = Callable[[], mx.array]

_TABLES = (nn.Embedding, nn.QuantizedEmbedding)
_PROBED = (3, 7)  # rows per call; then one row, for which some models read other arrays than for many


class StageModel:
    """A model of ``num_layers`` layers that runs [start, end) of them.

    Several stages may share one ``model`` and its ``structure``, which is read from the model if not given. Only one of
    these stages runs at a time.

    ``checks``: verify that the stage reads nothing of earlier layers. A stage that is only timed can skip this.

    Attributes:
        whole: the whole model.
        is_first: this stage embeds the tokens.
        is_last: this stage computes logits.
        own_places: the places of this stage's own caches in the full-length list.
        taps_rows: norm and head work on rows, so they get only the rows that want logits.
        reads_tokens: the model may look at its tokens while its graph is built.
        rows_in, rows_out: rows per token that the stage receives and sends. After tapped layers the hidden states are
            cut into rows of ``tap_size`` numbers, and a row of the taps follows.
        tap_size: how many numbers a row of the taps has.
        heads: the last stage's part of a drafter (``trained.WithHeads``), if joined.
        tower: the first stage's part for pictures (``pictures.PictureTower``), if joined.
        experts: the experts of which a part is in memory (``load.expert_store.ExpertStore``), if there are any.
        structure: what the cut knows of the model; ``None`` if it is whole and cannot be cut.
        traceable: MLX's graph shows what this stage reads. If not, the stage is the whole model.

    Raises:
        CannotCut: this cut cannot be correct; says why.
    """

    def __init__(
        self, model: nn.Module, start: int, end: int, structure: ModelStructure | None = None, *, checks: bool = True
    ) -> None:
        self._kv_format: KVFormat | None = None
        self._num_deep = 0
        self._slots = find_layers(model)
        if not 0 <= start < end <= len(self._slots):
            raise CannotCut(f"layers [{start}, {end}) are not in a model of {len(self._slots)} layers")
        self.start, self.end, self.num_layers = start, end, len(self._slots)
        self.is_first, self.is_last = start == 0, end == len(self._slots)
        self.whole, self._relay = model, Relay()
        self.traceable = True
        self.heads: Any = None
        self.tower: Any = None
        self.experts: Any = None
        self.rows_in, self.rows_out, self.tap_size = int(start > 0), 1, 0
        self.structure = structure = self._read_structure() if structure is None else structure
        long = None if structure is None else structure.long_rows
        self.reads_tokens = structure is None or structure.reads_tokens
        self._looks_at_tokens = structure is not None and structure.reads_tokens
        self._probes = [(*_PROBED, 1)] if long is None else [(long, 1), (*_PROBED, 1)]
        self._incoming = None if self.is_first or structure is None else structure.border(start)
        self._outgoing = None if self.is_last or structure is None else structure.border(end)
        self._result_rows = structure.result_rows() if structure is not None and self.is_last else []
        self.taps_rows = bool(self._result_rows)
        self.own_places = self._own_caches(structure)
        self._stand_ins = dict[int, Any]()
        if structure is not None:
            self._stand_ins = between(structure, self._incoming, self._outgoing, self._relay)
            self._tap(structure)
            if checks and self._incoming is not None:
                self._check(structure)

    @property
    def num_embeddings(self) -> int | None:
        """Rows of the largest embedding table, ``None`` without one. MLX does not check token ids against it."""
        tables = [m.weight.shape[0] for _, m in self.whole.named_modules() if isinstance(m, _TABLES)]
        return max(tables, default=None)

    def layer(self, index: int) -> nn.Module:
        """Return one of the model's layers."""
        return cast(nn.Module, self._slots[index].layer)

    @property
    def hidden_spec(self) -> tuple[int, mx.Dtype] | None:
        """How many numbers per token the previous stage sends, and their dtype; ``None`` on the first stage."""
        return None if self._incoming is None else (self._incoming.width, self._incoming.dtype)

    @property
    def row_spec(self) -> tuple[int, mx.Dtype] | None:
        """How many numbers a row from the previous stage has, and their dtype; ``None`` on the first stage."""
        spec = self.hidden_spec
        return (self.tap_size, spec[1]) if spec is not None and self.rows_in > 1 else spec

    @property
    def sends_whole_numbers(self) -> bool:
        """Whether this stage sends integers, which must keep every bit."""
        return self._outgoing is not None and self._outgoing.is_exact

    @property
    def shares_kv(self) -> bool:
        """Whether keys and values cross one of this stage's borders."""
        return any(border.shared for border in (self._incoming, self._outgoing) if border is not None)

    def made_up_hidden(self, n: int, seed: int) -> mx.array | None:
        """Return [n, d] random rows as if from the previous stage, for a trial. Return None on the first stage."""
        return None if self._incoming is None else self._incoming.made_up(n, seed)

    def use_float32_head(self) -> None:
        """Compute norm, head and logits in float32 from now on (``Survey.head_bytes`` is the memory for that)."""
        self._relay.head_in_float32 = True

    def tap(self, parts: Mapping[int, Callable[[mx.array], mx.array]], size: int) -> None:
        """Add up ``parts[i](hidden)`` over the layers i of this stage, for each row of the hidden states [rows, d].
        ``take_tapped`` returns the sum [rows, ``size`` or less]. Parts of other stages' layers are ignored."""
        for index in range(self.start, self.end):
            if index in parts:
                self._watch(index, partial(tap, self._relay, parts[index], type_name(self.whole)))
        self.tap_size = size
        if self._incoming is not None and any(index < self.start for index in parts):
            self.rows_in = 1 - (-self._incoming.width // size)
        if self._outgoing is not None and any(index < self.end for index in parts):
            self.rows_out = 1 - (-self._outgoing.width // size)

    def take_tapped(self) -> mx.array | None:
        """Return the sum [rows, d] of the last call and forget it. Return None if no layer of this stage is tapped."""
        tapped, self._relay.tapped = self._relay.tapped, []
        return sum(tapped[1:], start=tapped[0]) if tapped else None

    def take_deep(self, count: int) -> None:
        """Accept ``count`` arrays beside a picture's rows from now on; add one to the output of each first layer."""
        self._num_deep = count
        for index in range(count):
            self._watch(index, partial(add_deep, self._relay, index))

    def use_format(self, kv_format: KVFormat | None) -> None:
        """Set the format of keys and values in caches made from now on; ``None``: as computed."""
        self._kv_format = kv_format
        if kv_format is not None:
            attend_by_rows(self.whole)  # its attention can read the packed keys and values of such caches

    @property
    def kv_places(self) -> list[int]:
        """The places of all caches of a sequence: the stage's own, then its heads'."""
        before = len(fresh_caches(self.whole))
        return [*self.own_places, *range(before, before + len(self._heads_caches()))]

    def _heads_caches(self) -> list[Any]:
        return [] if self.heads is None else list(self.heads.heads.make_caches())

    def make_caches(self) -> SequenceCaches:
        """Return empty caches for one sequence; the heads' caches come last."""
        place, heads = CachePlace(), self._heads_caches()
        full, own = make_list(fresh_caches(self.whole), self.own_places, place, self._kv_format)
        for border in (self._incoming, self._outgoing):
            for i in border.shared if border else ():
                share(full[i])
        return SequenceCaches([*full, *heads], own, place, heads)

    def __call__(
        self,
        tokens: mx.array,
        caches: SequenceCaches,
        hidden: mx.array | None = None,
        num_logits: int = 0,
    ) -> mx.array:
        """Build the graph of one slice. Computes nothing yet.

        Args:
            tokens: [1, n] token ids.
            caches: the sequence's caches; they advance by n positions.
            hidden: [1, n, d] from the previous stage. On the first stage, ``PictureTower.rows`` of the tokens if there
                are pictures among them, else ``None``. ``None`` in a survey.
            num_logits: how many of the last rows want logits; used only on the last stage.

        Returns:
            [1, n, d] for the next stage (d is the hidden size, or more), or on the last stage [1, R, vocabulary]
            logits of the R rows that want them (if none does, of one row, which need not be evaluated).
        """

        def keep(array: mx.array, axis: int) -> mx.array:
            return last_rows(array, max(num_logits, 1), axis)

        output = self._run(tokens, caches, hidden, keep)
        return output if self.taps_rows or not self.is_last else keep(output, 1)

    @property
    def may_go_by_rows(self) -> bool:
        """Whether one hidden state and nothing else crosses each of this stage's borders. Only then can sequences share
        a step as rows; a trial (``step``) finds out whether the caches allow it, too."""
        borders = [border for border in (self._incoming, self._outgoing) if border is not None]
        return all(border.is_plain for border in borders) and all(axis == 1 for _, axis in self._result_rows)

    def by_rows(self, tokens: mx.array, caches: list[Any], hidden: mx.array | None, step: RowStep) -> mx.array:
        """Build the graph of one step of many sequences. Computes nothing yet, and advances no sequence.

        Args:
            tokens: [T, 1] token ids.
            caches: the full-length list of ``RowCache`` objects, bound to ``step``.
            hidden: [T, 1, d] from the previous stage; ``None`` on the first stage.

        Returns:
            [T, 1, d] for the next stage, or on the last one [R, 1, vocabulary] logits of the rows that want them.
        """

        def keep(array: mx.array, _axis: int = 0) -> mx.array:
            return array if step.logit_rows is None else array[step.logit_rows]

        self._relay.received = {} if hidden is None else {self.start: [hidden]}
        logits, given = self._call(tokens, caches, hidden, keep, lambda: step.positions[..., None])
        if self._outgoing is not None:
            return cast(mx.array, given[self.end][0])
        assert logits is not None, "the model ended before its last layer"
        return logits if self.taps_rows else keep(logits)

    @contextmanager
    def watched(self, watch: LayerWatch) -> Iterator[None]:
        """Let ``watch`` call this stage's layers in place of the model, during the ``with`` block."""
        before = dict(self._stand_ins)
        outer = [self._watch(i, watch) for i in range(self.start, self.end)]
        try:
            yield
        finally:
            self._stand_ins = before
            for stand_in, real in filter(None, outer):
                stand_in._real = real

    def _watch(self, index: int, watch: LayerWatch) -> tuple[StandIn, Any] | None:
        """Let ``watch`` call a layer, inside its stand-in. Return the innermost stand-in and the layer that it called
        before, or ``None`` if the layer had no stand-in."""
        stand_in = self._stand_ins.get(index)
        if stand_in is None:
            self._stand_ins[index] = Watched(self.layer(index), watch)
            return None
        while isinstance(stand_in._real, StandIn):
            stand_in = stand_in._real
        real, stand_in._real = stand_in._real, Watched(stand_in._real, watch)
        return stand_in, real

    def _run(self, tokens: mx.array, caches: SequenceCaches, hidden: mx.array | None, keep: Keep) -> mx.array:
        if self._incoming is not None:
            self._receive(self._incoming, caches, hidden, tokens.shape[1])
        start, end = caches.place.position, caches.place.position + tokens.shape[1]
        logits, given = self._call(tokens, caches.full, hidden, keep, lambda: caches.positions(start, end))
        caches.place.position = end
        if self._outgoing is not None:
            return self._send(self._outgoing, caches, given)
        assert logits is not None, "the model ended before its last layer"
        return logits

    def _call(
        self, tokens: mx.array, caches: list[Any], hidden: mx.array | None, keep: Keep, positions: Positions
    ) -> tuple[mx.array | None, Mapping[int, Any]]:
        """Call the model. Return its logits if it reached the end, and by layer the arguments for the next stage."""
        self._relay.keep, self._relay.tapped = keep if self.is_last else None, []
        embeddings = None
        if self.is_first and hidden is not None:
            embeddings, *self._relay.deep = mx.split(hidden, 1 + self._num_deep, axis=-1)
        logits: mx.array | None = None
        try:
            with replaced(self._slots, self._stand_ins):
                logits = call_model(self.whole, tokens, caches, positions, embeddings)
        except BorderReached:
            pass
        given, self._relay.given, self._relay.received, self._relay.deep = self._relay.given, {}, {}, []
        self._relay.keep = None  # its closure holds the step
        return logits, given

    def _receive(self, border: Border, caches: SequenceCaches, hidden: mx.array | None, n: int) -> None:
        # A survey has received nothing, and only the shape matters.
        packed = mx.zeros((1, n, border.width), border.dtype) if hidden is None else hidden
        arrays = iter(border.unpack(packed, caches.place.position + n))
        self._relay.received = {layer: [next(arrays) for _ in rows] for layer, rows in border.given.items()}
        for row, array in zip(border.updates, arrays, strict=True):
            cache, part = row.path
            caches.full[cache].received[part] = array

    def _send(self, border: Border, caches: SequenceCaches, given: Mapping[int, Any]) -> mx.array:
        updates = [caches.full[row.path[0]].stored[row.path[1]] for row in border.updates]
        for i in border.shared:
            caches.full[i].stored = ()
        return border.pack([*(array for layer in border.given for array in given[layer]), *updates])

    def _read_structure(self) -> ModelStructure | None:
        try:
            return ModelStructure(self.whole)
        except CannotCut as error:
            if not (self.is_first and self.is_last):
                raise
            self.traceable = not isinstance(error, CannotTrace)
            return None  # the whole model needs no structure

    def _own_caches(self, structure: ModelStructure | None) -> list[int]:
        """Return the places in the cache list that this stage writes to: caches of its own layers, replicas of earlier
        layers' caches, and caches of no layer (they store tokens, which every stage has)."""
        if structure is None or (self.is_first and self.is_last):
            return list(range(len(fresh_caches(self.whole))))
        shared, again = (self._incoming.shared, self._incoming.replicas) if self._incoming else ((), {})
        owners = [None if structure.is_common(i) else structure.first_user(i) for i in range(structure.num_caches)]
        return [i for i, o in enumerate(owners) if o is None or self.start <= o < self.end or i in shared or o in again]

    def _tap(self, structure: ModelStructure) -> None:
        """Keep only the rows of the last layer that want logits, if norm and head work on rows."""
        if not self.is_last:
            return
        last, before = self.num_layers - 1, dict(self._stand_ins)
        keep = partial(keep_rows, self._relay, self._result_rows)
        self._stand_ins[last] = Watched(before.get(last, structure.layers[last]), keep)
        if not self._can_tap():
            self.taps_rows, self._stand_ins = False, before

    def _check(self, structure: ModelStructure) -> None:
        """Raise CannotCut if a result of this stage depends on earlier layers."""
        self._relay.stale = {}
        results, _ = self.probe()
        read = Graph(results, {**self._relay.stale, **dict(tree_flatten(self.whole.parameters()))}).read_by(
            range(len(results))
        )
        wrong = read & (set(self._relay.stale) | structure.hidden_from(self.start))
        self._relay.stale = None
        if wrong:
            raise CannotCut(
                f"{type_name(self.whole)}: a part that starts at layer {self.start} would depend on {len(wrong)} "
                "arrays of the layers before it"
            )

    def _can_tap(self) -> bool:
        """Return whether the code after the last layer treats rows independently."""
        with uncompiled():
            try:
                logits = self._run(
                    mx.zeros((1, 3), mx.int32), self.make_caches(), None, lambda array, axis: last_rows(array, 1, axis)
                )
            except (ValueError, RuntimeError, IndexError):
                return False
        return logits.shape[1] == 1

    def probe(self) -> tuple[list[mx.array], mx.array]:
        """Return all arrays that the stage computes for made-up sequences, and the output for a single row. Nothing is
        evaluated. Together the sequences read all arrays that any sequence reads."""
        results, output = list[mx.array](), mx.zeros(())
        with uncompiled():
            for chunks in self._probes:
                caches = self.make_caches()
                for rows in chunks:
                    output = self(mx.zeros((1, rows), mx.int32), caches, None, rows)
                    results.append(output)
                results += caches.arrays()
        return [*results, *self._chosen_by_tokens()], output

    def _chosen_by_tokens(self) -> list[mx.array]:
        """Return all parameters of this stage's layers if other tokens than the probe's may select other parameters.
        The graph shows neither what another token looks up, nor the numbers that its place is computed from."""
        if not self._looks_at_tokens:
            return []
        again = self._incoming.replicas if self._incoming else ()
        layers = [self._slots[i].layer for i in (*again, *range(self.start, self.end))]
        return [array for layer in layers for _, array in tree_flatten(layer.parameters())]
