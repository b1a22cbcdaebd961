"""``splitinfer bench --mode device``: what the loops leave of a device's time. For emulated accelerators, whose times
are known.

    one stream      milliseconds a token, beside the sum of all stages and hops. A hop is half a round trip of a link
                    between two processes, measured in this run.
    groups          as many groups of eight as there are stages: tokens a second, beside what the slowest stage allows
    after a prompt  the first 50 gaps between tokens after a prompt of many chunks, beside the steady ones
    long prompt     eight streams decode and a long prompt comes: their gaps, beside the objective of three usual ones

Void steps, which took the processor longer than the device would, are counted (``engine.device.emulated``).
"""

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from rich.table import Table

from splitinfer.bench.shared import machine
from splitinfer.bench.shared.inputs import check_context
from splitinfer.bench.shared.link_pair import Kind, Pair
from splitinfer.bench.shared.options import Options
from splitinfer.bench.shared.printing import say
from splitinfer.bench.shared.systems import open_stages, plain_layout, whole
from splitinfer.bench.shared.workload import made_up
from splitinfer.core.costs.shape import Shape
from splitinfer.core.metrics.histogram import LogHistogram
from splitinfer.core.sequence import SamplingParams
from splitinfer.engine.coordinator.requests import StreamEvent
from splitinfer.errors import ConfigError
from splitinfer.llm import LLM, Request
from splitinfer.machine.files import read_devices
from splitinfer.machine.machine import Machine
from splitinfer.machine.selection import VARIABLE, emulated_machine

GROUP = 8  # sequences
_CHUNK = 512  # tokens in a step
_PROMPT = 16  # tokens of a stream's prompt
_WARM, _COUNTED = 10, 100  # tokens of each stream
_LONG_CHUNKS = 8
_AFTER = 50  # gaps after a prompt
_BEFORE = 30  # gaps before a long prompt comes
_OBJECTIVE = 3.0  # usual gaps
_ROUNDS, _BYTES = 500, 4096  # of round trips


def measure(options: Options) -> dict[str, Any]:
    """Measure, and return the document.

    Raises:
        SplitinferError: something cannot be measured.
    """
    file = emulated_machine()
    if file is None:
        raise ConfigError(
            f"--mode device compares with a device's known times: name a machine with --accelerator FILE or {VARIABLE}"
        )
    checkpoint = options.checkpoint
    context = _LONG_CHUNKS * _CHUNK + 4 * _COUNTED
    check_context(checkpoint, context, "a prompt of eight chunks of 512")
    layers = [stage.num_layers for stage in options.found_layout.stages]
    devices, on = read_devices(file, layers), machine.describe()
    settings = options.settings(context, token_budget=_CHUNK, micro_batches=len(layers))
    with ExitStack() as stack:
        pair = stack.enter_context(closing(Pair(Kind("tcp", "tcp://127.0.0.1:0"))))
        llm = open_stages(stack, options, settings)
        pinned = machine.pin_stages(llm.layout.stages)
        trials = _Trials(llm, devices, checkpoint.vocab_size or 2, options.seed)
        trials.warm_up()
        cases: dict[str, list[dict[str, Any]]] = {"one_stream": [], "groups": [], "after_prompt": [], "long_prompt": []}
        for number in range(options.trials):
            say(f"trial {number + 1} of {options.trials}")
            hop = statistics.median(pair.round_trips(_BYTES, _ROUNDS)) / 2
            cases["one_stream"].append(trials.one_stream(number, hop))
            cases["groups"].append(trials.groups(number))
            cases["after_prompt"].append(trials.after_prompt(number))
            cases["long_prompt"].append(trials.long_prompt(number))
    return {
        "measured_on": {**on, "pinned": pinned},
        "layout": plain_layout(llm),
        "trials": options.trials,
        **cases,
    }


