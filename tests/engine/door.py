"""The one door to a pipeline in this process: stages, what goes wrong, and options; and what must hold at its end.

    with pipeline("llama", [2, 2], fault=link_cut(1), token_budget=16) as there:
        there.answers()
        assert there.stats["rejoins"] == 1

Every request that goes through the door must get the tokens that it gets alone from one undisturbed stage (``alone``);
one that was aborted or failed, their beginning. Where rows round otherwise among others, as on a GPU, each token must
be plain mlx-lm's choice up to that. At the end nothing may be under way, and no stage may hold KV that is not kept on
purpose, by the scheduler's count and by MLX's. Threads, processes and groups are looked at after every test
anyway (``tests/left_over.py``).
"""

import gc
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import failing
import mlx.core as mx
import pytest
import stages
import tiny
from mlx_lm.utils import load_model
from processes import until

from splitinfer import LLM, Flight, SamplingParams
from splitinfer.core.speculation.speculation import Draft
from splitinfer.demo import TARGET
from splitinfer.engine.device.device import Device
from splitinfer.engine.drafts.drafters import NGramDrafter
from splitinfer.engine.loop import loop
from splitinfer.engine.loop.requests import RequestOutput, StreamEvent
from splitinfer.engine.stage.loader import free_memory, load
from splitinfer.errors import DeviceFailed
from splitinfer.llm import Notice, Request, setup
from splitinfer.machine.selection import VARIABLE
from splitinfer.models.blas import is_batch_invariant
from splitinfer.probes.plain import WRONG, gaps, rounding, tolerance, verdict
from splitinfer.wire.messages import Load, Progress

SECONDS = 60.0  # for anything that happens at all
QUICK = Path(__file__).parents[1] / "quick_accelerator.yaml"
BROKEN = DeviceFailed("the device failed (command buffer: timeout)")
NO_MEMORY = DeviceFailed("the device has no memory left", no_memory=True)
_SLACK = 100_000  # bytes that stages make once and keep: tables, masks, compiled kernels' constants


# -- requests ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    """A request. ``leaves_after``: tokens after which it is aborted."""

    tokens: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    timeout: float | None = None
    flight: Flight | None = None
    leaves_after: int | None = None


def ask(length: int = 9, *, prompt: int = 11, **params: Any) -> Ask:
    """A request with a prompt of that many tokens, another one for each ``prompt``."""
    given = {"max_tokens": 16, "seed": 5, "ignore_eos": True, **params}
    return Ask(tuple(stages.prompt(length, seed=prompt)), SamplingParams(**given))


SEVERAL = (
    ask(9),
    ask(14, temperature=0.9),
    ask(23, temperature=0.9, seed=6, repetition_penalty=1.2),
)
"""A greedy request, a sampled one, and one with a penalty."""

_alone: dict[tuple[str, str], list[int]] = {}


def alone(model: Path | str, asks: Iterable[Ask], **options: Any) -> list[list[int]]:
    """What one undisturbed stage gives each request by itself. ``options``: those that may change tokens."""
    asks = list(asks)
    keys = [(f"{model} {sorted(options.items())}", f"{one.tokens} {one.params}") for one in asks]
    if missing := {key: one for key, one in zip(keys, asks, strict=True) if key not in _alone}:
        with stages.pipeline(model, [num_layers(model)], prefix_cache=False, **options) as llm:
            for key, one in missing.items():
                _alone[key] = llm.generate(list(one.tokens), one.params)[0].token_ids
    return [_alone[key] for key in keys]


def num_layers(model: Path | str) -> int:
    """Layers of a model's folder."""
    return int(_config(Path(model))["num_hidden_layers"])


