"""Which machine holds which layers.

A layout cuts a model's layers into consecutive half-open ranges, one per stage:

    stage      studio (coordinator)            mini
    layers     [0 ........................ 40) [40 .............. 66)
    address    none: it is this process        tcp://mini.local:5577

A stage may be ``across`` two machines, its *ranks*; each holds one half of every layer (tensor parallel). A rank is
always a worker. If the first stage is across two machines, the coordinator holds no layers.

A ``Layout`` is checked when it is made, and no other code checks it again. Only ``Layout.check`` is left, which
compares its number of layers with the model's. ``splitinfer.config`` reads files and refuses unknown keys.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Self

from splitinfer.common.endpoint import Endpoint
from splitinfer.core.codecs import NAMES as CODECS
from splitinfer.core.codecs import NONE
from splitinfer.core.kv.format import EXACT
from splitinfer.core.kv.format import NAMES as KV_FORMATS
from splitinfer.core.link_transport import BACKENDS, JACCL, OVER_TCP, RING, TCP, LinkTransport
from splitinfer.core.serving_options import ServingOptions
from splitinfer.errors import ConfigError, LayoutError

LOCAL = "local"  # the address of a worker that the coordinator starts itself
DTYPES = ("auto", "float32", "float16", "bfloat16")
UNNAMED = "(unnamed)"  # the name of a layout without a file
BY_UP = "(up)"  # the name of a layout whose workers `splitinfer up` has started

RANKS = 2  # of a stage across machines: a sum of two numbers has the same bits on both

_KEY = re.compile(r"[0-9a-f]{64}")
_INPROC = re.compile(r"inproc://[\w.-]+")


def written(address: str, key: str | None = None) -> str:
    """Return a rank as layouts write it: ``address`` (``local`` or ``host:port``), then ``#KEY`` if it has a key."""
    return f"{address}#{key}" if key else address


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One stage and its layers ``[start, end)``.

    address: None for stage 0 (the coordinator), and for a worker still to be found by its name and key
        (``Layout.to_find``). For other workers ``"local"``, an ``Endpoint``, which a layout makes
        ``"tcp://host:port"``, or, in tests, ``"inproc://name"``.
    key: the worker's public key, 64 hexadecimal digits, if the links to it are encrypted.
    codec: how the stage before sends it the hidden states of prompts (``core.codecs``).
    link_transport: the transport of the link from the stage before. The coordinator's own link to a later stage, which
        carries no hidden states, is tcp.
    across: the ranks as ``written`` gives them, if two machines halve the layers; the stage then has no address.
    sums: what adds up the ranks' halves: ``"ring"`` (sockets) or ``"jaccl"`` (Thunderbolt 5's RDMA). Not encrypted.
    sums_device: for ``"jaccl"``, the RDMA devices of rank 0 and rank 1, as ``a:b``.
    experts_gb: GB of memory for routed experts; the others are read from disk. None: as much as fits.
    """

    name: str
    start: int
    end: int
    address: str | None = None
    key: str | None = None
    codec: str = NONE
    link_transport: LinkTransport = OVER_TCP
    across: tuple[str, ...] = ()
    sums: str = RING
    sums_device: str | None = None
    experts_gb: float | None = None

    @property
    def ranks(self) -> tuple["StageSpec", ...]:
        """The stage's workers, as stages with names of their own: ``both/0`` and ``both/1``, or the stage itself if it
        is one worker."""
        if not self.across:
            return (self,)
        parts = (rank.partition("#") for rank in self.across)
        found = (
            dataclasses.replace(self, name=f"{self.name}/{i}", address=address, key=key or None, across=())
            for i, (address, _, key) in enumerate(parts)
        )
        first, *others = found  # the link from the stage before leads to the first
        return (first, *(dataclasses.replace(one, link_transport=OVER_TCP) for one in others))

    @property
    def num_layers(self) -> int:
        return self.end - self.start

    @property
    def is_local(self) -> bool:
        """Whether the coordinator starts this worker itself, on its own machine."""
        return self.address == LOCAL


@dataclass(frozen=True, slots=True)
class Layout:
    """The stages in order, and what they run.

    model, draft: hub ids, folders or built-in names.
    dtype: one of ``DTYPES``.
    name: used in messages; usually the file's name.
    serving: how requests share the stages.
    kv_format: how keys and values are stored (``core.kv.format``).
    float32_head: whether the last norm and the head are computed in float32.

    Raises:
        LayoutError: the stages contradict each other, or a value is not allowed.
    """

    stages: tuple[StageSpec, ...]
    model: str | None = None
    draft: str | None = None
    dtype: str = "auto"
    name: str = UNNAMED
    serving: ServingOptions = field(default_factory=ServingOptions)
    kv_format: str = EXACT
    float32_head: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(_with_whole_address(stage, self.name) for stage in self.stages))
        _check_stages(self.stages, self.name)
        if self.dtype not in DTYPES:
            raise LayoutError(f"dtype {self.dtype!r} of layout {self.name} is unknown; known: {', '.join(DTYPES)}")
        if self.kv_format not in KV_FORMATS:
            raise LayoutError(
                f"kv_format {self.kv_format!r} of layout {self.name} is unknown; known: {', '.join(KV_FORMATS)}"
            )

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def num_layers(self) -> int:
        return self.stages[-1].end

    @property
    def cut(self) -> str:
        """The number of layers of each stage, as in a layout's name: ``40-26``, or ``40-26x2`` if two machines halve
        the last."""
        return "-".join(
            f"{each.num_layers}x{len(each.across)}" if each.across else str(each.num_layers) for each in self.stages
        )

    @property
    def has_own_stage(self) -> bool:
        """Whether the coordinator holds the first stage's layers itself."""
        return not self.stages[0].across

    @property
    def workers(self) -> tuple[StageSpec, ...]:
        """All workers, in the order of the stages. Each rank is a worker."""
        return tuple(rank for stage in self.stages[self.has_own_stage :] for rank in stage.ranks)

    @property
    def here(self) -> tuple[StageSpec, ...]:
        """The stages on the coordinator's machine: its own and local workers."""
        own = self.stages[: self.has_own_stage]
        return (*own, *(worker for worker in self.workers if worker.is_local))

    @property
    def to_find(self) -> tuple[StageSpec, ...]:
        """The workers without an address. They must be found before the layout can be used."""
        return tuple(stage for stage in self.workers if stage.address is None)

    def to_be_found(self) -> Self:
        """Return the same layout without the addresses of workers that have a key."""
        stages = (stage if stage.key is None else dataclasses.replace(stage, address=None) for stage in self.stages)
        return dataclasses.replace(self, stages=tuple(stages))

    def with_found(self, found: Mapping[str, tuple[str, str | None]]) -> Self:
        """Return the same layout with the address and key of each stage in ``found``, which has them by name. Raise
        LayoutError if two stages get the same address."""
        stages = (
            dataclasses.replace(stage, address=found[stage.name][0], key=found[stage.name][1])
            if stage.name in found
            else stage
            for stage in self.stages
        )
        return dataclasses.replace(self, stages=tuple(stages))

    def with_model(self, model: str) -> Self:
        """Return the same layout with ``model`` in place of any model it has."""
        return dataclasses.replace(self, model=model)

    def with_experts(self, experts_gb: float) -> Self:
        """Return the same layout with ``experts_gb`` for the experts of every stage on one machine."""
        stages = (each if each.across else dataclasses.replace(each, experts_gb=experts_gb) for each in self.stages)
        return dataclasses.replace(self, stages=tuple(stages))

    def with_codec(self, codec: str) -> Self:
        """Return the same layout with ``codec`` on every link."""
        first, *others = self.stages
        return dataclasses.replace(self, stages=(first, *(dataclasses.replace(each, codec=codec) for each in others)))

    def check(self, num_layers_of_model: int) -> None:
        """Raise LayoutError if the stages hold more or fewer layers than the model has."""
        if self.num_layers == num_layers_of_model:
            return
        sum_ = " + ".join(str(stage.num_layers) for stage in self.stages)
        terms = f" ({sum_})" if self.num_stages > 1 else ""
        raise LayoutError(
            f"layout {self.name} holds {_layers(self.num_layers)}{terms}, but the model has {num_layers_of_model}"
        )


