"""Profiles for planning layouts: the measurements of machines, of the links between them, and of one model.

Layers of one *kind* have the same modules with the same shapes and quantisation, and so the same costs: a model has one
kind or a few (full and sliding attention, dense and experts). Units are seconds, bytes and bytes a second. Machines'
profiles come from files and from peers, and raise ValueError if a number is out of its range.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Self

import pydantic
from pydantic import ConfigDict, Field

from splitinfer.core.link_transport import RING
from splitinfer.machine.costs import Bytes, Costs, Count, NotNegative, Numbers

VERSION = 8  # of the saved profiles
_AGREE = 1.5  # times as long as the quickest trial
_BUSY, _FULL = 0.4, 0.8  # shares of the processors used by other programs: trials may be slow; trials say nothing


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """One layer. ``kind``: layers of one kind cost the same. Bytes: its weights as loaded, its KV for each token, and
    its KV for each sequence of any length (``models.memory.Need``). ``sums``: the sums in a step, if this is a rank's
    part of a layer. ``experts``: bytes of its routed experts, which may stay on disk. ``chosen``: bytes of those that
    one token needs."""

    kind: str
    weights: int
    kv_per_token: int = 0
    kv_fixed: int = 0
    sums: int = 0
    experts: int = 0
    chosen: int = 0


@dataclass(frozen=True, slots=True)
class DraftProfile:
    """A drafter. ``weights``, ``kv_per_token``: its bytes; zeros for n-grams. ``like``: for a drafter on the last
    stage, the kind of the model's layers that its own resemble; None: it is on the coordinator. ``at_once``: the most
    drafts of a round; 0: one."""

    name: str
    weights: int = 0
    kv_per_token: int = 0
    like: str | None = None
    at_once: int = 0


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """A model.

    name: the model's name in a layout.
    layers: in order.
    embedding, head: bytes before and after the layers, as loaded; norms count to the head.
    is_tied: whether both are the same weights, so that one stage with both holds them once (``head`` bytes).
    hidden_row: bytes of one row of hidden states on a link.
    context_length: tokens that the model was trained for.
    draft: the drafter, if there is one.
    half: the part that each of two ranks would hold, if two machines divide the layers; None: unknown or impossible.
    has_heads: whether its checkpoint has prediction heads.
    """

    name: str
    layers: tuple[LayerProfile, ...]
    embedding: int = 0
    head: int = 0
    is_tied: bool = False
    hidden_row: int = 0
    context_length: int = 2**20
    draft: DraftProfile | None = None
    half: "ModelProfile | None" = None
    has_heads: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def kinds(self, start: int, end: int) -> dict[str, int]:
        """Return the number of layers of each kind among the layers [start, end)."""
        return dict(Counter(layer.kind for layer in self.layers[start:end]))

    def drafter(self, start: int, end: int) -> tuple[int, int]:
        """Return the bytes of the drafter's weights, and of its KV for each token, if a stage of the layers [start,
        end) has it, else zeros. A drafter on the last stage also needs the embedding there."""
        draft, is_last = self.draft, end == self.num_layers
        if draft is None or not (start == 0 if draft.like is None else is_last):
            return 0, 0
        read_too = 0 if start == 0 or self.is_tied or draft.like is None else self.embedding
        return draft.weights + read_too, draft.kv_per_token

    def weights(self, start: int, end: int) -> int:
        """Return the bytes of the weights of a stage of the layers [start, end), with its embedding and head."""
        return sum(layer.weights for layer in self.layers[start:end]) + self.beside_layers(start, end)

    def experts(self, start: int, end: int) -> tuple[int, int]:
        """Return the bytes of the routed experts of the layers [start, end), and of those that one token needs."""
        layers = self.layers[start:end]
        return sum(layer.experts for layer in layers), sum(layer.chosen for layer in layers)

    def beside_layers(self, start: int, end: int) -> int:
        """Return the bytes of the embedding and the head, as far as a stage of the layers [start, end) has them."""
        is_first, is_last = start == 0, end == self.num_layers
        if is_first and is_last and self.is_tied:
            return max(self.embedding, self.head)
        return is_first * self.embedding + is_last * self.head


@pydantic.dataclasses.dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class Load:
    """The load from other programs during a measurement. ``others``: the processors that they kept busy, out of
    ``processors``. ``busiest``: the name of the busiest program, empty if unknown."""

    others: NotNegative = 0.0
    processors: Count = 1
    busiest: str = ""

    @property
    def is_high(self) -> bool:
        """Whether other programs may have slowed the measurement down."""
        return self.others > _BUSY * self.processors

    @property
    def is_full(self) -> bool:
        """Whether they left too little room for any measurement."""
        return self.others > _FULL * self.processors


@pydantic.dataclasses.dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class Trials:
    """How a machine was measured. The defaults belong to a machine that was described and not measured.

    few, many: the ratio of the slowest to the quickest of the trials that count, for steps of few rows and for steps
        that read a prompt; 0: too few trials.
    longest: the most positions that a row attended to.
    load: the load from other programs meanwhile.
    age: seconds from the measurement to the request for it.
    """

    few: NotNegative = 1.0
    many: NotNegative = 1.0
    longest: Count = 2**62
    load: Load = Load()
    age: NotNegative = 0.0

    @property
    def agree(self) -> bool:
        """Whether the trials agree, both of few rows and of prompts."""
        return 0 < self.few < _AGREE and 0 < self.many < _AGREE

    @property
    def tell(self) -> bool:
        """Whether the trials tell the machine's speed."""
        return self.agree and not self.load.is_full

    def and_those(self, other: "Trials") -> "Trials":
        """Return what holds for a figure that depends on these trials and on ``other``: of each the worse."""
        few, many = (0 if 0 in both else max(both) for both in ((self.few, other.few), (self.many, other.many)))
        load = max(self.load, other.load, key=lambda each: each.others / each.processors)
        return Trials(few, many, min(self.longest, other.longest), load, max(self.age, other.age))

    @property
    def are_good(self) -> bool:
        """Whether the trials are worth saving: nothing can have slowed them down."""
        return self.agree and not self.load.is_high


