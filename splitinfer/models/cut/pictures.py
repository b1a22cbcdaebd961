"""Gives pictures to a model's first stage: rows that take the place of tokens' embeddings.

The rows come from the model's own tower, through mlx-vlm's class (``get_input_embeddings``), in the graph of the first
step that needs them. Some models have more for each row (Qwen3-VL's *deepstack*): arrays that are added to the outputs
of the first layers. The first stage's process keeps pictures by the key of their content, so plans hold only keys. Of a
stage across two machines both ranks run the tower, on the same pixels: so nothing more crosses the cable between them.
"""

import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from splitinfer.core.picture import Picture
from splitinfer.core.plan import NewSequence, Slice
from splitinfer.errors import CannotCut, ProtocolError, QueueFull
from splitinfer.models.cut.cut import StageModel
from splitinfer.models.library.layers import type_name

_LANGUAGE = "language_model."


@dataclass(eq=False)
class Pixels:
    """A picture, ``prepared`` for the model's tower (``pictures.families.Prepared``). ``rows``: what the tower made of
    it, once a step has needed it."""

    prepared: Any
    rows: mx.array | None = None


_known: weakref.WeakValueDictionary[bytes, Pixels] = weakref.WeakValueDictionary()
_knowing = threading.Lock()  # of two pictures with the same content, stages must find the one that is held
_MOST_KNOWN = 2**31  # bytes, of all requests
_KEPT_ROWS = 2**28  # bytes


def known(prepared: Any) -> Pixels:
    """Register a picture and return the registered one of the same content. Stages find it while it is referenced.

    Raises:
        QueueFull: the pictures of the requests under way leave no memory for another.
    """
    with _knowing:
        held = _known.get(prepared.key)
        if held is None and sum(one.prepared.nbytes for one in list(_known.values())) + prepared.nbytes > _MOST_KNOWN:
            raise QueueFull("the requests under way have too many pictures; try again later")
        return _known.setdefault(prepared.key, Pixels(prepared)) if held is None else held


def shown_by(new: Iterable[NewSequence]) -> list[Any]:
    """Return the pictures of a plan's ``new`` sequences, each once, for a first stage in another process."""
    held = {picture.key: _known.get(picture.key) for one in new for picture in one.pictures}
    return [pixels.prepared for pixels in held.values() if pixels is not None]


class PictureTower:
    """Makes rows of pictures for a first stage. ``whole``: the model whose language part the stage runs."""

    def __init__(self, whole: nn.Module) -> None:
        self._whole = whole
        self._held: dict[int, dict[Picture, Pixels]] = {}  # by sequence
        # Pictures with rows, the most recently used last.
        self._made = weakref.WeakValueDictionary[bytes, Pixels]()
        vision = getattr(getattr(whole, "config", None), "vision_config", None)
        self.num_deep = len(getattr(vision, "deepstack_visual_indexes", None) or ())

    @property
    def parameters(self) -> dict[str, mx.array]:
        """The parameters outside the language model, by name."""
        return {name: a for name, a in tree_flatten(self._whole.parameters()) if not name.startswith(_LANGUAGE)}

    def join(self, stage: StageModel) -> None:
        """Make a stage's first layers add the arrays that come with a picture's rows.

        Raises:
            CannotCut: the stage has too few layers.
        """
        text = getattr(getattr(self._whole, "config", None), "text_config", None)
        least = stage.num_layers if getattr(text, "hidden_size_per_layer_input", 0) else self.num_deep
        if stage.end < least:
            raise CannotCut(
                f"{type_name(stage.whole)}: the first {least} layers take more of a picture than its rows, and the "
                f"first stage has {stage.end} layers; give it more, or start with --no-pictures"
            )
        stage.take_deep(self.num_deep)
        stage.tower = self

    # -- sequences -----------------------------------------------------------------------------

    def open(self, new: Iterable[NewSequence], ended: Iterable[int]) -> None:
        """Hold the pictures of ``new`` sequences, and release the pictures of ``ended`` ones.

        Raises:
            ProtocolError: a picture is unknown.
        """
        for seq_id in ended:
            self._held.pop(seq_id, None)
        for one in new:
            if one.pictures:
                found = [(picture, _known.get(picture.key)) for picture in one.pictures]
                if any(pixels is None for _, pixels in found):
                    raise ProtocolError("a plan has a picture that this stage was never given")
                self._held[one.seq_id] = {picture: pixels for picture, pixels in found if pixels is not None}

    def clear(self) -> None:
        """Forget every sequence."""
        self._held.clear()

    # -- rows ----------------------------------------------------------------------------------

    def rows(self, slices: Sequence[Slice]) -> mx.array | None:
        """Return the embeddings [T, d] of a step's tokens, together with the arrays for the first layers. Return None
        if the step has no row of a picture, so that the model embeds its tokens itself."""
        places, at = list[tuple[int, mx.array]](), 0
        for part in slices:
            for picture, pixels in self._held.get(part.seq_id, {}).items():
                first, last = max(picture.start, part.start), min(picture.end, part.end)
                if first < last:
                    rows = self._rows_of(pixels)[first - picture.start : last - picture.start]
                    places.append((at + first - part.start, rows))
            at += len(part.token_ids)
        if not places:
            return None
        step = self._embedded([token for part in slices for token in part.token_ids])
        for first, rows in places:
            step[first : first + rows.shape[0]] = rows
        return step

    def _rows_of(self, pixels: Pixels) -> mx.array:
        """Return a picture's rows. The most recently used pictures keep theirs; others make them again if needed."""
        rows = pixels.rows
        if rows is None:
            rows = pixels.rows = self._embedded(pixels.prepared.token_ids, pixels)
        self._made.pop(pixels.prepared.key, None)
        self._made[pixels.prepared.key] = pixels
        left = _KEPT_ROWS
        for one in reversed(list(self._made.values())):
            left -= 0 if one.rows is None else one.rows.nbytes
            if left < 0 and one is not pixels:
                one.rows = None
        return rows

    def _embedded(self, token_ids: Sequence[int], pixels: Pixels | None = None) -> mx.array:
        """Return the rows [n, (1 + num_deep) * d] of tokens. Rows of a picture's placeholders come from its pixels."""
        named = {} if pixels is None else {name: _array(value) for name, value in pixels.prepared.named.items()}
        values = None if pixels is None else _array(pixels.prepared.values)
        found = self._whole.get_input_embeddings(mx.array([list(token_ids)]), values, **named)
        rows = found.inputs_embeds[0]
        deep = getattr(found, "deepstack_visual_embeds", None) if pixels is not None else None
        each = [mx.zeros_like(rows)] * self.num_deep if deep is None else [one.astype(rows.dtype) for one in deep]
        return mx.concatenate([rows, *each], axis=-1) if each else rows


def _array(value: Any) -> Any:
    return mx.array(value) if hasattr(value, "dtype") and not isinstance(value, mx.array) else value
