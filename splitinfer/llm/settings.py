"""How a pipeline is run: all options of the library and their defaults."""

from dataclasses import dataclass
from pathlib import Path

from splitinfer.core.serving_options import ServingOptions
from splitinfer.core.speculation.flight import Flight
from splitinfer.kvstore.paths import DEFAULT_CAP
from splitinfer.kvstore.store import Disk

DEFAULT_CONTEXT = 8192  # tokens
NO_DRAFT = "none"


@dataclass(frozen=True, slots=True)
class Settings(ServingOptions):
    """How a pipeline is run. The serving options, from ``policy`` to ``min_dwell``, override the layout's
    (``core.serving_options`` describes each), and can be changed while it runs (``LLM.tune``).

    context: the most tokens of a prompt and its answer together; ``None``: the model's own, at most 8,192,
        because every stage must have room for the KV of one request at that length.
    grows_context: without a ``context``, take what the stages have room for in the end, up to the model's own: more
        than 8,192 or, where one request of that length would be refused, less. `splitinfer serve` does.
    max_waiting: the most requests in the waiting queue; further ones are refused.
    kv_bytes: memory for KV on each stage; ``None``: half of what is free when it is loaded, shared by the stages
        of one machine.
    prefix_cache: cache computed KV, as long as there is memory, for requests that begin with the same tokens.
    micro_batches: groups of requests that decode in turn, always so many; ``None``: one for each stage, or fewer where
        that is faster. One more keeps a step
        waiting at every stage, and reads all weights once more in every round; that pays only where the link and the
        host take longer than a step of few rows.
    kv_dir: the folder for cached KV on this machine's disk, which outlives a restart; ``None``: only in memory. A
        worker on another machine then uses the folder that it was started with.
    kv_dir_bytes: the most bytes in the folder; the least recently used KV is evicted first.
    kv_format: the format of keys and values: "exact", "k8v8" (8 bits, about half of bfloat16's memory) or "k8v4"
        (values in 4 bits, a third); ``None``: the layout's. The tokens depend on the format.
    codec: the codec for hidden states of prompts on every link: "none" (exact), "fp16", "fp8", "int8" or "auto", which
        takes int8 where the link is so slow that it pays; ``None``: the layout's. The tokens depend on the codec.
    float32_head: compute the norm and the head in float32, so that tokens that a half-precision logit cannot tell apart
        are seldom ties; ``None``: the layout's. The tokens depend on it.
    draft: the drafter: a model of the same tokenizer, "ngram" (what followed the same tokens before), both as
        "MODEL+ngram", or "none"; ``None``: the layout's.
    flight: how the drafts of all requests are scheduled (``splitinfer.Flight``); ``None``: the fastest way, measured
        while it runs, or no drafts where they lose.
    connect_timeout: seconds to reach a worker.
    rejoin_timeout: seconds that requests wait for a lost worker to come back, to continue where they were; 0 ends them
        at once.
    trace: a trace file of every step, for ui.perfetto.dev; an existing one is overwritten.
    """

    context: int | None = None
    grows_context: bool = False
    max_waiting: int = 1024
    prefix_cache: bool = True
    kv_bytes: int | None = None
    micro_batches: int | None = None
    kv_dir: Path | str | None = None
    kv_dir_bytes: int = DEFAULT_CAP
    kv_format: str | None = None
    codec: str | None = None
    float32_head: bool | None = None
    draft: str | None = None
    flight: Flight | None = None
    connect_timeout: float = 10.0
    rejoin_timeout: float = 60.0
    trace: Path | None = None

    def context_of(self, model_context: int) -> int:
        """The context length for a model that supports ``model_context`` tokens."""
        return min(model_context, self.context or DEFAULT_CONTEXT)

    def most_context_of(self, model_context: int, draft_context: int | None = None) -> int:
        """The context length where memory is no bound. ``draft_context``: the draft model's own, if there is one."""
        if self.context is not None or not self.grows_context:
            return self.context_of(model_context)
        return min(model_context, draft_context or model_context)

    @property
    def disk(self) -> Disk | None:
        """Where this machine stores KV on disk; ``None``: nowhere."""
        if self.kv_dir is None or not self.prefix_cache:
            return None
        return Disk(Path(self.kv_dir).expanduser().absolute(), self.kv_dir_bytes)
