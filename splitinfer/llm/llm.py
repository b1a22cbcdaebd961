"""The library's entry point: a model on several machines, as one object.

    with splitinfer.LLM("demo.yaml") as llm:
        outs = llm.generate(["Once upon a time", [5, 9, 13]], splitinfer.SamplingParams(max_tokens=64))

Text is tokenized in the caller's thread; everything else happens on the engine's, which is the only one that uses MLX.
Requests may be submitted from any thread.
"""

import asyncio
import atexit
import hashlib
import itertools
import logging
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from splitinfer.core import sequence as core
from splitinfer.core.grammar import Grammar
from splitinfer.core.kv.budget import KVBudget
from splitinfer.core.kv.rewind import UNLIMITED, WITHIN_DRAFTS
from splitinfer.core.layout import Layout as PlainLayout
from splitinfer.core.metrics.histogram import Histogram
from splitinfer.core.sampling_defaults import Recommended
from splitinfer.core.scheduler.retry_after import seconds_until_room
from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.core.sequence import SamplingParams
from splitinfer.core.serving_options import MAX_RUNNING, ServingOptions
from splitinfer.core.speculation.flight import Flight
from splitinfer.discovery.discover import find_stages
from splitinfer.engine.figures.figures import StepWatch
from splitinfer.engine.figures.health import PipelineHealth
from splitinfer.engine.figures.trace import Trace
from splitinfer.engine.fleet.local_workers import end_early, start_early
from splitinfer.engine.loop.engine import Engine
from splitinfer.engine.loop.requests import RequestOutput, RequestState, StreamEvent
from splitinfer.engine.versions import own_versions
from splitinfer.errors import ConfigError, QueueFull, RequestError
from splitinfer.llm.answer_parts import Apart
from splitinfer.llm.automatic import choose_layout
from splitinfer.llm.forms import AnswerForms
from splitinfer.llm.prompts import Prompts
from splitinfer.llm.rebalance import TAKEN_BACK, Followed, Rebalance, live_figures, rebalance
from splitinfer.llm.request import (
    AsyncRequest,
    Handling,
    Prompt,
    Request,
    RequestEvents,
    as_params,
    as_prompts,
    waker,
)
from splitinfer.llm.seeing import PictureSource, Seeing, SeenPrompt
from splitinfer.llm.setup import (
    DRAFT,
    MakeDrafter,
    Notice,
    PipelineSetup,
    as_layout,
    check_draft,
    check_ranks,
    model_of,
    token_budget_of,
    with_layers,
    with_settings,
)
from splitinfer.llm.without import Without
from splitinfer.machine.profile import Profiles
from splitinfer.models.folder.checkpoint import read_recommended
from splitinfer.models.folder.hub import open_model
from splitinfer.models.load.loader import count_layers
from splitinfer.placement.asked import Aim
from splitinfer.settings import Settings
from splitinfer.text.answer import AnswerParser, Tool
from splitinfer.text.tokenizer import Tokenizer
from splitinfer.wire.messages import Progress

log = logging.getLogger(__name__)

_BEHIND = 16  # tokens of a prompt that decide how the first one behind them is written


