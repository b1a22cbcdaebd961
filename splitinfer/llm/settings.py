"""How a pipeline is run, in one frozen value; every default of the library in one place."""

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
    """How a pipeline is run; every default in one place. The dials of serving, from ``policy`` to ``min_dwell``, go
    before the layout's (``core.serving_options`` says what each does), and can be turned later, too (``LLM.tune``).

    context: tokens a prompt and its answer may have together; ``None``: the model's own, at most 8,192,
        because every stage must have room for the KV of one request at that length.
    max_waiting: requests that may wait; one more is refused.
    kv_bytes: memory for KV on each stage; ``None``: half of what is free when it is loaded, shared by the stages
        of one machine.
    prefix_cache: keep the KV of what was computed, as long as there is memory, for requests that begin with the same
        tokens.
    micro_batches: groups of requests that decode in turn; ``None``: one for each stage. One more keeps a step
        waiting in front of every stage, and reads all weights once more in every round; that pays only where the
        link and the host take longer than a step of few rows.
    kv_dir: a folder where what was computed is kept on disk, too, on each machine in its own place, so that it is
        there after a restart; ``None``: only in memory. A worker on another machine uses the folder it was started
        with, if this is set.
    kv_dir_bytes: what the folder may hold at most; the least recently used goes first.
    kv_format: how keys and values are stored: "exact", "k8v8" (8 bits, about half of bfloat16's memory) or "k8v4"
        (values in 4 bits, a third); ``None``: the layout's. Tokens are then those of the format.
    codec: how the hidden states of prompts cross every link: "none" (exactly), "fp16", "fp8", "int8" or "auto", which
        takes int8 where the link is so slow that it pays; ``None``: the layout's. Tokens are then those of the codec.
    draft: who guesses tokens ahead: a model of the same tokenizer, "ngram" (what followed the same tokens before),
        or "none"; ``None``: the layout's.
    flight: how the drafts of all requests go (``splitinfer.Flight``); ``None``: whatever is fastest, measured as it
        runs, and none where they lose.
    connect_timeout: seconds to reach a worker.
    rejoin_timeout: seconds that requests wait for a lost worker to come back, to go on where they were;
        0 ends them at once.
    trace: a file that every step is drawn in, for ui.perfetto.dev; it is written anew.
    """

    context: int | None = None
    max_waiting: int = 1024
    prefix_cache: bool = True
    kv_bytes: int | None = None
    micro_batches: int | None = None
    kv_dir: Path | str | None = None
    kv_dir_bytes: int = DEFAULT_CAP
    kv_format: str | None = None
    codec: str | None = None
    draft: str | None = None
    flight: Flight | None = None
    connect_timeout: float = 10.0
    rejoin_timeout: float = 60.0
    trace: Path | None = None

    def context_of(self, model_context: int) -> int:
        """The context for a model made for ``model_context`` tokens."""
        return min(model_context, self.context or DEFAULT_CONTEXT)

    @property
    def disk(self) -> Disk | None:
        """Where this machine keeps KV on disk."""
        if self.kv_dir is None or not self.prefix_cache:
            return None
        return Disk(Path(self.kv_dir).expanduser().absolute(), self.kv_dir_bytes)
