"""The library's door: a model on several machines, as one object.

    with splitinfer.LLM("demo.yaml") as llm:
        outs = llm.generate(["Once upon a time", [5, 9, 13]], splitinfer.SamplingParams(max_tokens=64))

Text is tokenized in the caller's thread; everything else happens on the engine's, which is the only one
that touches MLX. Requests may be submitted from any thread.
"""

import hashlib
import itertools
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from splitinfer.config import Layout, find_layout
from splitinfer.core import sequence as core
from splitinfer.core.fingerprint import Fingerprint
from splitinfer.core.kv.block_tree import KEY_BYTES, Key
from splitinfer.core.kv.budget import BLOCK, KVBudget, StageKV
from splitinfer.core.kv.prefix_cache import PrefixCacheConfig
from splitinfer.core.kv.rewind import NEVER, PUT_BACK, UNLIMITED
from splitinfer.core.layout import Layout as PlainLayout
from splitinfer.core.scheduler.config import SchedulerConfig
from splitinfer.core.sequence import SamplingParams
from splitinfer.core.serving_options import MAX_RUNNING, ServingOptions
from splitinfer.core.speculation.flight import Flight
from splitinfer.core.wire_codec import NONE
from splitinfer.engine.coordinator.engine import Engine
from splitinfer.engine.coordinator.pipeline import Pipeline, PipelineConfig
from splitinfer.engine.coordinator.requests import Detokenizing, RequestOutput, RequestState, StreamEvent
from splitinfer.engine.coordinator.trace import Trace
from splitinfer.engine.coordinator.worker_group import Event
from splitinfer.engine.drafts.draft_model import DraftModel
from splitinfer.engine.drafts.drafters import NGRAM, Drafter, NGramDrafter
from splitinfer.engine.versions import own_versions
from splitinfer.errors import ConfigError, LayoutError, ModelError, QueueFull, RequestError
from splitinfer.keyring import Keyring
from splitinfer.kvstore.paths import DEFAULT_CAP
from splitinfer.kvstore.store import Disk
from splitinfer.models.checkpoint import Checkpoint
from splitinfer.models.hub import open_model
from splitinfer.models.loader import count_layers
from splitinfer.text.tokenizer import Tokenizer
from splitinfer.wire.messages import Progress, Ready

Prompt = str | Sequence[int]
Notice = Callable[[str, Progress], None]  # a stage's name (or DRAFT), how far its loading is

DEFAULT_CONTEXT = 8192  # tokens
_GPU_BUDGET, _CPU_BUDGET = 512, 128  # tokens in a step
_KV_SHARE = 0.5  # of the free memory; the rest is for activations, for padding, and for cohorts being made anew
NO_DRAFT = "none"
DRAFT = "draft"  # a notice's name for the draft model, which is no stage
MakeDrafter = Callable[[], Drafter]


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


def _packs(pipeline: Pipeline) -> bool:
    """Whether any link packs hidden states."""
    return any(codec != NONE for codec in pipeline.codecs or ())


def _budget_of(serving_options: ServingOptions, devices: Iterable[str]) -> int:
    """Tokens in one step. Short chunks fill the stages sooner; on a GPU they would leave it idle."""
    return serving_options.token_budget or (_GPU_BUDGET if any(device != "cpu" for device in devices) else _CPU_BUDGET)


class Request:
    """One request under way. Iterate over it, or ask for its ``result``; either, once."""

    def __init__(self, state: RequestState, engine: Engine) -> None:
        self._state, self._engine = state, engine
        self.output = RequestOutput(state.sequence.num_prompt_tokens)
        """What has been read so far."""

    def __iter__(self) -> Iterator[StreamEvent]:
        """Events as tokens arrive; the last one has a ``finish_reason``. Leaving early aborts the request."""
        try:
            while self.output.finish_reason is None:
                event = self._state.events.get()
                self.output.add(event)
                self.output.num_cached_tokens = self._state.sequence.num_cached or 0
                self.output.queue_seconds = self._state.queue_seconds
                yield event
        finally:
            if self.output.finish_reason is None:
                self.abort()

    def result(self) -> RequestOutput:
        """Wait for the end. A request that could not go on has ``finish_reason`` "error" and keeps its tokens."""
        for _ in self:
            pass
        return self.output

    def abort(self) -> None:
        """End it where it is, on all stages; it finishes with "abort"."""
        self._engine.abort(self._state.seq_id)


