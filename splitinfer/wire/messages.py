"""The messages on a link, by sender and receiver.

    coordinator -> worker      Hello, Profile, Probe, Load, Connect, Shown, Plan, Rows
    worker -> coordinator      Welcome, Refuse, Progress, Profiled, Probed, Ready, Connected, Result, Fault
    rank -> coordinator -> rank    Gather, Digest, Meet, Met    (for a stage across two machines)
    coordinator -> worker      Spawn    (answered by Spawned: the port of a new process for a rank)
    worker -> next worker      Hello, Plan, Rows    (answered by Welcome, Refuse or Fault)
    probe of a link            Hello, and then frames that are not messages    (``engine.links.probe``)
    reader of weights          AskManifest, AskRanges    (answered by TellManifest, TellRange or Unavailable)

A loading worker asks its coordinator for weights on the control link. Any other process with an admitted key asks a
worker on a link of its own, in the role "reader".

A message does not contain hidden states: the frame's parts do, and ``Rows.tensor`` and ``Rows.packing`` say how to read
them. The bytes of a manifest and of weights are in parts, too. Goodbyes and heartbeats belong to the transport.
"""

import math
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

from splitinfer.common.fingerprint import Fingerprint
from splitinfer.core.codecs import NAMES, NONE, Packing
from splitinfer.core.kv.block_tree import Key
from splitinfer.core.kv.format import format_of
from splitinfer.core.layout import DTYPES, RANKS
from splitinfer.core.link_transport import BACKENDS
from splitinfer.core.metrics.link_measurement import LinkMeasurement
from splitinfer.core.plan import SampledSlice, StepPlan, TensorSpec

PROTOCOL_VERSION = 23
MOST_RANGES, MOST_RANGE = 512, 2**22  # ranges in one message; bytes of one range
MOST_GATHERED = 2**17  # bytes of both ranks
MOST_NAME, MOST_PATH = 200, 4096  # characters of a worker's name and a model's


