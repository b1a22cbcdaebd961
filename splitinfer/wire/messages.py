"""The words on a link, grouped by who receives them.

    coordinator -> worker      Hello, Load, Expect, Connect, Compress, ClockAsk, Echo, MeasureNext, Step
    worker -> coordinator      Welcome, Refuse, Progress, Ready, Connected, ClockTell, Echoed, Measured, Result, Fault
    worker -> next worker      Hello, Echo, Step    (answered by Welcome, Echoed, Refuse or Fault)

A hidden state is not in a message: it is in the frame's parts, and ``Step.tensor`` and ``Step.packing`` say how to
read them. So are the bytes of ``Echo`` and ``Echoed``, which mean nothing. Saying goodbye and being alive belong to the
transport (BYE and heartbeats).
"""

from dataclasses import dataclass

from splitinfer.core.fingerprint import Fingerprint
from splitinfer.core.kv.block_tree import Key
from splitinfer.core.kv.format import format_of
from splitinfer.core.metrics.link_measurement import MOST_BYTES, LinkMeasurement
from splitinfer.core.plan import StageFigures, StepPlan, StepResult, TensorSpec
from splitinfer.core.wire_codec import CODECS, NONE, Packing

PROTOCOL_VERSION = 8


@dataclass(frozen=True, slots=True)
class Versions:
    """What has to be equal on both sides for the same tokens to come out."""

    protocol: int
    splitinfer: str
    mlx: str
    mlx_lm: str

    def difference(self, other: "Versions") -> str | None:
        """The first thing that differs, as words, or ``None``."""
        names = {"protocol": "protocol", "splitinfer": "splitinfer", "mlx": "mlx", "mlx_lm": "mlx-lm"}
        for field, word in names.items():
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine != theirs:
                return f"{word} {mine} here, {word} {theirs} there"
        return None


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message on a link. ``role``: "coordinator", or "upstream" for the stage before."""

    role: str
    name: str
    session: str  # one run of a coordinator; links of another run are refused
    versions: Versions


@dataclass(frozen=True, slots=True)
class Welcome:
    """The worker is free and the versions agree."""

    name: str
    versions: Versions
    device: str  # e.g. "gpu" or "cpu"
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """The worker says no; ``reason`` is a sentence for a person. The link ends."""

    reason: str


@dataclass(frozen=True, slots=True)
class Load:
    """Become stage ``stage``: hold layers [start, end) of ``model``."""

    model: str
    dtype: str  # "auto" or MLX's name; what "auto" means is each machine's own affair
    stage: int
    bounds: tuple[int, ...]  # all stages' cuts: stage i holds [bounds[i], bounds[i + 1])
    fingerprint: Fingerprint
    vocab_size: int  # the tokenizer's: the number of values noise is drawn for
    kv_tokens: int  # tokens of KV to leave room for
    kv_root: Key  # what the keys of KV on disk begin with; empty: none is to be written
    kv_format: str  # how keys and values are stored (``core.kv.format``)
    upstream_key: str  # the key of the stage before, which may bring hidden states; empty: it comes in the open

    def __post_init__(self) -> None:
        format_of(self.kv_format)
        rising = all(a < b for a, b in zip(self.bounds, self.bounds[1:], strict=False))
        if len(self.bounds) < 2 or self.bounds[0] != 0 or not rising or not 0 <= self.stage < len(self.bounds) - 1:
            raise ValueError(f"stage {self.stage} of cuts {self.bounds} does not own every layer once")

    @property
    def start(self) -> int:
        """First own layer."""
        return self.bounds[self.stage]

    @property
    def end(self) -> int:
        """One past the last own layer."""
        return self.bounds[self.stage + 1]

    @property
    def is_last(self) -> bool:
        """Whether this stage has norm, head and sampler."""
        return self.stage == len(self.bounds) - 2


@dataclass(frozen=True, slots=True)
class Progress:
    """How far loading is. ``phase``: "survey", "download" or "load"; bytes. Or "link", and ``text`` is about it."""

    phase: str
    done: int
    total: int
    text: str = ""


@dataclass(frozen=True, slots=True)
class Ready:
    """The stage is loaded."""

    stage: int
    weight_bytes: int
    kv_bytes_per_token: int
    kv_bytes_fixed: int  # per sequence, whatever its length
    kv_bytes_stored: int  # per stored block
    free_bytes: int
    rewind: int | None  # tokens its caches go back; None: any number
    keeps_blocks: bool  # whether its KV can be kept for other sequences
    kept: tuple[Key, ...] | None  # blocks of which its layers are on its disk; None: it keeps none there
    hidden: TensorSpec | None  # one row of the hidden states it takes; None: it is the first
    device: str


@dataclass(frozen=True, slots=True)
class Expect:
    """The stage before, which owns ``upstream_key``, will come, although nothing is to be loaded.

    Not answered: whatever is asked next is answered after it was done.
    """

    upstream_key: str


@dataclass(frozen=True, slots=True)
class Connect:
    """Open the data link to the next stage at ``address``, which owns ``key``; without one, in the open.

    ``fallback``: the address to use where what should carry the link is not to be had; empty: there is none.
    """

    address: str
    key: str
    fallback: str = ""


@dataclass(frozen=True, slots=True)
class Connected:
    """The data link to the next stage stands. ``note``: why it is not carried as was preferred; empty: it is."""

    note: str = ""


@dataclass(frozen=True, slots=True)
class Compress:
    """Send the hidden states of prompts to the next stage by ``codec`` (``core.wire_codec``)."""

    codec: str

    def __post_init__(self) -> None:
        if self.codec not in (NONE, *CODECS):
            raise ValueError(f"codec {self.codec!r:.20} is none of {', '.join((NONE, *CODECS))}")


@dataclass(frozen=True, slots=True)
class ClockAsk:
    """What time is it there?"""


@dataclass(frozen=True, slots=True)
class ClockTell:
    """Seconds on the worker's monotonic clock: when the question had arrived, and when this was said."""

    received: float
    told: float