class LLM:
    """A model cut by layers over the stages of a layout, ready for requests.

    Args:
        layout: a Layout, a mapping with a layout's keys, or a path or name of a layout file; ``None``: planned from
            what this machine and the ``workers`` are measured to do (``explanation`` says what was chosen).
        model: the model's folder or hub name, in place of the one that the layout names.
        workers: without a layout, those that may get layers: addresses, ``[NAME=]ADDRESS[#KEY]``, or mappings with the
            keys ``address``, ``name`` and ``key``.
        aim: what a planned layout is for.
        settings: how it is run.
        notice: called with a stage's name and its progress while loading, from several threads.
        drafter: makes another drafter than the layout's, on the engine's thread; for measurements.
        profiles: what the machines of a layout were measured to do, for ``plan``.

    Raises:
        SplitinferError: the layout, the model or a worker cannot be used; the text says why in one sentence.
    """

    def __init__(
        self,
        layout: PlainLayout | Mapping[str, Any] | str | Path | None = None,
        *,
        model: str | None = None,
        workers: Sequence[str | Mapping[str, Any]] = (),
        aim: Aim = Aim.CHAT,
        settings: Settings | None = None,
        notice: Notice | None = None,
        drafter: MakeDrafter | None = None,
        profiles: Profiles | None = None,
    ) -> None:
        self._profiles = profiles
        self.settings = settings or Settings()
        notice = notice or (lambda _name, _progress: None)
        self.explanation = ""
        """Of a layout that was planned, what was chosen and why."""
        if layout is None:
            layout = self._planned(model, workers, notice, aim)
        elif workers:
            raise ConfigError("give a layout or workers, not both: a layout names its workers")
        self._layout = with_settings(as_layout(layout, model), self.settings)
        self.serving_options = self.settings.over(self.layout.serving)
        """The serving options in force."""
        self._followed: Followed | None = None
        self._recutting = threading.Lock()  # of several callers each begins with the cut that the one before has left
        self._make_drafter = drafter
        self._trace = None if self.settings.trace is None else Trace(self.settings.trace)
        atexit.register(self.close)  # for programs that forget to: MLX ends a process whose other threads compute
        try:
            self._open(notice)
        except BaseException:
            self.close()
            end_early(self.layout)
            raise

    def _planned(
        self, model: str | None, workers: Sequence[str | Mapping[str, Any]], notice: Notice, aim: Aim
    ) -> PlainLayout:
        if model is None:
            raise ConfigError("give a layout, or a model and its workers")
        chosen = choose_layout(model, workers, self.settings, notice, aim=aim)
        self.explanation, self._profiles = chosen.text, chosen.profiles
        return chosen.layout

    def _open(self, notice: Notice) -> None:
        self._checkpoint = open_model(model_of(self.layout))
        self.layout.check(count_layers(self._checkpoint))
        check_ranks(self.layout, self._checkpoint, self.settings.pictures)
        start_early(self.layout, self.settings.disk)  # while the tokenizer's packages are imported
        self._prompts = Prompts(self._checkpoint, control_in_texts=self.settings.control_in_texts)
        self._forms = AnswerForms(self._prompts)
        check_draft(self.layout, self._prompts.tokenizer)
        by_key = frozenset(stage.name for stage in self.layout.to_find)
        self._layout = find_stages(self.layout, notice=lambda name, text: notice(name, Progress("link", 0, 0, text)))
        self._ids = itertools.count(1)
        if (self.settings.context or 0) > self._checkpoint.context_length:
            most, asked = f"{self._checkpoint.context_length:,}", f"{self.settings.context:,}"
            log.warning("the model's context is %s tokens; %s were asked for", most, asked)
        setup = PipelineSetup(
            self.layout,
            self.settings,
            self.serving_options,
            self._checkpoint,
            self._prompts.vocab_size,
            self.settings.context_of(self._checkpoint.context_length),
            self._make_drafter,
            by_key,
        )
        folder = None if self.settings.picture_dir is None else Path(self.settings.picture_dir)
        self.seeing = Seeing(self._checkpoint, self._prompts.tokenizer, can_see=setup.sees, folder=folder)
        """What reads pictures for prompts."""
        self._weights, self._versions = setup.fingerprint.digest(), own_versions()  # once: both read files
        models_here = self.settings.models_here
        without = Without(self._checkpoint, self._layout, setup.context_length, self._profiles, models_here)
        self._engine = Engine(
            setup.pipeline,
            notice,
            setup.scheduler_config,
            self.settings.rejoin_timeout,
            self._trace,
            lambda: setup.drafter(lambda progress: notice(DRAFT, progress)),
            without if self.settings.leave_after < self.settings.rejoin_timeout else None,
            self.settings.leave_after,
        )
        self._engine.wait_until_ready()

    @property
    def layout(self) -> PlainLayout:
        """Which machine holds which layers now."""
        engine = getattr(self, "_engine", None)
        return self._layout if engine is None else engine.layout

    @property
    def tokenizer(self) -> Tokenizer:
        """What makes tokens of texts (``encode``) and of chats (``encode_chat``), and texts of tokens (``decode``).

        Raises:
            ModelError: the model's folder has none (``has_tokenizer``), so prompts must be token ids.
        """
        return self._prompts.needed

    @property
    def has_tokenizer(self) -> bool:
        return self._prompts.tokenizer is not None

    @property
    def context_length(self) -> int:
        """The most tokens of a prompt and its answer together."""
        return self._engine.scheduler.config.max_len

    @property
    def max_running(self) -> int:
        """The most requests that share the stages at a time, by the serving options in force."""
        return self.serving_options.max_running or MAX_RUNNING

    @property
    def token_budget(self) -> int:
        """The most tokens in a step, by the serving options in force and the stages' devices."""
        return token_budget_of(self.serving_options, (ready.device for ready in self._engine.pipeline.ready))

    @property
    def model_context_length(self) -> int:
        """The model's own bound of it."""
        return self._checkpoint.context_length

    @property
    def fingerprint(self) -> str:
        """A digest of what a seed's tokens depend on: the weights, the versions, and how layers and numbers are cut.
        ``recut`` changes it."""
        layout = self.layout
        cuts = [(stage.start, stage.end) for stage in layout.stages]
        inputs = (self._weights, layout.dtype, layout.kv_format, cuts, self._versions)
        return hashlib.blake2b(repr(inputs).encode(), digest_size=6).hexdigest()

    @cached_property
    def recommended_sampling(self) -> Recommended:
        """The sampling values that the model recommends in its ``generation_config.json``, if any. Values that cannot
        be used are left out, and a warning is logged on the first access."""
        return read_recommended(self._checkpoint.folder)

    @property
    def default_sampling(self) -> SamplingParams:
        """``SamplingParams()`` with the values that the model recommends in place of the library's. Requests do not use
        it by default: without parameters they are greedy, and so repeatable."""
        return self.recommended_sampling.params

    @property
    def kv_budget(self) -> KVBudget:
        """The memory for KV on each stage."""
        return self._engine.scheduler.config.kv or KVBudget()

    def call_grammar(self, tools: Sequence[Tool], *, must: bool = True, form: Grammar | None = None) -> Grammar:
        """Return the form of an answer that calls one of some functions, in the model's own syntax. ``tools``: as in
        OpenAI's API. ``must``: false admits any text, in which calls of ``strict`` functions have their schemas.
        ``form``: with ``must`` false, a JSON schema for answers that call nothing.

        Raises:
            RequestError: the model's syntax is not known, or a function's parameters cannot be enforced in it.
        """
        return self._forms.call_grammar(tools, must=must, form=form)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        grammar: Any = None,
        pictures: Sequence[Sequence[PictureSource]] = (),
        tools: Sequence[Tool] = (),
        raw: bool = False,
    ) -> list[RequestOutput]:
        """Answer prompts (texts or token ids); return one output for each, in their order.

        ``params``: one for all, or one for each. ``grammar``: the form of all answers, as in ``SamplingParams``.
        ``pictures``: those of each prompt, as ``submit`` takes them. ``tools``, ``raw``: of all, as of ``submit``.

        Raises:
            RequestError: a prompt is empty, too long, or has ids outside the vocabulary.
            SplitinferError: the pipeline has failed, or was closed.
        """
        all_prompts = as_prompts(prompts)
        all_params = as_params(params, len(all_prompts))
        if grammar is not None:
            all_params = [replace(one, grammar=grammar) for one in all_params]
        if pictures and len(pictures) != len(all_prompts):
            raise RequestError(f"{len(all_prompts)} prompts came with pictures for {len(pictures)}")
        requests: list[Request] = []
        try:
            for prompt, p, seen in zip(all_prompts, all_params, pictures or [()] * len(all_prompts), strict=True):
                how: Any = {"pictures": seen, "tools": tools, "raw": raw}
                requests.append(self._submit_when_there_is_room(prompt, p, requests, how))
            return [request.result() for request in requests]
        except BaseException:  # mostly KeyboardInterrupt: requests that will not be read must end
            for request in requests:
                request.abort()
            raise

    def _submit_when_there_is_room(
        self, prompt: Prompt, params: SamplingParams, before: list[Request], how: Mapping[str, Any]
    ) -> Request:
        """Submit a prompt; while the queue is full, wait for the answers ``before`` it."""
        unread = (request for request in before if request.output.finish_reason is None)
        while True:
            try:
                return self.submit(prompt, params, **how)
            except QueueFull:
                earlier = next(unread, None)
                if earlier is None:
                    raise
                earlier.result()

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **how: Any) -> Iterator[StreamEvent]:
        """Answer one prompt; yield its events as tokens arrive. Closing the iterator aborts the request. ``how``: as of
        ``submit``."""
        return RequestEvents(self.submit(prompt, params, **how))

    def submit(
        self,
        prompt: Prompt | SeenPrompt,
        params: SamplingParams | None = None,
        *,
        session: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        flight: Flight | None = None,
        pictures: Sequence[PictureSource] = (),
        tools: Sequence[Tool] = (),
        raw: bool = False,
    ) -> Request:
        """Submit one prompt and return at once.

        ``tools``: those that the answer may call, as in OpenAI's API; without tools, calls are text. ``raw``: the text
        is all that the model writes, its reasoning and the marks around it included; else the answer is told apart.
        ``pictures``: bytes or paths of pictures, one for each of the prompt's placeholders, in their order.
        ``session``: a name by which the KV that the request leaves in the cache can be freed (``forget``).
        ``priority``: requests with a higher one are admitted first, and preempted last. ``timeout``: seconds after
        which the request is aborted; of equal priority, the one with less time left goes first. ``flight``: how its
        drafts are scheduled, in place of the settings' way.

        Raises:
            RequestError: the prompt is empty, too long, has ids outside the vocabulary, or its KV can never fit; or a
                bias or a stop is for such an id.
            QueueFull: the waiting queue is full; try again later.
            SplitinferError: the pipeline has failed, or was closed.
        """
        sequence = self._sequence(prompt, pictures, params, Handling(session, priority, timeout, flight))
        return Request(self._submit(sequence, None if raw else self._parser(sequence, tools)), self._engine)

    def _parser(self, sequence: core.Sequence, tools: Sequence[Tool]) -> AnswerParser | None:
        """Return a parser for an answer; ``None``: the model's folder has no tokenizer."""
        if (tokenizer := self._prompts.tokenizer) is None:
            return None
        has_form, prompt = sequence.params.grammar is not None and not tools, sequence.tokens
        return tokenizer.answer_format.parser(prompt, tools, has_form=has_form)

    async def asubmit(
        self,
        prompt: Prompt | SeenPrompt,
        params: SamplingParams | None = None,
        *,
        session: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        flight: Flight | None = None,
        goes_on: bool = False,
        pictures: Sequence[PictureSource] = (),
        tools: Sequence[Tool] = (),
        raw: bool = False,
        parser: AnswerParser | None = None,
    ) -> AsyncRequest:
        """``submit`` for asyncio: text is tokenized beside the event loop, which then reads the events.

        ``goes_on``: the text goes on with the prompt's, and may begin with a space. ``parser``: tells the answer apart,
        in place of the one that ``tools`` asks for (``Tokenizer.answer_format``).

        Raises:
            SplitinferError: as ``submit``.
        """
        handling = Handling(session, priority, timeout, flight)
        sequence = await asyncio.to_thread(self._sequence, prompt, pictures, params, handling)
        has_events = asyncio.Event()
        end = sequence.num_prompt_tokens
        behind = sequence.sent(max(0, end - _BEHIND), end) if goes_on else ()
        parser = parser or (None if raw else self._parser(sequence, tools))
        state = self._submit(sequence, parser, waker(has_events), behind)
        return AsyncRequest(state, self._engine, has_events)

    def _sequence(
        self,
        prompt: Prompt | SeenPrompt,
        pictures: Sequence[PictureSource],
        params: SamplingParams | None,
        handling: Handling,
    ) -> core.Sequence:
        """Return a prompt with its pictures, and all that holds for its answer. Compiling a grammar may take a
        second."""
        if not isinstance(prompt, SeenPrompt):
            tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            prompt = self.seeing.prompt(tokens, pictures, self.context_length)
        params, plain = params or SamplingParams(), prompt.plain
        rewind = self._engine.scheduler.config.rewind
        weighs = rewind is UNLIMITED or rewind > WITHIN_DRAFTS
        self._prompts.check(plain, self.context_length)
        self._prompts.check_ids(params)
        sequence = core.Sequence(
            seq_id=next(self._ids),
            tokens=list(prompt.tokens),
            pictures=prompt.pictures,
            pixels=prompt.pixels,
            params=params,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            end_tokens=self._prompts.end_tokens(params),
            session=handling.session,
            priority=handling.priority,
            deadline=None if handling.timeout is None else time.monotonic() + handling.timeout,
            flight=handling.flight or self.settings.flight,
            rules=self._forms.rules(params, plain, may_think=True, weighs=weighs),
        )
        self._engine.scheduler.key(sequence)
        return sequence

    async def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, **how: Any
    ) -> AsyncGenerator[StreamEvent, None]:
        """``stream`` for asyncio. Closing the iterator, or cancelling the task that reads, aborts the request."""
        request = await self.asubmit(prompt, params, **how)
        async with aclosing(request.__aiter__()) as events:
            async for event in events:
                yield event

    def _submit(
        self,
        sequence: core.Sequence,
        parser: AnswerParser | None,
        notify: Callable[[], None] | None = None,
        behind: Sequence[int] = (),
    ) -> RequestState:
        detokenizer = self._prompts.detokenizer(behind)
        told = None if parser is None else Apart(parser, sequence.params.stop)
        state = RequestState(sequence, detokenizer, time.monotonic, notify, told)
        self._engine.submit(state)
        return state

    # -- what an operator does ---------------------------------------------------------------

    def forget(self, session: str) -> None:
        """Free the cached KV of a session's requests."""
        self._engine.call(lambda loop: loop.scheduler.kv.forget(session))

    def tune(self, **serving_options: Any) -> None:
        """Change serving options (``Settings``) while requests are under way. They hold from the next step on, and
        change no token. ``None`` restores a default.

        Raises:
            ConfigError: there is no such option, or the value is out of range.
        """
        known = [each.name for each in fields(ServingOptions)]
        unknown = next((name for name in serving_options if name not in known), None)
        if unknown is not None:
            raise ConfigError(f"there is no option {unknown!r}; there are {', '.join(known)}")
        try:
            changed = replace(self.serving_options, **serving_options)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{error}") from error
        pipeline = self._engine.pipeline

        def change(scheduler: Scheduler) -> None:  # also of another cut, whose stages may have other devices
            budget = token_budget_of(changed, (ready.device for ready in pipeline.ready))
            scheduler.tune(changed.policy_config, budget, changed.max_running or MAX_RUNNING)

        self._engine.call(lambda loop: loop.tune("rules", change))
        self.serving_options = changed

    def plan(self, aim: Aim = Aim.CHAT) -> Rebalance:
        """Compare the cut in force with the best for ``aim``, by what the pipeline's own steps have cost; ``recut``
        loads its layout.

        Raises:
            RequestError: no step has been computed yet, or no cut meets the aim.
        """
        with self._recutting:
            figures = live_figures(self._engine, self._checkpoint, self.layout, self.settings, self._profiles)
        return rebalance(figures, aim)

    def follow(self, advice: Rebalance, aim: Aim = Aim.CHAT) -> float:
        """Load the layout that ``plan`` advised for ``aim``, as ``recut`` does; ``outcome`` tells what it brought.

        Raises:
            SplitinferError: as ``recut``.
        """
        followed = Followed.now(self.layout, aim, self._engine.scheduler.costs)
        paused = self.recut(advice.layout)
        self._followed = followed
        return paused

    def outcome(self, *, acts: bool = True) -> str | None:
        """Return what the advice that was followed last has brought, in a sentence, and load the layout before it again
        if that was faster. Return None if too few steps have been computed since, or if it was told already.

        Args:
            acts: Without it, nothing is loaded, and the next call tells the same.

        Raises:
            SplitinferError: as ``recut``.
        """
        followed = self._followed
        gain = None if followed is None else followed.gain(self._engine.scheduler.costs)
        if followed is None or gain is None:
            return None
        before = followed.before.cut
        brought = f"{self.layout.cut} is {gain:.2f} times as fast as {before} was, for the same steps"
        if acts:
            self._followed = None
        if gain >= TAKEN_BACK:
            return f"{brought}."
        if not acts:
            return f"{brought}, so {before} is to be loaded again."
        self.recut(followed.before)
        return f"{brought}, so {before} is in force again."

    def recut(self, cut: Sequence[int] | PlainLayout | Mapping[str, Any] | str | Path) -> float:
        """Load another cut of the model over its machines. Return the seconds without computation.

        Requests wait meanwhile, and go on with the same tokens: what the stages held of them is computed again, or read
        from disk, as far as every stage has it there.

        ``cut``: the numbers of layers of the stages in their order, or a layout, whose stages replace the present ones.

        Raises:
            LayoutError: the layers are not the model's.
            SplitinferError: the cut cannot be loaded, or has no room for a request under way; the one before is in
                force again. Or the pipeline has failed, was closed, or is being drained.
        """
        with self._recutting:
            if isinstance(cut, Sequence) and not isinstance(cut, str):
                layout = with_layers(self.layout, cut)
            else:
                layout = replace(self.layout, stages=as_layout(cut, None).stages)
            layout.check(self.layout.num_layers)
            check_ranks(layout, self._checkpoint, self.settings.pictures)
            by_key = frozenset(stage.name for stage in layout.to_find)
            layout = find_stages(layout)
            return self._engine.recut(layout, by_key)

    def stats(self) -> dict[str, Any]:
        """Return counters and per-stage figures, as a plain dictionary; ``docs/operate/metrics.md`` explains each.
        Counters begin with the pipeline and never go back: what a while has brought is the difference of two
        readings."""
        return self._engine.stats()

    def request_figures(self) -> dict[str, Histogram]:
        """Return distributions of requests' times and sizes since the start, for a program that reads them again and
        again."""
        return self._engine.figures.histograms()

    def watch_steps(self, watch: StepWatch | None) -> None:
        """Call ``watch`` with the record of every step that comes back from now on; ``None``: no more. The last caller
        has them. It is called on any thread, and must return at once; after ``stats`` it has had all that came back."""
        self._engine.figures.watch = watch

    def health(self) -> PipelineHealth:
        """Return the state of each stage, and the worker that is being waited for, if one is lost."""
        return self._engine.health()

    def seconds_until_room(self, nth: int = 1) -> float:
        """Return when to try again after ``QueueFull``: seconds until ``nth`` requests more could be queued, from what
        steps have cost and answers have lasted so far; between 1 and 60. From any thread."""
        scheduler = self._engine.scheduler
        running = list(scheduler.running.values())  # at once, as the engine's thread changes it
        usual = self._engine.figures.usual_request
        return seconds_until_room(running, scheduler.config, scheduler.costs, usual, nth)

    def drain(self, seconds: float) -> None:
        """Take no new request from now on; those under way have ``seconds`` to end, then they are aborted."""
        self._engine.drain(seconds)

    # -- ending ------------------------------------------------------------------------------

    def close(self) -> None:
        """End all requests, all links and the local workers. At most about 2 seconds, and as long as the KV of the last
        answers takes to be saved, where it is kept on disk: a moment, at most 20 seconds on a machine that is busy."""
        atexit.unregister(self.close)
        if hasattr(self, "_engine"):
            self._engine.close(timeout=1.0)
            self._forms.close()
        if self._trace is not None:
            self._trace.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()