@dataclass(frozen=True, slots=True)
class Versions:
    """The versions that must be equal on both sides so that tokens are equal."""

    protocol: int
    splitinfer: str
    mlx: str
    mlx_lm: str

    def difference(self, other: "Versions", mine: str = "here", theirs: str = "there") -> str | None:
        """Describe the first version that differs, or return None. ``mine``, ``theirs``: where each version runs."""
        for name in ("protocol", "splitinfer", "mlx", "mlx-lm"):
            own, others = (getattr(versions, name.replace("-", "_")) for versions in (self, other))
            if own != others:
                return f"{name} {own} {mine}, {name} {others} {theirs}"
        return None


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message on a link. ``role``: "coordinator", "upstream" for the stage before, "probe" for a peer that
    only measures this link, or "reader" for a peer that only takes weights."""

    role: str
    name: str
    session: str  # one run of a coordinator; links of another run are refused
    versions: Versions
    upstream_key: str = ""  # of the stage before, which may connect in this session; empty: its link is not encrypted


@dataclass(frozen=True, slots=True)
class Welcome:
    """The handshake succeeded: the worker is free, and the versions agree."""

    name: str
    versions: Versions
    device: str  # e.g. "gpu" or "cpu"
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """The worker refuses; ``reason`` is a sentence for a person. The link ends."""

    reason: str


@dataclass(frozen=True, slots=True)
class Peer:
    """Another worker of the pipeline, which may have weights. ``key``: empty if links to it are not encrypted."""

    name: str
    address: str
    key: str


@dataclass(frozen=True, slots=True)
class Half:
    """The half of every layer that a rank of a stage across two machines holds, and how the two ranks add up.

    ``own``, ``towards``: the IPv4 addresses of this rank and of the other; empty if the rank must find them out.
    ``insecure``: whether sums over sockets may cross any network.
    """

    rank: int
    sums: str  # "ring" or "jaccl"
    device: str
    own: str
    towards: str
    insecure: bool = False

    def __post_init__(self) -> None:
        if self.rank not in range(RANKS) or self.sums not in BACKENDS:
            raise ValueError(f"rank {self.rank} of {RANKS} adds up by {self.sums!r:.20}")


@dataclass(frozen=True, slots=True)
class Load:
    """Become stage ``stage``: hold layers [start, end) of ``model``."""

    model: Annotated[str, Field(max_length=MOST_PATH)]
    dtype: str  # "auto" or MLX's name; each machine resolves "auto" for itself
    stage: int
    bounds: tuple[int, ...]  # all stages' cuts: stage i holds [bounds[i], bounds[i + 1])
    fingerprint: Fingerprint
    vocab_size: Annotated[int, Field(ge=1)]  # the tokenizer's: the number of values noise is drawn for
    kv_tokens: Annotated[int, Field(ge=1)]  # tokens of KV that must fit in memory
    kv_root: Key  # the root of the keys of KV on disk; empty: no KV is written
    kv_format: str  # how keys and values are stored (``core.kv.format``)
    float32_head: bool  # for the last stage: compute the norm and the head in float32
    max_tokens: int = 0  # of a sequence, if the memory suffices for more than ``kv_tokens``
    peers: tuple[Peer, ...] = ()  # the other workers, to ask for weights that the coordinator lacks
    reader_keys: tuple[str, ...] = ()  # the keys of the peers that may ask this worker for weights
    drafter: str = ""  # trained on the model's hidden states: "mtp", or a model's name; empty: no drafter
    drafter_fingerprint: Fingerprint | None = None  # None: it has no folder of its own
    sees: bool = False  # use the classes of models that see pictures; the first stage has a tower for them
    mlx_vlm: str = ""  # mlx-vlm's version, if the model's classes come from it
    half: Half | None = None  # for a stage across two machines
    drafter_dtype: str = ""  # empty: the same as ``dtype``
    experts_bytes: Annotated[int, Field(ge=0)] | None = None  # memory for routed experts; None: as much as fits

    def __post_init__(self) -> None:
        format_of(self.kv_format)
        rising = all(a < b for a, b in zip(self.bounds, self.bounds[1:], strict=False))
        if len(self.bounds) < 2 or self.bounds[0] != 0 or not rising or not 0 <= self.stage < len(self.bounds) - 1:
            raise ValueError(f"stage {self.stage} of cuts {self.bounds} does not own every layer once")
        for dtype in (self.dtype, self.drafter_dtype or self.dtype):
            if dtype not in DTYPES:
                raise ValueError(f"dtype {dtype!r:.40} is unknown; known: {', '.join(DTYPES)}")

    @property
    def start(self) -> int:
        """The stage's first layer."""
        return self.bounds[self.stage]

    @property
    def end(self) -> int:
        """One past the stage's last layer."""
        return self.bounds[self.stage + 1]

    @property
    def longest(self) -> int:
        """The most tokens of a sequence."""
        return max(self.kv_tokens, self.max_tokens)

    @property
    def layers(self) -> str:
        """The stage's layers, in words."""
        return f"layers {self.start} to {self.end - 1} of {self.model}"

    @property
    def of_drafter(self) -> "Load":
        """The same message for the drafter, which must have a folder of its own."""
        assert self.drafter_fingerprint is not None
        return replace(self, model=self.drafter, fingerprint=self.drafter_fingerprint)

    @property
    def is_of_drafter(self) -> bool:
        """Whether the model is the drafter."""
        return self.model == self.drafter

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage, which has the norm, the head and the sampler."""
        return self.stage == len(self.bounds) - 2

    @property
    def passes_on(self) -> bool:
        """Whether this rank passes its input on unchanged at once; the last rank of a stage answers."""
        return self.half is not None and self.half.rank < RANKS - 1


@dataclass(frozen=True, slots=True)
class Profile:
    """Measure the machine for ``model``, whose configuration and shapes are in the frame's one part
    (``engine.profiling.question``), before anything is loaded.

    ``again``: measure even if the worker has a saved measurement.
    """

    model: str
    dtype: str  # as in ``Load``
    kv_format: str
    again: bool

    def __post_init__(self) -> None:
        format_of(self.kv_format)


@dataclass(frozen=True, slots=True)
class Profiled:
    """The machine's profile, as JSON (``machine.profile.MachineProfile.as_dict``)."""

    profile: str


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of loading, in bytes, or of measuring, in steps. ``phase``: "measure", "survey", "copy", "download",
    "load" or "try"; or "link" for a note about a link."""

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
    kv_bytes_fixed: int  # per sequence, for any length
    kv_bytes_stored: int  # per stored block
    free_bytes: int
    rewind: int | None  # the tokens by which its caches can be rewound; None: any number
    keeps_blocks: bool  # whether its KV can be cached for other sequences
    kept: tuple[Key, ...] | None  # the blocks on its disk; None: it does not store blocks
    hidden: TensorSpec | None  # one row of the hidden states it takes; None: the first stage
    device: str
    sum_seconds: float = 0.0  # of one sum with the other rank


@dataclass(frozen=True, slots=True)
class NextStage:
    """Where the next stage is: at ``address``, with ``key``; without a key, its link is not encrypted.

    ``fallback``: the address to use if the transport of ``address`` is unavailable; empty: no fallback.
    """

    address: str
    key: str
    fallback: str = ""


@dataclass(frozen=True, slots=True)
class Probe:
    """Open a link to the next stage only to measure it, before anything is loaded."""

    following: NextStage


@dataclass(frozen=True, slots=True)
class Probed:
    """The figures of that link; ``down`` is towards the next stage. ``note``: as in ``Connected``."""

    figures: LinkMeasurement
    note: str = ""


@dataclass(frozen=True, slots=True)
class Connect:
    """Open the data link to the next stage, and send it the hidden states of prompts in ``codec``
    (``core.codecs``)."""

    following: NextStage
    codec: str = NONE

    def __post_init__(self) -> None:
        if self.codec not in NAMES:
            raise ValueError(f"codec {self.codec!r:.20} is unknown; known: {', '.join(NAMES)}")


@dataclass(frozen=True, slots=True)
class Connected:
    """The data link to the next stage is open. ``note``: why it lacks the preferred transport; empty if it has it."""

    note: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """One micro-batch on its way down the pipeline. A stage sends it on when it launches the step, so that the next
    one has read it when the rows come.

    ``waits``: ``Rows`` follow, and the step is launched when they are there. Without them it is launched at once.
    """

    plan: StepPlan
    waits: bool = True


@dataclass(frozen=True, slots=True)
class Shown:
    """A picture of the next plan's new sequences, for a first stage across two machines. Its pixels, three bytes each,
    are in the frame's one part. ``size``: its height and width; ``family``: as JSON (``pictures.families``)."""

    size: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]]
    family: Annotated[str, Field(max_length=MOST_PATH)]