@pydantic.dataclasses.dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class MachineProfile(Numbers):
    """One machine, for one model.

    name: the name of its stage in a layout.
    layers: the costs of one layer, by its kind, without ``step``.
    address, key: of its worker, as in a layout (``core.layout.StageSpec``); no address for the coordinator.
    step: seconds of every step, for any layers.
    host: seconds in a step for which the device waits for its host: launching the prepared work, reading.
    head: the costs after the layers, by the rows of a step. For a prompt's chunk it computes at most one row, for an
        answer and for drafts every row.
    draft, draft_more: seconds of a round of drafts for one sequence and for each further one, if this machine is the
        coordinator.
    free_bytes: bytes that a stage may take for weights and KV, when nothing of the model is loaded.
    scores: bytes of unfused attention in a step, for each token of context (``models.caches.attention``).
    disk: bytes a second that it reads from its disk in blocks of an expert's size; 0: not measured.
    launches_ahead: whether its device computes while the host goes on.
    halves: the costs of one rank's part of a layer, by the layer's kind, without its sums; empty if layers cannot be
        divided.
    is_exposed: whether sums with it would cross a network unencrypted although nobody has allowed that.
    across: the names of the two machines, if they are one stage (``placement.pairs``).
    trials: how all of this was measured.
    """

    name: str
    layers: Annotated[Mapping[str, Costs], Field(min_length=1)]
    address: str | None = None
    key: str | None = None
    step: NotNegative = 0.0
    host: NotNegative = 0.0
    head: Costs = Costs()
    draft: NotNegative = 0.0
    draft_more: NotNegative = 0.0
    free_bytes: Bytes = 2**62
    scores: Bytes = 0
    disk: NotNegative = 0.0
    launches_ahead: bool = False
    halves: Mapping[str, Costs] = field(default_factory=dict)
    is_exposed: bool = False
    across: tuple[str, ...] = ()
    trials: Trials = Trials()

    @property
    def ranks(self) -> tuple[str, ...]:
        """The names of the machines in it: its own, or both names of a pair."""
        return self.across or (self.name,)

    def slower(self, factor: float) -> Self:
        """Return the same machine with a device that takes ``factor`` times as long for everything."""
        return replace(
            self,
            layers={kind: costs.scaled(factor) for kind, costs in self.layers.items()},
            halves={kind: costs.scaled(factor) for kind, costs in self.halves.items()},
            head=self.head.scaled(factor),
            step=factor * self.step,
            draft=factor * self.draft,
            draft_more=factor * self.draft_more,
        )


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """One direction of a link: the machines' names, seconds of latency one way, and bytes a second (infinite: too fast
    to measure). ``sums``: seconds of a sum of both machines' hidden states by their rows, or None if not measured.
    ``sums_over``: the backend of the sums."""

    source: str
    target: str
    latency: float
    bytes_per_second: float = math.inf
    sums: Costs | None = None
    sums_over: str = RING


@dataclass(frozen=True, slots=True)
class Profiles:
    """A model, the machines that may run it (the coordinator first), and the links between them.

    Raises:
        ValueError: a machine lacks the costs of a kind of layer.
    """

    model: ModelProfile
    machines: Sequence[MachineProfile]
    links: Sequence[LinkProfile] = ()

    def __post_init__(self) -> None:
        for machine in self.machines:
            if missing := sorted({layer.kind for layer in self.model.layers} - set(machine.layers)):
                raise ValueError(f"machine {machine.name} has no costs of layers of kind {missing[0]!r}")

    def link(self, source: str, target: str) -> LinkProfile | None:
        """Return the link from one machine to another, else the link back with its ends swapped, else None."""
        for a, b in ((source, target), (target, source)):
            for link in self.links:
                if (link.source, link.target) == (a, b):
                    return replace(link, source=source, target=target)
        return None