class _Events(Iterator[StreamEvent]):
    """A request's events; whoever drops it, even unread, aborts the request."""

    def __init__(self, request: Request) -> None:
        self._request, self._events = request, iter(request)

    def __next__(self) -> StreamEvent:
        return next(self._events)

    def close(self) -> None:
        """Abort the request if it has not ended."""
        if self._request.output.finish_reason is None:
            self._request.abort()

    def __del__(self) -> None:
        self.close()


class LLM:
    """A model cut by layers over the stages of a layout, ready for requests.

    Args:
        layout: a Layout, a mapping with a layout's keys, or a path or name of a layout file.
        model: a model for a layout that names none, or another one than it names.
        settings: how it is run.
        notice: called with a stage's name and its progress while loading, from several threads.
        drafter: makes another drafter than the layout's, on the thread that will ask it; for measurements.

    Raises:
        SplitinferError: the layout, the model or a worker cannot be used; one sentence says why.
    """

    def __init__(
        self,
        layout: PlainLayout | Mapping[str, Any] | str | Path,
        *,
        model: str | None = None,
        settings: Settings | None = None,
        notice: Notice | None = None,
        drafter: MakeDrafter | None = None,
    ) -> None:
        self.settings = settings or Settings()
        self.layout = _with_draft(_as_layout(layout, model), self.settings.draft)
        if self.settings.kv_format is not None:
            self.layout = replace(self.layout, kv_format=self.settings.kv_format)
        if self.settings.codec is not None:
            self.layout = self.layout.with_codec(self.settings.codec)
        self.serving_options = self.settings.over(self.layout.serving)
        """The dials in force."""
        self._make_drafter = drafter
        self._trace = None if self.settings.trace is None else Trace(self.settings.trace)
        try:
            self._open(notice or (lambda _name, _progress: None))
        except BaseException:
            self.close()
            raise

    def _open(self, notice: Notice) -> None:
        self._checkpoint = open_model(_model_of(self.layout))
        self.layout.check(count_layers(self._checkpoint))
        self.tokenizer = _tokenizer_of(self._checkpoint)
        _check_draft(self.layout, self.tokenizer)
        self._ids = itertools.count(1)
        self._text_lock = threading.Lock()  # a Hugging Face tokenizer is for one thread at a time
        self._engine = Engine(
            self._build(notice),
            self._configure,
            self.settings.rejoin_timeout,
            self._trace,
            lambda: self._drafter(lambda progress: notice(DRAFT, progress)),
        )
        self._engine.wait_until_ready()

    @property
    def context_length(self) -> int:
        """Tokens a prompt and its answer may have together."""
        return self.settings.context_of(self._checkpoint.context_length)

    @property
    def kv_budget(self) -> KVBudget:
        """The stages' memory for KV."""
        return self._engine.scheduler.config.kv or KVBudget()

    # -- requests ----------------------------------------------------------------------------

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Answer prompts (texts or token ids), one output each, in their order.

        ``params``: one for all, or one for each.

        Raises:
            RequestError: a prompt is empty, too long, or has ids outside the vocabulary.
            SplitinferError: the pipeline has failed before.
        """
        several = _as_prompts(prompts)
        each = _as_params(params, len(several))
        requests: list[Request] = []
        try:
            for prompt, p in zip(several, each, strict=True):
                requests.append(self._submit_when_there_is_room(prompt, p, requests))
            return [request.result() for request in requests]
        except BaseException:  # Ctrl-C, mostly: what nobody will read must not go on
            for request in requests:
                request.abort()
            raise

    def _submit_when_there_is_room(self, prompt: Prompt, params: SamplingParams, before: list[Request]) -> Request:
        """Any number of prompts may be given at once: where the queue is full, the answers before it are waited for."""
        unread = (request for request in before if request.output.finish_reason is None)
        while True:
            try:
                return self.submit(prompt, params)
            except QueueFull:
                earlier = next(unread, None)
                if earlier is None:
                    raise
                earlier.result()

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, session: str | None = None
    ) -> Iterator[StreamEvent]:
        """Answer one prompt, event by event. Closing the iterator aborts the request."""
        return _Events(self.submit(prompt, params, session=session))

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        session: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        flight: Flight | None = None,
    ) -> Request:
        """Hand one prompt in and return at once.

        ``session``: a name under which what the request leaves can be forgotten (``forget``). ``priority``:
        higher goes first where not all can go at once. ``timeout``: seconds after which it is ended with "abort",
        wherever it is; of equal priority, whoever has less time goes first. ``flight``: how its drafts go, if not as
        the settings say.

        Raises:
            RequestError: the prompt is empty, too long, has ids outside the vocabulary, or its KV can never fit.
            QueueFull: as many requests wait as may wait; try again later.
            SplitinferError: the pipeline has failed, or was closed.
        """
        params = params or SamplingParams()
        _check_handling(session, priority, timeout)
        tokens = self.encode(prompt) if isinstance(prompt, str) else [int(t) for t in prompt]
        self._check_prompt(tokens)
        sequence = core.Sequence(
            seq_id=next(self._ids),
            tokens=tokens,
            params=params,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            end_tokens=self._end_tokens(params),
            session=session,
            priority=priority,
            deadline=None if timeout is None else time.monotonic() + timeout,
            flight=flight or self.settings.flight,
        )
        state = RequestState(sequence, self._detokenizer(), time.monotonic)
        self._engine.submit(state)
        return Request(state, self._engine)

    def encode(self, text: str) -> list[int]:
        """Text as token ids.

        Raises:
            ModelError: the model's folder has no tokenizer, so only token ids can be given.
        """
        with self._text_lock:
            return self._need_tokenizer().encode(text)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """A conversation as the model's chat template writes it, up to the assistant's next words.

        Each message has ``role`` and ``content``; an answer may have its ``token_ids``, so that what was generated
        needs not be computed again if the tokenizer would cut its text in another way.
        """
        with self._text_lock:
            return self._need_tokenizer().encode_chat(messages)

    def forget(self, session: str) -> None:
        """Free what a session keeps."""
        self._engine.drop_session(session)

    def tune(self, **serving_options: Any) -> None:
        """Turn dials of serving (``Settings``) while requests are under way: from the next step on, and with no token
        changed. ``None`` puts one back to its default.

        Raises:
            ConfigError: there is no such dial, or the value is out of its range.
        """
        known = [each.name for each in fields(ServingOptions)]
        unknown = next((name for name in serving_options if name not in known), None)
        if unknown is not None:
            raise ConfigError(f"there is no dial {unknown!r}; there are {', '.join(known)}")
        try:
            turned = replace(self.serving_options, **serving_options)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{error}") from error
        budget = _budget_of(turned, (ready.device for ready in self._engine.pipeline.ready))
        self._engine.tune(turned.policy_config, budget, turned.max_running or MAX_RUNNING)
        self.serving_options = turned

    def stats(self, *, reset: bool = False) -> dict[str, Any]:
        """Counters and per-stage figures, as a plain dictionary; ``docs/metrics.md`` explains each.

        ``reset``: what is under "window" begins anew after this; the counters never do.
        """
        return self._engine.stats(reset=reset)

    # -- ending ------------------------------------------------------------------------------

    def close(self) -> None:
        """End all requests and all stages; local workers are gone afterwards. At most about 2 seconds."""
        if hasattr(self, "_engine"):
            self._engine.close(timeout=1.0)
        if self._trace is not None:
            self._trace.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    # -- inside ------------------------------------------------------------------------------

    def _build(self, notice: Notice) -> Callable[[Callable[[Event], None]], Pipeline]:
        order = PipelineConfig(
            layout=self.layout,
            model=_absolute(_model_of(self.layout)),
            fingerprint=self._fingerprint,
            vocab_size=self._vocab_size(),
            kv_tokens=self.context_length,
            connect_timeout=self.settings.connect_timeout,
            disk=self.settings.disk,
            keys=Keyring() if any(spec.key for spec in self.layout.stages) else None,
            kv_root=self._kv_root if self.settings.disk is not None else b"",
        )
        names = [spec.name for spec in self.layout.stages]
        return lambda put: Pipeline(order, put, lambda stage, progress: notice(names[stage], progress))

    def _configure(self, pipeline: Pipeline) -> SchedulerConfig:
        stages, settings = pipeline.num_stages, self.settings
        groups = settings.micro_batches or stages
        return SchedulerConfig(
            num_groups=groups,
            max_in_flight=max(stages + 1, groups),
            token_budget=_budget_of(self.serving_options, (ready.device for ready in pipeline.ready)),
            max_running=self.serving_options.max_running or MAX_RUNNING,
            max_len=self.context_length,
            max_waiting=settings.max_waiting,
            kv=KVBudget(tuple(self._stage_kv(ready, pipeline) for ready in pipeline.ready)),
            blocks=PrefixCacheConfig(
                keeps_blocks=settings.prefix_cache and all(ready.keeps_blocks for ready in pipeline.ready),
                whole_blocks=pipeline.rewind is not UNLIMITED and pipeline.rewind <= PUT_BACK,
                prompts_only=_packs(pipeline),
                root=self._root_of(pipeline),
                on_disk=pipeline.is_on_disk,
                kept=pipeline.kept(),
            ),
            speculates=self._speculates(pipeline),
            num_stages=stages,
            rewind=pipeline.rewind,
            policy_config=self.serving_options.policy_config,
        )

    def _drafter(self, report: Callable[[Progress], None]) -> Drafter | None:
        """The layout's drafter, in memory; on the engine's thread."""
        name = self.layout.draft
        if self._make_drafter is not None:
            return self._make_drafter()
        if name is None:
            return None
        if name == NGRAM:
            return NGramDrafter()
        checkpoint, vocab_size = open_model(name), self._vocab_size()
        return DraftModel.load(name, checkpoint, self.layout.dtype, vocab_size, self.context_length, report)

    def _speculates(self, pipeline: Pipeline) -> bool:
        if self.layout.draft is None and self._make_drafter is None:
            return False
        # Where blocks of KV can be gone on from, states can be put back: that was tried when the stages were loaded.
        keeps_states = all(ready.keeps_blocks for ready in pipeline.ready)
        if pipeline.rewind == NEVER or (pipeline.rewind == PUT_BACK and not keeps_states):
            raise ModelError(
                f"draft {self.layout.draft} cannot be used with {self.layout.model}: its layers keep a state that "
                "cannot go back to where a draft was wrong; leave the draft out (--draft none)"
            )
        return True

    @cached_property
    def _fingerprint(self) -> Fingerprint:
        """What identifies the weights; taken once, because files are read for it."""
        return self._checkpoint.fingerprint()

    @cached_property
    def _kv_root(self) -> Key:
        """What the keys of blocks begin with: everything that all stages' KV depends on. What only depends on one
        stage's machine is in the name of its group of files."""
        v = own_versions()
        said = (
            self._fingerprint.digest(),
            self.layout.dtype,
            self.layout.kv_format,
            BLOCK,
            v.splitinfer,
            v.mlx,
            v.mlx_lm,
        )
        return hashlib.blake2b(repr(said).encode(), digest_size=KEY_BYTES).digest()

    def _root_of(self, pipeline: Pipeline) -> Key:
        """The same with what the links do to hidden states: blocks on disk that came by another codec stay there, and
        are not seen."""
        if not _packs(pipeline):
            return self._kv_root
        return hashlib.blake2b(self._kv_root + repr(pipeline.codecs).encode(), digest_size=KEY_BYTES).digest()

    def _stage_kv(self, ready: Ready, pipeline: Pipeline) -> StageKV:
        """A stage's memory for KV, by default a share of what is free where it runs."""
        here = [i for i, spec in enumerate(pipeline.layout.stages) if i == 0 or spec.is_local]
        sharing = len(here) if ready.stage in here else 1
        budget = self.settings.kv_bytes
        if budget is None:
            budget = int(ready.free_bytes * _KV_SHARE / sharing)
        return StageKV(budget, ready.kv_bytes_per_token, ready.kv_bytes_fixed, ready.kv_bytes_stored)

    def _vocab_size(self) -> int:
        return self.tokenizer.vocab_size if self.tokenizer is not None else self._num_embeddings()

    def _num_embeddings(self) -> int:
        return self._checkpoint.vocab_size or 2**31 - 1

    def _check_prompt(self, tokens: list[int]) -> None:
        if not tokens:
            raise RequestError("the prompt is empty; give at least one token")
        if len(tokens) >= self.context_length:
            raise RequestError(
                f"the prompt has {len(tokens):,} tokens, but the context is {self.context_length:,}, "
                f"the answer's first token included; the model has {self._checkpoint.context_length:,} (see --context)"
            )
        size = self._num_embeddings()
        bad = next((t for t in tokens if not 0 <= t < size), None)
        if bad is not None:
            raise RequestError(f"token id {bad} is not in the model's vocabulary of {size:,}")

    def _end_tokens(self, params: SamplingParams) -> frozenset[int]:
        stops = frozenset(params.stop_token_ids)
        if params.ignore_eos:
            return stops
        return stops | (self.tokenizer.eos_token_ids if self.tokenizer is not None else self._eos_of_config())

    def _eos_of_config(self) -> frozenset[int]:
        eos = self._checkpoint.config.get("eos_token_id")
        return frozenset() if eos is None else frozenset([eos] if isinstance(eos, int) else eos)

    def _detokenizer(self) -> Detokenizing | None:
        if self.tokenizer is None:
            return None
        return _Locked(self.tokenizer.detokenizer(), self._text_lock)

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ModelError(f"{self._checkpoint.folder} holds no tokenizer, so prompts must be token ids")
        return self.tokenizer