def _config(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """``devices`` compute in the place of stages' own; ``act`` is called once the first request has ``at`` tokens.
    ``patience``: seconds after which a step counts as stuck."""

    devices: Callable[[], Mapping[int, Device]] | None = None
    act: "Callable[[Pipeline], object] | None" = None
    at: int = 6
    patience: float | None = None


NOTHING = Fault()
WAYS = {
    "launch": lambda wish: failing.FailingDevice(computes_at_launch=False, at_launch=wish),
    "wait": lambda wish: failing.FailingDevice(computes_at_launch=False, at_wait=wish),
    "computes at launch": lambda wish: failing.FailingDevice(computes_at_launch=True, at_launch=wish),
}
"""How a device fails: by its way."""


def device_fails(stage: int, number: int, way: str = "wait", error: Exception = BROKEN) -> Fault:
    """Once, at the ``number``-th step."""
    return Fault(lambda: {stage: WAYS[way](failing.nth(number, error))})


def no_memory(stage: int, num_bytes: float, way: str = "launch") -> Fault:
    """For no step that writes to more bytes of KV."""
    return Fault(lambda: {stage: WAYS[way](failing.beyond(int(num_bytes)))})


def stands_still(stage: int, number: int) -> Fault:
    """For ever, from the ``number``-th step on, until the pipeline is closed; any step counts as stuck soon."""
    return Fault(lambda: {stage: failing.StuckDevice(number)}, patience=0.3)


def launches_ahead(num_stages: int = 2) -> Fault:
    """No fault: devices that compute while their hosts go on."""
    return Fault(lambda: {i: failing.FailingDevice(computes_at_launch=False) for i in range(num_stages)})


def link_cut(stage: int = 1, at: int = 6) -> Fault:
    """All links of a worker, which is there again at once."""
    return Fault(act=lambda there: there.cut(stage), at=at)


def worker_lost(stage: int = 1, at: int = 6) -> Fault:
    """A worker ends, and another takes its place."""

    def act(there: "Pipeline") -> None:
        there.workers[stage - 1].stop()
        there.workers[stage - 1].start()

    return Fault(act=act, at=at)


def recut(*cuts: Sequence[int], at: int = 6) -> Fault:
    """No fault: other cuts are loaded, one after the other."""
    return Fault(act=lambda there: [there.llm.recut(cut) for cut in cuts], at=at)


# -- the pipeline ------------------------------------------------------------------------------------------------------


@dataclass
class Pipeline:
    """An open pipeline. ``asked``: its requests, and the iterators that read them."""

    llm: LLM
    workers: list[stages.Here]
    fault: Fault
    asked: list[tuple[Ask, Request, Iterator[StreamEvent]]] = field(default_factory=list)

    @property
    def stats(self) -> dict[str, Any]:
        return self.llm.stats()

    def cut(self, stage: int = 1) -> None:
        """Cut all links of a worker."""
        self.workers[stage - 1].cables.cut()

    def submit(self, *asks: Ask) -> list[Request]:
        """Requests under way. Their tokens are checked when the pipeline is closed."""
        found = []
        for one in asks:
            handling: Any = {"priority": one.priority, "timeout": one.timeout}
            request = self.llm.submit(list(one.tokens), one.params, flight=one.flight, **handling)
            self.asked.append((one, request, iter(request)))
            found.append(request)
        return found

    def outputs(self, *asks: Ask) -> list[RequestOutput]:
        """Submit requests (``SEVERAL`` without any), let the fault happen, and wait until all have ended."""
        requests = self.submit(*(asks or SEVERAL))
        if self.fault.act is not None:
            self.read(requests[0], self.fault.at)
            self.fault.act(self)
        self.finish()
        return [request.output for request in requests]

    def answers(self, *asks: Ask) -> list[list[int]]:
        """The tokens of ``outputs``, none of which failed."""
        outputs = self.outputs(*asks)
        assert [output.error for output in outputs] == [None] * len(outputs)
        return [output.token_ids for output in outputs]

    def read(self, request: Request, count: int) -> None:
        """Read a request until it has so many tokens."""
        events = next(events for _, one, events in self.asked if one is request)
        while len(request.output.token_ids) < count and next(events, None) is not None:
            pass

    def finish(self) -> None:
        """Read all requests to their ends."""
        for one, request, events in self.asked:
            if one.leaves_after == 0:
                request.abort()
            for _ in events:
                if one.leaves_after is not None and len(request.output.token_ids) >= one.leaves_after:
                    request.abort()

    def is_idle(self) -> bool:
        """Whether no request is known, and no stage has KV but what is kept."""
        stats = self.stats
        return stats["waiting"] == stats["running"] == 0 and not any(stage["kv_bytes"] for stage in stats["stages"])


Open = Callable[..., AbstractContextManager[Pipeline]]
"""The fixture ``pipeline``: ``opened``, with the name of a tiny model or its folder."""


def _held() -> int:
    gc.collect()
    return mx.get_active_memory()


@contextmanager
def opened(
    model: Path | str,
    cuts: Sequence[int],
    *,
    fault: Fault = NOTHING,
    block: int | None = None,
    accelerator: Path | None = None,
    environment: Mapping[str, str] | None = None,
    notice: Notice | None = None,
    are_checked: bool = True,
    **options: Any,
) -> Iterator[Pipeline]:
    """A pipeline over ``len(cuts)`` stages (``stages.opened`` has the other options).

    ``block``: tokens of a block of KV, any number of which is worth reading from disk. ``accelerator``: a machine file
    of the devices. ``environment``: variables. ``are_checked``: false for tokens that the test itself looks at.
    """
    folder = TARGET if model == "demo" else model
    may_change = {"dtype", "kv_format", "context"}
    may_change |= {"token_budget"} if _config(Path(folder))["model_type"] in tiny.SAME_CHUNKS_ONLY else set()
    same = {name: value for name, value in options.items() if name in may_change}
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in {**(environment or {}), **({VARIABLE: str(accelerator)} if accelerator else {})}.items():
            patch.setenv(name, value)
        if block is not None:
            stages.shorten_blocks(patch, block)
            patch.setattr(setup, "WORTH", 1)
        devices = _break(patch, fault)
        loads = list[str]()

        def noted(name: str, progress: Progress) -> None:
            if progress.phase == "load":
                loads.append(name)
            if notice is not None:
                notice(name, progress)

        llm, workers = stack.enter_context(stages.opened(folder, cuts, notice=noted, **options))
        stack.callback(_let_go, devices)  # before the pipeline is closed
        before, loaded = _held(), len(loads)
        there = Pipeline(llm, workers, fault)
        yield there
        there.finish()
        if llm.health().failure is None:
            until(there.is_idle, "no request and no KV is left", SECONDS)
            if len(loads) == loaded:
                _check_nothing_is_held(there, before)
    if are_checked:
        _check_tokens(folder, there, same)  # by a stage that knows neither fault nor accelerator


def _break(patch: pytest.MonkeyPatch, fault: Fault) -> Mapping[int, Device]:
    """Put the fault's devices in place."""
    if fault.patience is not None:
        patch.setattr(loop, "limit_of", lambda _predicted: fault.patience)
    if fault.devices is None:
        return {}
    devices = fault.devices()
    failing.use(patch, devices)
    return devices


def _check_nothing_is_held(there: Pipeline, before: int) -> None:
    """By MLX's count. Stages that were loaded again have other weights, so they are left out."""

    def most() -> int:
        return before + sum(stage["kv_bytes_stored"] for stage in there.stats["stages"]) + _SLACK

    until(lambda: _held() <= most(), f"stages free what ended ({_held() - most():,} bytes too many at first)", 10)


def _check_tokens(model: Path | str, there: Pipeline, same: Mapping[str, Any]) -> None:
    """Every request got the tokens that it gets alone; one that was aborted, or failed, their beginning."""
    if not is_batch_invariant():
        _check_up_to_rounding(Path(model), there)
        return
    rights = alone(model, [one for one, _, _ in there.asked], **same)
    for (one, request, _), right in zip(there.asked, rights, strict=True):
        tokens, reason = request.output.token_ids, request.output.finish_reason
        if reason in ("abort", "error"):
            assert tokens == right[: len(tokens)], f"{reason} of {one}"
        else:
            assert tokens == right, f"{one}"


def _check_up_to_rounding(folder: Path, there: Pipeline) -> None:
    """Every token is the choice of plain mlx-lm, or as near to it as other numbers of rows move logits. Of requests
    that mlx-lm alone can judge: greedy ones, and sampled ones with a temperature alone."""
    plain, vocab_size = load_model(folder)[0], int(_config(folder)["vocab_size"])
    plain.set_dtype(mx.float32)
    for one, request, _ in there.asked:
        tokens, given = request.output.token_ids, one.params
        known = {name: getattr(given, name) for name in ("max_tokens", "temperature", "seed", "ignore_eos")}
        if given == SamplingParams(**known) and tokens:
            allowed = tolerance(rounding(plain, [*one.tokens, *tokens], (1, 16, 7)))
            found = verdict(gaps(plain, one.tokens, tokens, given, vocab_size), allowed)
            assert found["verdict"] != WRONG, f"{found['said']}: {one}"


def _let_go(devices: Mapping[int, Device]) -> None:
    if isinstance(devices, failing.HeldLoading):
        devices.goes_on.set()
    for device in devices.values():
        if isinstance(device, failing.StuckDevice):
            device.goes_on.set()


def leaves_nothing(command: Load) -> bool:
    """Whether a stage that is loaded and unloaded holds no memory, however often; nobody else collects what is in a
    cycle and frozen."""
    held = list[int]()
    for _ in range(3):
        stage = load(command, "last", lambda _progress: None)
        stage.begin_anew()
        stage.close()
        del stage
        free_memory()
        held.append(mx.get_active_memory() + mx.get_cache_memory())
    return held == held[:1] * 3


# -- drafts ------------------------------------------------------------------------------------------------------------


class Guesses(NGramDrafter):
    """Drafts what comes, but for some places: of streams that are known, ``guess(token, place)``."""

    def __init__(self, streams: Sequence[Sequence[int]], guess: Callable[[int, int], int]) -> None:
        super().__init__()
        self._streams, self._guess = streams, guess

    def drafts(self, seq: Any, count: int) -> Iterator[Draft]:
        so_far, prompt = seq.streamed(0), seq.tokens[: seq.num_prompt_tokens]
        known = next((one for one in self._streams if list(one[: len(so_far)]) == so_far), [])
        known = known or next((one for one in self._streams if list(one[: len(prompt)]) == prompt), [])
        for place, token in enumerate(known[len(so_far) :][:count], len(so_far)):
            yield Draft(self._guess(token, place))


def streams_of(model: Path | str, asks: Iterable[Ask], **options: Any) -> list[list[int]]:
    """Prompts, and the tokens that must follow. ``options``: of ``alone``."""
    asks = list(asks)
    return [[*one.tokens, *tokens] for one, tokens in zip(asks, alone(model, asks, **options), strict=True)]


def some_wrong(token: int, place: int) -> int:
    """Wrong at two of seven places: whatever the number of drafts in a step, it cannot keep stepping over both."""
    return token if place % 7 not in (0, 3) else (token + 1) % 100