StagePart = tuple[str, int, str | None] | tuple[str, int, str | None, Mapping[str, Any]]


def lay_out(parts: Iterable[StagePart]) -> tuple[StageSpec, ...]:
    """Return the stages from ``(name, number of layers, address[, further fields of StageSpec])`` in order. Each starts
    where the one before ends."""
    stages: list[StageSpec] = []
    start = 0
    for name, num_layers, address, *more in parts:
        fields = more[0] if more else {}
        stages.append(StageSpec(name, start, start + num_layers, address, **fields))
        start += num_layers
    return tuple(stages)


def _check_stages(stages: Sequence[StageSpec], layout: str) -> None:
    """Raise LayoutError unless every layer is on exactly one stage and every stage has only fields that it may have."""
    if not stages:
        raise LayoutError(f"layout {layout} has no stages; it needs at least one")
    before: StageSpec | None = None
    end, names, address_to_name = 0, set[str](), dict[str, str]()
    for stage in stages:
        if (mistake := next(_mistakes(stage, end, is_first=not names), None)) is not None:
            raise LayoutError(f"stage {stage.name!r} of layout {layout} {mistake}")
        if stage.name in names:
            raise LayoutError(f"two stages of layout {layout} are named {stage.name!r}; each needs its own name")
        if before is not None and shares_port(before, stage):
            raise LayoutError(
                f"the link to stage {stage.name!r} of layout {layout} and the sums of the stage across two machines "
                "beside it would use the same RDMA device, which carries only one of them: give the link `transport: "
                "tcp`, or name two devices (`device`, `sums_device`)"
            )
        names.add(stage.name)
        end, before = stage.end, stage
        for rank in stage.ranks:
            if rank.address is None or rank.is_local:
                continue  # a rank still to be found; or a local one, which is started on a port of its own
            other = address_to_name.setdefault(rank.address.lower(), rank.name)  # host names ignore case
            if other != rank.name:
                raise LayoutError(
                    f"stages {other!r} and {rank.name!r} of layout {layout} are both at {rank.address}; each needs "
                    "its own address"
                )