def _check_handling(session: str | None, priority: int, timeout: float | None) -> None:
    """Refuse here what would fail in the engine's thread, and everybody with it."""
    if session is not None and not isinstance(session, str):
        raise RequestError(f"session must be a string, not {session!r}")
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise RequestError(f"priority must be a whole number, not {priority!r}")
    if timeout is not None and not (isinstance(timeout, int | float) and math.isfinite(timeout) and timeout > 0):
        raise RequestError(f"timeout must be seconds over 0, not {timeout!r}")


class _Locked:
    """A detokenizer that shares its tokenizer with other threads."""

    def __init__(self, inner: Detokenizing, lock: threading.Lock) -> None:
        self._inner, self._lock = inner, lock

    def add(self, token_id: int) -> str:
        with self._lock:
            return self._inner.add(token_id)

    def flush(self) -> str:
        with self._lock:
            return self._inner.flush()


def _as_layout(layout: PlainLayout | Mapping[str, Any] | str | Path, model: str | None) -> PlainLayout:
    if isinstance(layout, str | Path):
        layout = find_layout(str(layout))
    elif isinstance(layout, Mapping):
        layout = Layout.from_dict(layout)
    return layout if model is None else layout.with_model(model)


def _model_of(layout: PlainLayout) -> str:
    if layout.model is None:
        raise LayoutError(f"layout {layout.name} names no model; say which with --model (or LLM(..., model=...))")
    return layout.model