@dataclass(slots=True)
class _Trials:
    llm: LLM
    devices: Sequence[Machine]
    vocab_size: int
    seed: int

    def warm_up(self) -> None:
        """Steps of all the sizes to come, so that the costs are known before an objective depends on them."""
        for count in (1, GROUP, GROUP * len(self.devices)):
            _results(self._streams(f"warm up {count}", count, _WARM))
        for length in (_CHUNK // 8, _CHUNK // 2, 2 * _CHUNK):
            _results([self._submit(f"warm up {length}", length, 4)])

    def one_stream(self, trial: int, hop: float) -> dict[str, Any]:
        """One sequence alone: seconds a token, and what stages and hops take."""
        (stream,) = self._streams(f"one {trial}", 1, _WARM + _COUNTED)
        window = self._window(stream)
        (times,) = _results([stream])
        stages, hops = sum(self._seconds(1)), hop * (len(self.devices) if len(self.devices) > 1 else 0)
        gap = statistics.median(_gaps(times)[_WARM:])
        return {"seconds_a_token": gap, "stages": stages, "hops": hops, "over": gap - stages - hops, "window": window}

    def groups(self, trial: int) -> dict[str, Any]:
        """As many full groups as stages: tokens a second, and what the slowest stage allows."""
        streams = self._streams(f"groups {trial}", GROUP * len(self.devices), _WARM + _COUNTED + _WARM)
        window = self._window(streams[-1])
        every = _results(streams)
        began, ended = every[-1][_WARM - 1], every[-1][_WARM + _COUNTED - 1]
        rate = sum(began < at <= ended for times in every for at in times) / (ended - began)
        allowed = GROUP / max(self._seconds(GROUP))
        return {"tokens_per_second": rate, "allowed": allowed, "share": rate / allowed, "window": window}

    def after_prompt(self, trial: int) -> dict[str, Any]:
        """The gaps behind a prompt of many chunks, and the steady ones of the same sequence."""
        request = self._submit(f"after {trial}", _LONG_CHUNKS * _CHUNK, 2 * _AFTER)
        (times,) = _results([request])
        gaps = _gaps(times)
        first, steady = statistics.median(gaps[:_AFTER]), statistics.median(gaps[_AFTER:])
        return {
            "ttft": times[0] - request.at, "first_seconds": first, "worst_seconds": max(gaps[:_AFTER]),
            "steady_seconds": steady, "to_steady": statistics.mean(gaps[:_AFTER]) / steady,
        }  # fmt: skip

    def long_prompt(self, trial: int) -> dict[str, Any]:
        """Eight streams decode under an objective, and a long prompt comes."""
        usual = statistics.median(
            gap for times in _results(self._streams(f"usual {trial}", GROUP, _BEFORE)) for gap in _gaps(times)[_WARM:]
        )
        objective = _OBJECTIVE * usual
        self.llm.tune(itl_slo_ms=1000 * objective)
        try:
            streams = self._streams(f"streams {trial}", GROUP, _LONG_CHUNKS * _CHUNK)
            _until(streams[-1], _BEFORE)
            long = self._submit(f"long {trial}", _LONG_CHUNKS * _CHUNK, 1)
            (answer,) = _results([long])
            for stream in streams:
                stream.request.abort()
            every = _results(streams)
        finally:
            self.llm.tune(itl_slo_ms=None)
        during = LogHistogram()
        for times in every:
            for before, at in pairwise(times):
                if at > long.at and before < answer[0]:
                    during.add(at - before)
        p99 = during.quantile(0.99)
        return {"ttft": answer[0] - long.at, "usual": usual, "objective": objective, "p99": p99,
                "p99_to_objective": p99 / objective}  # fmt: skip

    def _seconds(self, rows: int) -> list[float]:
        """Seconds of a step of short sequences on each stage."""
        return [device.stages[0].at(Shape.of_single_rows([_PROMPT] * rows)) for device in self.devices]

    def _streams(self, name: str, count: int, num_tokens: int) -> list["_Stream"]:
        return [self._submit(f"{name} {i}", _PROMPT, num_tokens) for i in range(count)]

    def _submit(self, name: str, length: int, num_tokens: int) -> "_Stream":
        prompt = made_up(f"{self.seed} device {name}", length, self.vocab_size)
        at = time.monotonic()
        return _Stream(at, self.llm.submit(prompt, SamplingParams(max_tokens=num_tokens, ignore_eos=True)))

    def _window(self, stream: "_Stream") -> list[dict[str, Any]]:
        """Each stage's figures from the stream's token number ``_WARM`` for ``_COUNTED`` tokens."""
        _until(stream, _WARM)
        self.llm.stats(reset=True)
        _until(stream, _COUNTED - 1)
        return [
            {"name": stage["name"], "duty": stage["duty_percent"] / 100, "overhead": stage["overhead"]}
            for stage in self.llm.stats()["window"]["stages"]
        ]


@dataclass(slots=True)
class _Stream:
    """A request, and when it was submitted, in seconds."""

    at: float
    request: Request
    events: Iterator[StreamEvent] = field(init=False)

    def __post_init__(self) -> None:
        self.events = iter(self.request)


def _until(stream: _Stream, count: int) -> None:
    """Read ``count`` more events of a stream: one for each token."""
    for _ in range(count):
        next(stream.events)


def _results(streams: Sequence[_Stream]) -> list[list[float]]:
    """Wait for the ends; the times of each stream's tokens, in seconds."""
    for stream in streams:
        for _ in stream.events:
            pass
    return [[stream.at + each for each in whole(stream.request.output).token_times] for stream in streams]


def _gaps(times: Sequence[float]) -> list[float]:
    return [b - a for a, b in pairwise(times)]


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Tables of the cases, and of the stages in two of them."""
    return [_table(found), _stage_table(found)]


def _table(found: Mapping[str, Any]) -> Table:
    title = f"A device's time, {found['layout']['name']}, medians of {found['trials']} trials"
    table = Table("", "found", "the device allows", title=title, title_justify="left")
    one, groups, after, long = (found[name] for name in ("one_stream", "groups", "after_prompt", "long_prompt"))
    table.add_row(
        "one stream, ms a token", f"{_ms(one, 'seconds_a_token'):.2f}",
        f"{_ms(one, 'stages'):.2f}, and hops of {_ms(one, 'hops'):.2f}: {_ms(one, 'over'):.2f} more",
    )  # fmt: skip
    table.add_row(
        "full groups, tokens/s", f"{_median(groups, 'tokens_per_second'):.1f}",
        f"{_median(groups, 'allowed'):.1f}: {_median(groups, 'share'):.4f} of it",
    )  # fmt: skip
    table.add_row(
        f"the {_AFTER} tokens after a long prompt, ms", f"{_ms(after, 'first_seconds'):.2f}",
        f"{_ms(after, 'steady_seconds'):.2f} later: {_median(after, 'to_steady'):.3f} of it on average",
    )  # fmt: skip
    table.add_row(
        "streams beside a long prompt, p99, ms", f"{_ms(long, 'p99'):.1f}",
        f"objective {_ms(long, 'objective'):.1f}: {_median(long, 'p99_to_objective'):.3f} of it",
    )  # fmt: skip
    return table


def _stage_table(found: Mapping[str, Any]) -> Table:
    table = Table("case", "stage", "duty", "link and host, mean ms", "p50", "p99", title_justify="left")
    for case in ("one_stream", "groups"):
        for i, stage in enumerate(found[case][0]["window"]):
            each = [trial["window"][i] for trial in found[case]]
            overheads = [one["overhead"] for one in each]
            mean = statistics.median(one["seconds"] / max(1, one["count"]) for one in overheads)
            table.add_row(
                case.replace("_", " "), stage["name"], f"{statistics.median(one['duty'] for one in each):.4f}",
                f"{1000 * mean:.3f}", f"{_ms(overheads, 'p50'):.3f}", f"{_ms(overheads, 'p99'):.3f}",
            )  # fmt: skip
    return table


def _median(trials: Sequence[Mapping[str, Any]], name: str) -> float:
    return statistics.median(float(trial[name]) for trial in trials)


def _ms(trials: Sequence[Mapping[str, Any]], name: str) -> float:
    return 1000 * _median(trials, name)
