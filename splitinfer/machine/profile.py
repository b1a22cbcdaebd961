"""Profiles: what was measured of machines, of the links between them, and of one model. From them layouts are planned.

    ModelProfile      each layer's kind and bytes, and those of embedding, head and draft model
    MachineProfile    seconds of one layer of each kind by the shape of a step, of what comes before and behind the
                      layers, of drafts; the bytes that are free
    LinkProfile       one direction of a link
    Profiles          all of them, with when and by which version they were measured

Layers of one *kind* have the same modules with the same shapes and quantisation, and so the same costs: a model has one
kind or a few (full and sliding attention, dense and experts). Seconds, bytes and bytes a second throughout. A profile
holds for one model and one version of the software; ``as_dict`` has the numbers, so that it can be kept.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from splitinfer.core.scheduler.cost_model import StageCosts
from splitinfer.machine.device_queue import DeviceTraits

VERSION = 1  # of the numbers


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """One layer. ``kind``: layers of one kind cost the same. Bytes: of its weights as loaded, and of its KV for each
    token, for each sequence of any length, and for each stored block (``models.memory.Need``).

    Raises:
        ValueError: a negative number.
    """

    kind: str
    weights: int
    kv_per_token: int = 0
    kv_fixed: int = 0
    kv_stored: int = 0

    def __post_init__(self) -> None:
        _not_negative(self, "weights", "kv_per_token", "kv_fixed", "kv_stored")


@dataclass(frozen=True, slots=True)
class DraftProfile:
    """A drafter. ``weights``, ``kv_per_token``: bytes on the coordinator; zeros for n-grams.

    Raises:
        ValueError: a negative number.
    """

    name: str
    weights: int = 0
    kv_per_token: int = 0

    def __post_init__(self) -> None:
        _not_negative(self, "weights", "kv_per_token")


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """A model.

    name: as a layout names it.
    layers: in their order.
    embedding, head: bytes of what comes before and behind the layers, as loaded; norms count to the head.
    is_tied: whether both are the same weights, so that one stage with both holds them once (``head`` bytes).
    hidden_row: bytes of one row of hidden states on a link.
    context_length: tokens that the model was trained for.
    draft: the drafter, if there is one.
    version: identifies the weights; empty: unknown.

    Raises:
        ValueError: no layer, or a negative number.
    """

    name: str
    layers: tuple[LayerProfile, ...]
    embedding: int = 0
    head: int = 0
    is_tied: bool = False
    hidden_row: int = 0
    context_length: int = 2**20
    draft: DraftProfile | None = None
    version: str = ""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a model has at least one layer")
        _not_negative(self, "embedding", "head", "hidden_row")
        if self.context_length < 1:
            raise ValueError(f"context_length must be 1 or more, but is {self.context_length}")

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.layers)

    def kinds(self, start: int, end: int) -> dict[str, int]:
        """How many layers of each kind are among the layers [start, end)."""
        return dict(Counter(layer.kind for layer in self.layers[start:end]))

    def weights(self, start: int, end: int) -> int:
        """Bytes of the weights of a stage of the layers [start, end), with what comes before and behind them."""
        return sum(layer.weights for layer in self.layers[start:end]) + self.beside_layers(start, end)

    def beside_layers(self, start: int, end: int) -> int:
        """Bytes of what comes before and behind the layers, where a stage of the layers [start, end) has it."""
        is_first, is_last = start == 0, end == self.num_layers
        if is_first and is_last and self.is_tied:
            return max(self.embedding, self.head)
        return is_first * self.embedding + is_last * self.head

    def as_dict(self) -> dict[str, Any]:
        """The profile as plain numbers, for ``from_dict``."""
        return asdict(self)

    @classmethod
    def from_dict(cls, numbers: Mapping[str, Any]) -> Self:
        """The profile that ``as_dict`` returned.

        Raises:
            ValueError: ``numbers`` is no profile of a model.
        """
        with _Refusing("model"):
            draft = numbers.get("draft")
            return cls(**{
                **numbers,
                "layers": tuple(LayerProfile(**layer) for layer in numbers["layers"]),
                "draft": None if draft is None else DraftProfile(**draft),
            })  # fmt: skip


@dataclass(frozen=True, slots=True)
class MachineProfile:
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

    Raises:
        ValueError: a number is out of its range, or no kind of layer was measured.
    """

    name: str
    layers: Mapping[str, StageCosts]
    address: str | None = None
    key: str | None = None
    step: float = 0.0
    embedding: StageCosts = field(default_factory=StageCosts)
    head: StageCosts = field(default_factory=StageCosts)
    host: float = 0.0
    draft: float = 0.0
    draft_more: float = 0.0
    draft_buffers: int = 1
    free_bytes: int = 2**62
    scores: int = 0
    buffers: float = 1.0
    launches_ahead: bool = False
    device: DeviceTraits = DeviceTraits()  # noqa: RUF009 - frozen
    device_name: str = ""
    versions: str = ""
    measured_at: str = ""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError(f"machine {self.name} has the costs of no kind of layer")
        _not_negative(self, "step", "host", "draft", "draft_more", "free_bytes", "scores")
        if self.draft_buffers < 1 or not 0 < self.buffers < math.inf:
            raise ValueError(f"machine {self.name} has numbers of command buffers that no device has")

    def slower(self, factor: float) -> Self:
        """The same machine where everything takes ``factor`` times as long."""
        return replace(
            self,
            layers={kind: costs.scaled(factor) for kind, costs in self.layers.items()},
            embedding=self.embedding.scaled(factor),
            head=self.head.scaled(factor),
            **{name: factor * getattr(self, name) for name in ("step", "host", "draft", "draft_more")},
        )

    def as_dict(self) -> dict[str, Any]:
        """The profile as plain numbers, for ``from_dict``."""
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            "layers": {kind: costs.as_dict() for kind, costs in self.layers.items()},
            "embedding": self.embedding.as_dict(),
            "head": self.head.as_dict(),
            "device": asdict(self.device),
        }

    @classmethod
    def from_dict(cls, numbers: Mapping[str, Any]) -> Self:
        """The profile that ``as_dict`` returned.

        Raises:
            ValueError: ``numbers`` is no profile of a machine.
        """
        with _Refusing("machine"):
            return cls(**{
                **numbers,
                "layers": {kind: StageCosts.from_dict(costs) for kind, costs in numbers["layers"].items()},
                "embedding": StageCosts.from_dict(numbers["embedding"]),
                "head": StageCosts.from_dict(numbers["head"]),
                "device": DeviceTraits(**numbers.get("device", {})),
            })  # fmt: skip


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """One direction of a link: the machines' names, seconds of latency one way, and bytes a second (infinite: too many
    to be measured).

    Raises:
        ValueError: a number is out of its range.
    """

    source: str
    target: str
    latency: float
    bytes_per_second: float = math.inf

    def __post_init__(self) -> None:
        _not_negative(self, "latency")
        if not self.bytes_per_second > 0:
            raise ValueError(f"the link from {self.source} to {self.target} carries no bytes")

    def as_dict(self) -> dict[str, Any]:
        """The profile as plain numbers, for ``from_dict``; an infinite bandwidth is ``None``."""
        bandwidth = None if math.isinf(self.bytes_per_second) else self.bytes_per_second
        return {**asdict(self), "bytes_per_second": bandwidth}

    @classmethod
    def from_dict(cls, numbers: Mapping[str, Any]) -> Self:
        """The profile that ``as_dict`` returned.

        Raises:
            ValueError: ``numbers`` is no profile of a link.
        """
        with _Refusing("link"):
            bandwidth = numbers.get("bytes_per_second")
            return cls(**{**numbers, "bytes_per_second": math.inf if bandwidth is None else bandwidth})