@dataclass(frozen=True, slots=True)
class Rows:
    """What a stage has computed of the oldest plan that waits for rows, with the figures of the stages before
    (``wire.steps.packed``).

    ``tensor`` is None on the way to the first stage, and for a plan without slices, which only frees. A row of taps may
    follow each hidden state. ``packing``: which rows are packed, and how; None: no row. ``masked``: the rows that may
    not get every token, as (sequence, row with logits). Their masks stand one after another in the frame's last part,
    with a bit for each token.
    """

    step: int
    tensor: TensorSpec | None
    figures: tuple[bytes, ...] = ()
    packing: Packing | None = None
    masked: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        rows = self.tensor.shape[0] if self.tensor is not None and self.tensor.shape else 0
        if self.packing is not None and self.packing.end > rows:
            raise ValueError(f"step {self.step} has packed rows up to {self.packing.end} of {rows}")


@dataclass(frozen=True, slots=True)
class Result:
    """The last stage's result of a plan, with the figures of each worker's stage (``wire.steps.packed``)."""

    step: int
    sampled: tuple[SampledSlice, ...]
    figures: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start a process that serves this coordinator as the worker ``name``, and end it with this session."""

    name: Annotated[str, Field(min_length=1, max_length=MOST_NAME)]


@dataclass(frozen=True, slots=True)
class Spawned:
    """The process listens on ``port`` of the same host, with the same key."""

    port: int


@dataclass(frozen=True, slots=True)
class Gather:
    """The data that a rank sends to meet the other rank. The reply has the data of both, in the order of ranks."""

    data: Annotated[bytes, Field(max_length=MOST_GATHERED)]


@dataclass(frozen=True, slots=True)
class Meet:
    """Meet the other rank before anything is loaded, and time sums."""

    half: Half


@dataclass(frozen=True, slots=True)
class Met:
    """The seconds of two sums by their bytes: first a small one, then a large one."""

    sums: tuple[tuple[int, float], tuple[int, float]]

    def __post_init__(self) -> None:
        (few, first), (many, second) = self.sums
        if not (0 < few < many and 0 < first <= second < math.inf):
            raise ValueError(f"the times of sums are not valid: {self.sums}")


@dataclass(frozen=True, slots=True)
class Digest:
    """A digest of the tokens that a rank has sampled up to a step; the other rank's must be equal. ``busy``: seconds
    that it has computed since it was loaded."""

    step: int
    digest: int
    busy: Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Fault:
    """The sender cannot go on; ``reason`` is a sentence for a person. The link ends.

    ``no_memory``: its device had too little memory for a step. ``is_ending``: its process ends because its device
    failed. ``lost_rank``: the other rank of its stage went away in a sum.
    """

    reason: str
    no_memory: bool
    is_ending: bool
    lost_rank: bool = False


@dataclass(frozen=True, slots=True)
class AskManifest:
    """Ask for a model's manifest. ``weights``: the digest of its fingerprint; if empty, ``model`` is its name."""

    weights: str
    model: str = ""


@dataclass(frozen=True, slots=True)
class TellManifest:
    """The reply: the frame's part holds the manifest (``weights.manifest``), whose ranges may be asked for now."""


@dataclass(frozen=True, slots=True)
class Range:
    """The bytes [begin, end) of a small file, or of the data part of a file of weights."""

    file: str
    begin: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.begin < self.end <= self.begin + MOST_RANGE:
            raise ValueError(f"bytes {self.begin} to {self.end} of a file; a range has 1 to {MOST_RANGE:,} bytes")

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class AskRanges:
    """Send these ranges, in this order."""

    ranges: Annotated[tuple[Range, ...], Field(min_length=1, max_length=MOST_RANGES)]


@dataclass(frozen=True, slots=True)
class TellRange:
    """One range; the frame's part holds its bytes. ``check``: their checksum (``weights.ranges``)."""

    asked: Range
    check: int


@dataclass(frozen=True, slots=True)
class Unavailable:
    """The requested data is not available here; ``reason`` is a sentence for a person. The link stays."""

    reason: str


Message = (
    Hello | Welcome | Refuse | Profile | Profiled | Probe | Probed | Load | Progress | Ready | Connect | Connected
    | Shown | Plan | Rows | Result | Fault | Gather | Digest | Spawn | Spawned | Meet | Met
    | AskManifest | TellManifest | AskRanges | TellRange | Unavailable
)  # fmt: skip