@dataclass(frozen=True, slots=True)
class Echo:
    """Answer with so many bytes, whatever came with this. For whoever measures the link."""

    reply_bytes: int

    def __post_init__(self) -> None:
        if not 0 <= self.reply_bytes <= MOST_BYTES:
            raise ValueError(f"an echo of {self.reply_bytes} bytes; it may have {MOST_BYTES:,}")


@dataclass(frozen=True, slots=True)
class Echoed:
    """The bytes that were asked for."""


@dataclass(frozen=True, slots=True)
class MeasureNext:
    """How quick is the data link to the next stage?"""


@dataclass(frozen=True, slots=True)
class Measured:
    """That link's figures; ``down`` is towards the next stage."""

    figures: LinkMeasurement


@dataclass(frozen=True, slots=True)
class Step:
    """One micro-batch on its way down the pipeline, with what the stages before report of it.

    ``tensor`` is ``None`` for a plan without slices, which only frees. ``packing``: which of its rows are packed, and
    how; ``None``: none is.
    """

    plan: StepPlan
    tensor: TensorSpec | None
    figures: tuple[StageFigures, ...] = ()
    packing: Packing | None = None

    def __post_init__(self) -> None:
        rows = self.tensor.shape[0] if self.tensor is not None and self.tensor.shape else 0
        if rows != self.plan.num_tokens:
            raise ValueError(f"step {self.plan.step} has {self.plan.num_tokens} tokens and {rows} hidden states")
        if self.packing is not None and self.packing.end > rows:
            raise ValueError(f"step {self.plan.step} has packed rows up to {self.packing.end} of {rows}")


@dataclass(frozen=True, slots=True)
class Result:
    """What the last stage made of a plan."""

    result: StepResult


@dataclass(frozen=True, slots=True)
class Fault:
    """The sender cannot go on; ``reason`` is a sentence for a person. The link ends."""

    reason: str


Message = (
    Hello | Welcome | Refuse | Load | Progress | Ready | Expect | Connect | Connected | Compress
    | ClockAsk | ClockTell | Echo | Echoed | MeasureNext | Measured | Step | Result | Fault
)  # fmt: skip