@dataclass(frozen=True, slots=True)
class Profiles:
    """A model, the machines that may run it (the coordinator first), and the links between them.

    Raises:
        ValueError: no machines, two of one name, a kind of layer that a machine was not measured for, or a link of a
            machine that is not there.
    """

    model: ModelProfile
    machines: tuple[MachineProfile, ...]
    links: tuple[LinkProfile, ...] = ()

    def __post_init__(self) -> None:
        names = [machine.name for machine in self.machines]
        if not names or len(set(names)) < len(names):
            raise ValueError("there must be a machine, and each needs its own name")
        for machine in self.machines:
            if missing := sorted({layer.kind for layer in self.model.layers} - set(machine.layers)):
                raise ValueError(f"machine {machine.name} has no costs of layers of kind {missing[0]!r}")
        for link in self.links:
            if unknown := sorted({link.source, link.target} - set(names)):
                raise ValueError(f"there is a link of {unknown[0]!r}, which is none of the machines")

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

    def as_dict(self) -> dict[str, Any]:
        """The profiles as plain numbers, for ``from_dict``."""
        return {
            "version": VERSION,
            "model": self.model.as_dict(),
            "machines": [machine.as_dict() for machine in self.machines],
            "links": [link.as_dict() for link in self.links],
        }

    @classmethod
    def from_dict(cls, numbers: Mapping[str, Any]) -> Self:
        """The profiles that ``as_dict`` returned.

        Raises:
            ValueError: ``numbers`` are no profiles, or of another version.
        """
        with _Refusing("model and its machines"):
            if numbers["version"] != VERSION:
                raise ValueError(f"these profiles are of version {numbers['version']}, not {VERSION}; measure anew")
            return cls(
                ModelProfile.from_dict(numbers["model"]),
                tuple(MachineProfile.from_dict(machine) for machine in numbers["machines"]),
                tuple(LinkProfile.from_dict(link) for link in numbers.get("links", ())),
            )


_PLAIN = (
    "name", "address", "key", "step", "host", "draft", "draft_more", "draft_buffers", "free_bytes", "scores", "buffers",
    "launches_ahead", "device_name", "versions", "measured_at",
)  # fmt: skip


def _not_negative(values: object, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(values, name) < math.inf:
            raise ValueError(f"{name} must not be negative, but is {getattr(values, name)}")


class _Refusing:
    """Turns what is wrong with numbers into one sentence. ``what``: of which they are to be a profile."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, KeyError | TypeError | AttributeError | IndexError):
            raise ValueError(f"this is no profile of a {self._what} ({type(error).__name__}: {error})") from error