def _absolute(model: str) -> str:
    """A local folder's full path, because workers on this machine may run elsewhere; other names as they are."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.is_dir() else model


def _tokenizer_of(checkpoint: Checkpoint) -> Tokenizer | None:
    """The model's tokenizer; ``None`` where the folder has none, which leaves token ids."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if not any((checkpoint.folder / name).exists() for name in names):
        return None
    return Tokenizer.from_folder(checkpoint.folder, checkpoint.config.get("eos_token_id"))


def _with_draft(layout: PlainLayout, draft: str | None) -> PlainLayout:
    return layout if draft is None else replace(layout, draft=None if draft == NO_DRAFT else draft)


def _check_draft(layout: PlainLayout, tokenizer: Tokenizer | None) -> None:
    if layout.draft is None or layout.draft == NGRAM:
        return
    draft = open_model(layout.draft)
    own = _tokenizer_of(draft)
    if own is None or tokenizer is None or own.vocabulary_hash != tokenizer.vocabulary_hash:
        sizes = (
            f"{own.vocab_size if own else 'no'} tokens, not the model's {tokenizer.vocab_size if tokenizer else 'none'}"
        )
        raise LayoutError(
            f"draft {layout.draft} has another vocabulary than {layout.model} ({sizes}); choose one of its family"
        )


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if len(prompts) and all(isinstance(p, int) for p in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"{count} prompts came with {len(params)} sampling parameters")
    return list(params)