def _mistakes(stage: StageSpec, end: int, *, is_first: bool) -> Iterator[str]:
    """Yield each mistake of a stage as a phrase that follows its name. ``end``: the end of the stage before."""
    if stage.num_layers < 1:
        yield f"holds {_layers(stage.num_layers)}; it needs at least 1"
    if stage.start != end:
        yield f"starts at layer {stage.start}, but the stage before it ends at {end}"
    if is_first and stage.address is not None:
        yield f"is the first, so it is this machine: delete its address {stage.address!r}"
    if stage.across:
        yield from _mistakes_across(stage)
    elif stage.sums != RING or stage.sums_device is not None:
        yield "has sums, which only a stage across two machines has"
    if stage.experts_gb is not None:
        yield from _mistakes_of_experts(stage.experts_gb, is_across=bool(stage.across))
    is_worker = not is_first or bool(stage.across)
    for one in stage.ranks:
        if one.key is not None and not (is_worker and (one.address or "tcp://").startswith("tcp://")):
            yield "has a key; only a worker at tcp://host:port has one"
        if one.key is not None and not _KEY.fullmatch(one.key):
            yield f"has the key {one.key!r:.20}, but a key has 64 hexadecimal digits, as `splitinfer pair` prints it"
    yield from _mistakes_of_link(stage, is_first=is_first)


def _mistakes_of_experts(experts_gb: float, *, is_across: bool) -> Iterator[str]:
    if not 0 <= experts_gb < inf:
        yield f"has {experts_gb:g} GB for experts; it is a number from 0 on"
    if is_across:
        yield "has experts_gb, but the experts of a stage across two machines are all in memory; delete it"


def _mistakes_of_link(stage: StageSpec, *, is_first: bool) -> Iterator[str]:
    if stage.codec not in CODECS:
        yield f"has the codec {stage.codec!r}, which is unknown; known: {', '.join(CODECS)}"
    if stage.codec != NONE and is_first:
        yield "is the first and has a codec; give it to the stage that the link leads to"
    if stage.link_transport.mistake is not None:
        yield stage.link_transport.mistake
    if stage.link_transport != OVER_TCP and (is_first or _INPROC.fullmatch(stage.address or "")):
        yield "has a transport; only the links to a worker at tcp://host:port or local have one"


def shares_port(before: StageSpec, stage: StageSpec) -> bool:
    """Return whether the link between two stages and the sums of one of them use, or may use, one RDMA device. MLX
    opens a device once (mlx#3245)."""
    link = stage.link_transport
    if link.transport == TCP or link.backend != JACCL:
        return False
    here, _, there = (link.device or "").partition(":")
    ends = [(before, -1, here), (stage, 0, there or here)]
    sums = [((each.sums_device or "").split(":")[rank], device) for each, rank, device in ends if each.sums == JACCL]
    return any(own == device or not own or not device for own, device in sums)


def _mistakes_across(stage: StageSpec) -> Iterator[str]:
    if len(stage.across) != RANKS:
        yield f"is across {len(stage.across)}, not {RANKS} machines; give a third one a stage of its own"
    if stage.address is not None or stage.key is not None:
        yield "is across two machines and has an address or a key of its own; write them under 'across'"
    if stage.ranks[1].is_local and not stage.ranks[0].is_local:
        yield "is across another machine and this one; write local first"
    if stage.sums not in BACKENDS:
        yield f"has the sums {stage.sums!r}, which are unknown; known: {', '.join(BACKENDS)}"
    if stage.sums_device is not None and not (
        stage.sums == JACCL and re.fullmatch(r"\w{1,32}:\w{1,32}", stage.sums_device)
    ):
        yield f"has the sums_device {stage.sums_device!r}: it is two names, such as rdma_en5:rdma_en3, and for jaccl"


def _with_whole_address(stage: StageSpec, layout: str) -> StageSpec:
    """Return the stage with its addresses in the form that transports take."""
    if stage.across:
        wholes = (_with_whole_address(rank, layout) for rank in stage.ranks)
        across = tuple(written(str(whole.address), whole.key) for whole in wholes)
        return stage if across == stage.across else dataclasses.replace(stage, across=across)
    if stage.address is None or stage.is_local or _INPROC.fullmatch(stage.address):
        return stage
    try:
        whole = str(Endpoint.parse(stage.address))
        return stage if whole == stage.address else dataclasses.replace(stage, address=whole)
    except ConfigError as error:
        raise LayoutError(f"address of stage {stage.name!r} of layout {layout}: {error}") from error


def _layers(count: int) -> str:
    return "1 layer" if count == 1 else f"{count} layers"
