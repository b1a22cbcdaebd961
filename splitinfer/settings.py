"""All options of the library and their defaults.

Each field's ``Option`` describes it (``core.serving_options``) and becomes an option of the command line.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from splitinfer.core.codecs import NAMES as CODECS
from splitinfer.core.kv.format import NAMES as KV_FORMATS
from splitinfer.core.serving_options import Option, ServingOptions
from splitinfer.core.speculation.flight import Flight
from splitinfer.kvstore.files import DEFAULT_CAP
from splitinfer.places import folder_named

if TYPE_CHECKING:
    from splitinfer.kvstore.store import Disk

DEFAULT_CONTEXT = 8192  # tokens
BILLING = "x-anthropic-billing-header:.*"  # Claude Code's
NO_DRAFT = "none"

_KV = "KV: the cache of keys and values"
_DRAFTS = "Drafts: tokens guessed ahead"
_LINKS = "Links between machines"
_GB = 1e9


@dataclass(frozen=True, slots=True)
class Settings(ServingOptions):
    """The settings of a pipeline. The serving options, from ``policy`` to ``min_dwell``, override the layout's and can
    be changed while it runs (``LLM.tune``). Fields without an ``Option`` are for the library only:

    grows_context: without a ``context``, take the longest context that the stages have room for, up to the model's own:
        more than 8,192 or, if a request of that length would be refused, less. `splitinfer serve` does so.
    models_here: the number of models that share this machine's memory for KV.
    max_waiting: the most requests in the waiting queue; further ones are refused.
    prefix_cache: cache computed KV, while memory lasts, for requests that begin with the same tokens.
    micro_batches: the fixed number of groups of requests that decode in turn; None: one for each stage, or fewer if
        that is faster. One more keeps a step waiting at every stage, and reads all weights once more in every round;
        that pays only if the link and the host take longer than a step of few rows.
    flight: how the drafts of all requests are scheduled (``splitinfer.Flight``); None: the fastest way, measured while
        it runs, or no drafts if they lose.
    kv_dir: the folder for KV on disk; None or "none": KV is only in memory. The command line has a folder by default. A
        worker on another machine uses the folder that it was started with.

    Raises:
        ValueError: a value is out of its range; the text names both.
    """

    context: Annotated[
        int | None,
        Option(
            "The most tokens of a prompt and its answer together. Every stage must have room for the KV of one request "
            "of that length. Default: 8,192 or the model's own; for a server, what memory allows.",
            least=1,
        ),
    ] = None
    grows_context: bool = False
    models_here: int = 1
    max_waiting: int = 1024
    prefix_cache: bool = True
    micro_batches: int | None = None
    draft: Annotated[
        str | None,
        Option(
            "What drafts tokens: a small model of the same tokenizer, an EAGLE-3 or DFlash drafter, 'mtp' (the "
            "checkpoint's own prediction heads), 'ngram' (what followed the same tokens before), any other with "
            "+ngram, or 'none'. NAME+float32 computes a drafter in float32. Default: the layout's.",
            _DRAFTS,
        ),
    ] = None
    flight: Flight | None = None
    pictures: Annotated[
        bool | None,
        Option(
            "Load the part of the model that sees pictures, if it has one. Default: yes, if mlx-vlm is installed here.",
        ),
    ] = None
    picture_dir: Annotated[
        Path | str | None,
        Option(
            "Folder below which clients of the server may name pictures by file:// URLs. Default: none; they send data "
            "URLs. Addresses are never fetched."
        ),
    ] = None
    control_in_texts: Annotated[
        bool,
        Option(
            "Treat control tokens such as <|im_end|> in messages as real tokens. Unsafe for agents that read files or "
            "pages."
        ),
    ] = False
    left_out: Annotated[
        str,
        Option(
            "Lines at the start of the system message to leave out (a regular expression), because they change with "
            "every request and defeat the cache. Default: Claude Code's billing header; '' leaves out none."
        ),
    ] = BILLING
    kv_bytes: Annotated[
        int | None,
        Option(
            "GB for KV on each stage. Default: half of what the weights leave free, shared by the stages of a machine.",
            _KV,
            least=0,
            flag="--kv-gb",
            per=_GB,
        ),
    ] = None
    kv_format: Annotated[
        str | None,
        Option(
            "How keys and values are stored: exact, k8v8 (8 bits, about half of bfloat16's memory) or k8v4 (values in "
            "4 bits, a third). The tokens depend on it. Default: the layout's.",
            _KV,
            choices=KV_FORMATS,
        ),
    ] = None
    kv_dir: Annotated[
        Path | str | None,
        Option(
            "Folder where KV is stored for later runs; 'none' keeps KV in memory only. Default: one in your cache "
            "folder.",
            _KV,
        ),
    ] = None
    kv_dir_bytes: Annotated[
        int,
        Option(
            "GB that this folder may hold; the least recently used goes first.",
            _KV,
            least=0,
            flag="--kv-disk-gb",
            per=_GB,
        ),
    ] = DEFAULT_CAP
    codec: Annotated[
        str | None,
        Option(
            "Codec of prompts' hidden states on every link: none (exact), fp16, fp8 or int8. The tokens depend on it. "
            "Default: the layout's.",
            _LINKS,
            choices=CODECS,
        ),
    ] = None
    connect_timeout: Annotated[float, Option("Seconds to reach a worker.", _LINKS, least=0.1)] = 10.0
    rejoin_timeout: Annotated[
        float,
        Option(
            "Seconds that requests wait for a lost worker to come back, to continue where they were; 0 ends them at "
            "once.",
            _LINKS,
            least=0,
        ),
    ] = 60.0
    leave_after: Annotated[
        float,
        Option(
            "Seconds until the machines that are left take over the layers of a lost worker, if they can hold them, "
            "until it is back; a number of --rejoin-timeout or more: never.",
            _LINKS,
            least=0,
        ),
    ] = 15.0
    insecure_sums: Annotated[
        bool,
        Option(
            "Let the sums of a stage across two machines cross any network, though nothing encrypts them. Default: "
            "only loopback and cables between two machines.",
            _LINKS,
        ),
    ] = False
    float32_head: Annotated[
        bool | None,
        Option(
            "Compute the norm and the head in float32, so that fewer tokens are ties. The tokens depend on it. "
            "Default: as the layout says."
        ),
    ] = None
    experts_gb: Annotated[
        float | None,
        Option(
            "GB of memory for a mixture's experts on each stage; the others are read from disk when a token needs "
            "them. Changes no token. Default: the layout's, or as much as fits beside the KV.",
            least=0,
        ),
    ] = None
    trace: Annotated[
        Path | None,
        Option("Write a timeline of every step to this file, for ui.perfetto.dev; an existing file is overwritten."),
    ] = None

    def __post_init__(self) -> None:
        ServingOptions.__post_init__(self)
        try:
            re.compile(self.left_out)
        except re.error as error:
            raise ValueError(f"left_out is not a regular expression: {error}") from error

    def context_of(self, model_context: int) -> int:
        """Return the context length for a model that supports ``model_context`` tokens."""
        return min(model_context, self.context or DEFAULT_CONTEXT)

    def most_context_of(self, model_context: int, draft_context: int | None = None) -> int:
        """Return the context length if memory is not a limit. ``draft_context``: the draft model's own, or None without
        one."""
        if self.context is not None or not self.grows_context:
            return self.context_of(model_context)
        return min(model_context, draft_context or model_context)

    @property
    def disk(self) -> "Disk | None":
        """Where this machine stores KV on disk, or None to store none."""
        from splitinfer.kvstore.store import Disk

        folder = None if self.kv_dir is None else folder_named(self.kv_dir, "kv_dir")
        return None if folder is None or not self.prefix_cache else Disk(folder, self.kv_dir_bytes)
