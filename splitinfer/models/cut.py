"""One mlx-lm model class, run for its layers [start, end) only; no code per architecture.

The class and its list of layers stay whole, so ``zip(self.layers, cache)``, ``layer_types[i]`` and
``fa_idx`` stay true, and its own ``__call__`` runs unchanged. Only what the list holds changes:

    index      0 ... start-1      start         ...      end-1           end ... n-1
    holds      passthrough        inject(real)  real     tap(real)       passthrough

A *passthrough* returns its input and shows every attribute of the layer it stands for. *Inject*
puts the received hidden state in the place of its input. *Tap* keeps its output: the hidden state to
send on, or, on the last stage, only the rows that want logits, so that norm and head see no others.
What the model computes besides (an embedding nobody reads, a head after the tap) is never evaluated,
because MLX is lazy: it costs neither time nor the memory of its weights.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from splitinfer.errors import CannotCut
from splitinfer.models.caches import Cache, Place, make_list


class _Relay:
    """What goes in at the first own layer and comes out at the last, for the call under way."""

    def __init__(self) -> None:
        self.hidden: mx.array | None = None
        self.num_rows: int | None = None
        self.output: mx.array | None = None


class _StandIn:
    """Stands in a model's list of layers and shows the attributes of the real one."""

    def __init__(self, real: nn.Module) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _Passthrough(_StandIn):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else next(iter(kwargs.values()))


class _Inject(_StandIn):
    def __init__(self, real: Any, relay: _Relay) -> None:
        super().__init__(real)
        self._relay = relay

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        hidden = self._relay.hidden
        # While a cut is surveyed nothing has been received: the shape is what matters.
        return self._real(mx.zeros_like(x) if hidden is None else hidden, *args, **kwargs)


class _Tap(_StandIn):
    def __init__(self, real: Any, relay: _Relay) -> None:
        super().__init__(real)
        self._relay = relay

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        y = self._real(*args, **kwargs)
        if not isinstance(y, mx.array) or y.ndim != 3:
            raise CannotCut(f"a {type(self._real).__name__} hands more than one hidden state to the next layer")
        rows = self._relay.num_rows
        if rows is not None and rows < y.shape[1]:
            y = y[:, y.shape[1] - rows :, :]
        self._relay.output = y
        return y


class SequenceCaches:
    """One sequence's caches on this stage: the full-length list for the model, the own ones for us."""

    def __init__(self, full: list[Cache], own: list[Cache], place: Place) -> None:
        self.full, self.own, self.place = full, own, place


class StageModel:
    """A model of ``num_layers`` layers that runs [start, end) of them. Changes ``model`` in place.

    Raises:
        CannotCut: this cut cannot be right, with the reason.
    """

    def __init__(self, model: nn.Module, start: int, end: int) -> None:
        layers = find_layers(model)
        if not 0 <= start < end <= len(layers):
            raise CannotCut(f"layers [{start}, {end}) are not in a model of {len(layers)} layers")
        self.start, self.end, self.num_layers = start, end, len(layers)
        self._model, self._relay = model, _Relay()
        self._check_caches()
        for i, layer in enumerate(layers):
            if not start <= i < end:
                layers[i] = _Passthrough(layer)
        if not self.is_first:
            layers[start] = _Inject(layers[start], self._relay)
        layers[end - 1] = _Tap(layers[end - 1], self._relay)

    @property
    def is_first(self) -> bool:
        """Whether this stage embeds the tokens."""
        return self.start == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage has norm and head."""
        return self.end == self.num_layers

    def make_caches(self) -> SequenceCaches:
        """Empty caches for one sequence."""
        place = Place()
        fresh = make_prompt_cache(self._model)
        if self.is_first and self.is_last:
            # Nothing is foreign, so the list need not have one cache a layer.
            full, own = make_list(fresh, 0, len(fresh), place)
        else:
            full, own = make_list(fresh, self.start, self.end, place)
        return SequenceCaches(full, own, place)

    def __call__(
        self, tokens: mx.array, caches: SequenceCaches, hidden: mx.array | None = None, num_logits: int = 0
    ) -> mx.array:
        """Build the graph of one slice; computes nothing yet.

        Args:
            tokens: [1, n] token ids.
            caches: the sequence's; they move on by n positions.
            hidden: [1, n, d] from the stage before; ``None`` on the first stage (and in a survey).
            num_logits: the number of last rows that want logits; only the last stage looks at it.

        Returns:
            [1, n, d] hidden states, or on the last stage [1, num_logits, vocabulary] logits (for 0, of
            one row that need not be evaluated).
        """
        self._relay.hidden = hidden
        self._relay.num_rows = max(num_logits, 1) if self.is_last else None
        logits = self._model(tokens, cache=caches.full)
        caches.place.position += tokens.shape[1]
        output, self._relay.output, self._relay.hidden = self._relay.output, None, None
        assert output is not None, "the last own layer was not run"
        return logits if self.is_last else output

    def _check_caches(self) -> None:
        if self.is_first and self.is_last:
            return
        num_caches = len(make_prompt_cache(self._model))
        if num_caches != self.num_layers:
            raise CannotCut(
                f"{_type_name(self._model)} has {num_caches} caches for {self.num_layers} layers, "
                "so its layers share more than the hidden state; it runs only whole"
            )


def find_layers(model: nn.Module) -> list[Any]:
    """The list, inside the model, that holds its layers; changing it changes the model.

    Raises:
        CannotCut: there is none.
    """
    shown = getattr(model, "layers", None)
    if shown:
        for holder in _modules(model):
            for value in holder.values():
                if isinstance(value, list) and any(item is shown[0] for item in value):
                    return value
    raise CannotCut(f"{_type_name(model)} keeps its layers in no list that can be found")


def _modules(model: nn.Module) -> Sequence[Any]:
    return [module for _, module in model.named_modules()]


def _type_name(model: nn.Module) -> str:
    return str(getattr(model, "model_type", type(model).__module__.rsplit(".", 1)[-1]))
