"""Profiles: what was measured of machines, of the links between them, and of one model. From them layouts are planned.

    ModelProfile      each layer's kind and bytes, and those of embedding, head and draft model
    MachineProfile    seconds of one layer of each kind by the shape of a step, of what comes before and behind the
                      layers, of drafts; the bytes that are free
    LinkProfile       one direction of a link
    Profiles          all of them

Layers of one *kind* have the same modules with the same shapes and quantisation, and so the same costs: a model has one
kind or a few (full and sliding attention, dense and experts). Seconds, bytes and bytes a second throughout. All of them
raise ValueError where a number is out of its range.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Annotated, Self

from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer
from pydantic.dataclasses import dataclass

from splitinfer.core.costs.stage import StageCosts
from splitinfer.machine.device_queue import DeviceTraits
from splitinfer.machine.numbers import Bytes, Costs, Count, NotNegative, Numbers, Positive

VERSION = 3  # of the numbers
_STRICT = ConfigDict(extra="forbid")

# Bytes a second; infinite, which JSON cannot say, is ``None`` there.
_Bandwidth = Annotated[
    float,
    Field(gt=0),
    BeforeValidator(lambda found: math.inf if found is None else found),
    PlainSerializer(lambda value: None if math.isinf(value) else value),
]


@dataclass(frozen=True, slots=True, config=_STRICT)
class LayerProfile:
    """One layer. ``kind``: layers of one kind cost the same. Bytes: of its weights as loaded, and of its KV for each
    token, for each sequence of any length, and for each stored block (``models.memory.Need``)."""

    kind: str
    weights: Bytes
    kv_per_token: Bytes = 0
    kv_fixed: Bytes = 0
    kv_stored: Bytes = 0


@dataclass(frozen=True, slots=True, config=_STRICT)
class DraftProfile:
    """A drafter. ``weights``, ``kv_per_token``: its bytes; zeros for n-grams. ``like``: for one on the last stage, the
    kind of the model's layers that its own resemble; ``None``: it is on the coordinator. ``at_once``: the most drafts
    that it makes in a round; 0: one."""

    name: str
    weights: Bytes = 0
    kv_per_token: Bytes = 0
    like: str | None = None
    at_once: int = 0


@dataclass(frozen=True, slots=True, config=_STRICT)
class ModelProfile(Numbers):
    """A model.

    name: as a layout names it.
    layers: in their order.
    embedding, head: bytes of what comes before and behind the layers, as loaded; norms count to the head.
    is_tied: whether both are the same weights, so that one stage with both holds them once (``head`` bytes).
    hidden_row: bytes of one row of hidden states on a link.
    context_length: tokens that the model was trained for.
    draft: the drafter, if there is one.
    """

    name: str
    layers: Annotated[tuple[LayerProfile, ...], Field(min_length=1)]
    embedding: Bytes = 0
    head: Bytes = 0
    is_tied: bool = False
    hidden_row: Bytes = 0
    context_length: Count = 2**20
    draft: DraftProfile | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def kinds(self, start: int, end: int) -> dict[str, int]:
        """How many layers of each kind are among the layers [start, end)."""
        return dict(Counter(layer.kind for layer in self.layers[start:end]))

    def drafter(self, start: int, end: int) -> tuple[int, int]:
        """Bytes of the drafter's weights, and of its KV for each token, where a stage of the layers [start, end) has
        it. One on the last stage reads the embedding there."""
        draft, is_last = self.draft, end == self.num_layers
        if draft is None or not (start == 0 if draft.like is None else is_last):
            return 0, 0
        read_too = 0 if start == 0 or self.is_tied or draft.like is None else self.embedding
        return draft.weights + read_too, draft.kv_per_token

    def weights(self, start: int, end: int) -> int:
        """Bytes of the weights of a stage of the layers [start, end), with what comes before and behind them."""
        return sum(layer.weights for layer in self.layers[start:end]) + self.beside_layers(start, end)

    def beside_layers(self, start: int, end: int) -> int:
        """Bytes of what comes before and behind the layers, where a stage of the layers [start, end) has it."""
        is_first, is_last = start == 0, end == self.num_layers
        if is_first and is_last and self.is_tied:
            return max(self.embedding, self.head)
        return is_first * self.embedding + is_last * self.head


@dataclass(frozen=True, slots=True, config=_STRICT)
class MachineProfile(Numbers):
    """One machine, for one model.

    name: as a stage of a layout is named.
    layers: the costs of one layer, by its kind, without ``step``.
    address, key: of its worker, as in a layout (``core.layout.StageSpec``); no address for the coordinator.
    step: seconds of a step on any stage, whatever layers it has.
    embedding, head: the costs of what comes before and behind the layers, by the rows of a step. Of a prompt's chunk
        the head computes one row at most, of an answer and of drafts every row.
    host: seconds of a step in the coordinator beside computing, if this machine is the coordinator.
    draft, draft_more, draft_buffers: of a round of drafts, if this machine is the coordinator (``machine.Machine``).
    free_bytes: that a stage may take for weights and KV, when nothing of the model is loaded.
    scores: bytes of unfused attention in a step, for each token of context (``models.attention``).
    buffers: command buffers of a step, for each layer.
    launches_ahead: whether its device computes while the host goes on.
    device: what the device is like.
    device_name, versions, measured_at: what was measured, with which versions, and when (ISO 8601), for people.
    """

    name: str
    layers: Annotated[Mapping[str, Costs], Field(min_length=1)]
    address: str | None = None
    key: str | None = None
    step: NotNegative = 0.0
    embedding: Costs = field(default_factory=StageCosts)
    head: Costs = field(default_factory=StageCosts)
    host: NotNegative = 0.0
    draft: NotNegative = 0.0
    draft_more: NotNegative = 0.0
    draft_buffers: Count = 1
    free_bytes: Bytes = 2**62
    scores: Bytes = 0
    buffers: Positive = 1.0
    launches_ahead: bool = False
    device: DeviceTraits = DeviceTraits()
    device_name: str = ""
    versions: str = ""
    measured_at: str = ""

    def slower(self, factor: float) -> Self:
        """The same machine where everything takes ``factor`` times as long."""
        return replace(
            self,
            layers={kind: costs.scaled(factor) for kind, costs in self.layers.items()},
            embedding=self.embedding.scaled(factor),
            head=self.head.scaled(factor),
            **{name: factor * getattr(self, name) for name in ("step", "host", "draft", "draft_more")},
        )


@dataclass(frozen=True, slots=True, config=_STRICT)
class LinkProfile:
    """One direction of a link: the machines' names, seconds of latency one way, and bytes a second (infinite: too many
    to be measured)."""

    source: str
    target: str
    latency: NotNegative
    bytes_per_second: _Bandwidth = math.inf


@dataclass(frozen=True, slots=True, config=_STRICT)
class Profiles(Numbers):
    """A model, the machines that may run it (the coordinator first), and the links between them. Every machine has a
    name of its own and the costs of every kind of layer, and links are between these machines."""

    model: ModelProfile
    machines: Annotated[tuple[MachineProfile, ...], Field(min_length=1)]
    links: tuple[LinkProfile, ...] = ()
    version: int = VERSION

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ValueError(f"these profiles are of version {self.version}, not {VERSION}; measure again")
        names = [machine.name for machine in self.machines]
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"two machines are named {twice[0]!r}")
        for machine in self.machines:
            if missing := sorted({layer.kind for layer in self.model.layers} - set(machine.layers)):
                raise ValueError(f"machine {machine.name} has no costs of layers of kind {missing[0]!r}")
        for link in self.links:
            if unknown := sorted({link.source, link.target} - set(names)):
                raise ValueError(f"a link names {unknown[0]!r}, but there is no such machine")

    def link(self, source: str, target: str) -> LinkProfile | None:
        """The link from one machine to another; where only the way back was measured, that; else ``None``."""
        for a, b in ((source, target), (target, source)):
            for link in self.links:
                if (link.source, link.target) == (a, b):
                    return replace(link, source=source, target=target)
        return None

    def only(self, names: Sequence[str]) -> "Profiles":
        """The same with these machines only, in this order."""
        known = {machine.name: machine for machine in self.machines}
        links = tuple(link for link in self.links if {link.source, link.target} <= set(names))
        return Profiles(self.model, tuple(known[name] for name in names), links)
