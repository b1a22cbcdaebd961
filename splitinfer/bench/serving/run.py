"""``splitinfer bench --mode serve``: serving under an objective.

    stall       streams decode, then a long prompt arrives: how long do they wait for their next token, and the prompt
                for its first? The objective is three times their usual gap.
    arrivals    requests with recorded lengths arrive at random, the same ones for every policy and for mlx-lm
    dial        the same requests at five values of ``prefill_share``
    simulated   arrivals and dial once more in virtual time, with the step costs of this run

Everything is measured in this run on one pipeline, whose serving options are changed in between.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from splitinfer.bench.serving.report import plot, tables
from splitinfer.bench.shared import machine
from splitinfer.bench.shared.mlx_lm import PlainMlxLm, plain_mlx_lm
from splitinfer.bench.shared.options import Options
from splitinfer.bench.shared.printing import say
from splitinfer.bench.shared.systems import open_stages, plain_layout, vocabulary, whole
from splitinfer.bench.shared.workload import made_up
from splitinfer.core.costs.stage import StageCosts
from splitinfer.core.scheduler.policy import PolicyName
from splitinfer.core.sequence import SamplingParams
from splitinfer.core.serving_options import MAX_RUNNING, ServingOptions
from splitinfer.errors import ConfigError
from splitinfer.llm import LLM, Request
from splitinfer.machine.files import read_devices
from splitinfer.machine.machine import Hop, Machine
from splitinfer.machine.selection import emulated_machine
from splitinfer.sim.capacity import simulate
from splitinfer.sim.outcome import Outcome, Spread, outcome_of
from splitinfer.sim.simulator import Served
from splitinfer.sim.workload import Arrival, Lengths, fitted, made_up_lengths, poisson, read_lengths

__all__ = ["measure", "plot", "tables"]

SLO = 3.0  # times the usual gap
DIAL = (0.1, 0.2, 0.4, 0.7, 1.0)
BATCH_GENERATOR = "mlx-lm BatchGenerator"
_WARM_UP = 40  # tokens of each stream
_PROMPT = 32  # tokens of a stream's prompt
_BEFORE = 40  # gaps before the long prompt arrives
_LONGEST_STREAM = 4096  # tokens
_LOAD = 0.7  # of what the stages can finish, where no rate is given
_AT_ONCE = 1e6  # requests a second
_STREAMS = 8  # by default


def measure(options: Options) -> dict[str, Any]:
    """Measure, and return the document.

    Raises:
        SplitinferError: something cannot be measured.
    """
    asked = read_lengths(options.lengths) if options.lengths else made_up_lengths()
    on = machine.describe()
    checkpoint = options.checkpoint
    context = min(checkpoint.context_length, options.prompt_tokens + _LONGEST_STREAM)
    if options.prompt_tokens >= context:
        raise ConfigError(
            f"a prompt of {options.prompt_tokens:,} tokens does not fit the model's context of {context:,}"
        )
    lengths = fitted(asked, options.scale, context - 1)
    settings = options.settings(context, draft=None, token_budget=options.token_budget, kv_bytes=options.kv_bytes)
    with ExitStack() as stack:
        llm = open_stages(stack, options, settings)
        plain = stack.enter_context(plain_mlx_lm(llm.layout)) if options.baseline else None
        pinned = machine.pin_stages(llm.layout.stages, {} if plain is None else {"plain mlx-lm": plain.pid})
        bench = _Bench(options, llm, plain, vocabulary(llm, checkpoint), lengths, context)
        return {
            "measured_on": {**on, "pinned": pinned},
            "layout": plain_layout(llm),
            "token_budget": llm.stats()["token_budget"],
            **bench.measure(),
        }


@dataclass(slots=True)
class _Bench:
    options: Options
    llm: LLM
    plain: PlainMlxLm | None
    vocab_size: int
    lengths: tuple[Lengths, ...]
    context: int

    @property
    def num_streams(self) -> int:
        """The number of streams that decode while a long prompt arrives."""
        return max(self.options.streams or (_STREAMS,))

    def measure(self) -> dict[str, Any]:
        """Measure everything; the document without the parts that describe the machine and the layout."""
        say("warming up")
        self._learn()
        stalls = [self._stall(trial) for trial in range(self.options.trials)]
        gap = statistics.median(each["usual_gap"] for each in stalls)
        rate = self.options.rate or _LOAD * self._max_rate()
        arrivals = poisson(self.lengths, self.options.requests, rate, self.options.seed)
        points = [
            self._point(name, serving_options, arrivals, SLO * gap)
            for name, serving_options in self._systems(gap).items()
        ]
        shares = () if self.options.policies else DIAL
        dial = [self._dial(share, arrivals, SLO * gap) for share in shares]
        return {
            "stall": {"prompt_tokens": self.options.prompt_tokens, "streams": self.num_streams, "trials": stalls},
            "rate": rate,
            "requests": self.options.requests,
            "mean_prompt_tokens": statistics.mean(one.num_prompt_tokens for one in arrivals),
            "mean_answer_tokens": statistics.mean(one.num_output_tokens for one in arrivals),
            "objective": SLO * gap,
            "arrivals": points,
            "dial": dial,
            "machine": self.machine().as_dict(),
        }

    # -- systems -------------------------------------------------------------------------------

    def _systems(self, gap: float) -> dict[str, dict[str, Any] | None]:
        """The serving options of each system; ``None``: mlx-lm."""
        if self.options.policies:
            return {name: {"policy": name} for name in self.options.policies}
        plain = {name.value: {"policy": name.value} for name in PolicyName}
        slo = {f"stall_free, {SLO:g} gaps": {"itl_slo_ms": 1000 * SLO * gap}}
        return {**slo, **plain, **({BATCH_GENERATOR: None} if self.plain is not None else {})}

    def _serve(
        self, serving_options: dict[str, Any] | None, jobs: Sequence["Job"], until: int | None = None
    ) -> list[Served]:
        """By the pipeline; options that are not named go back to their defaults. ``None``: by mlx-lm."""
        if serving_options is None:
            assert self.plain is not None
            return serve_batch(self.plain, jobs, until)
        defaults = dict.fromkeys(("policy", "itl_slo_ms", "prefill_share"))
        return serve_live(self.llm, {**defaults, **serving_options}, jobs, until)

    # -- a long prompt arrives -----------------------------------------------------------------

    def _learn(self) -> None:
        """Steps of all sizes, so that the costs are known before an objective depends on them."""
        streams = self._streams(0, _WARM_UP)
        long = Job(0.0, made_up("warm up", min(self.options.prompt_tokens, 1024), self.vocab_size), 1)
        for share in (1.0, 0.25, 0.5):
            self._serve({"prefill_share": share}, [*streams, long])
        if self.plain is not None:
            self._serve(None, streams)

    def _streams(self, trial: int, max_tokens: int) -> list["Job"]:
        names = (f"{self.options.seed} stream {trial} {i}" for i in range(self.num_streams))
        return [Job(0.0, made_up(name, _PROMPT, self.vocab_size), max_tokens) for name in names]

    def _stall(self, trial: int) -> dict[str, Any]:
        """Each system's streams, before and while a long prompt is read. The objective comes from the pipeline's own
        streams, measured just before."""
        say(f"a long prompt arrives, {trial + 1} of {self.options.trials}")
        usual = self._serve({}, self._streams(trial, _WARM_UP))
        gap = statistics.median(_gaps(usual, after=max(one.token_times[0] for one in usual)))
        found: dict[str, Any] = {"usual_gap": gap, "objective": SLO * gap, "systems": {}}
        cases: dict[str, dict[str, Any] | None] = {
            "stall_free": {"itl_slo_ms": 1000 * SLO * gap},
            "stall_free, no objective": {},
            "prefill_first": {"policy": "prefill_first"},
        }
        if self.plain is not None:
            cases[BATCH_GENERATOR] = None
        for name, serving_options in cases.items():
            found["systems"][name] = self._one_stall(trial, gap, serving_options)
        return found

    def _one_stall(self, trial: int, gap: float, serving_options: dict[str, Any] | None) -> dict[str, Any]:
        at = gap * (_BEFORE + self.num_streams)
        prompt = made_up(f"{self.options.seed} long {trial}", self.options.prompt_tokens, self.vocab_size)
        jobs = [*self._streams(trial, self.context - _PROMPT - 1), Job(at, prompt, 1)]
        *streams, long = self._serve(serving_options, jobs, until=len(jobs) - 1)
        began = max(one.token_times[0] for one in streams)
        during = [
            b - a for one in streams for a, b in pairwise(one.token_times) if b > long.at and a < long.token_times[0]
        ]
        ends = [(b, b - a) for one in streams for a, b in pairwise(one.token_times) if b > began]
        before = _gaps([Served(0, [t for t in one.token_times if began <= t <= at]) for one in streams], after=began)
        spread = Spread.of(during)
        return {
            "ttft": long.token_times[0] - long.at,
            "usual_gap": statistics.median(before) if before else gap,
            "itl": asdict(spread),
            "p99_to_objective": spread.p99 / (SLO * gap),
            "max_to_objective": spread.max / (SLO * gap),
            "came": at,
            "gaps": [(round(end, 4), round(each, 4)) for end, each in sorted(ends)],
        }

    # -- requests arrive at random -------------------------------------------------------------

    def _point(
        self, name: str, serving_options: dict[str, Any] | None, arrivals: Sequence[Arrival], objective: float
    ) -> dict[str, Any]:
        say(f"requests arrive: {name}")
        self.llm.stats(reset=True)
        served = self._serve(serving_options, jobs_of(arrivals, self.vocab_size, self.options.seed))
        live = outcome_of(served, objective)
        if serving_options is None:
            return {"name": name, "live": live.as_dict()}
        there = self._simulated(serving_options, arrivals, objective)
        return {
            "name": name, "dials": serving_options, "live": live.as_dict(), "simulated": there.as_dict(),
            "simulated_to_live": _compared(there, live),
        }  # fmt: skip

    def _dial(self, share: float, arrivals: Sequence[Arrival], objective: float) -> dict[str, Any]:
        return {"prefill_share": share, **self._point(f"dial {share:g}", {"prefill_share": share}, arrivals, objective)}

    # -- in virtual time -----------------------------------------------------------------------

    def machine(self) -> Machine:
        """A machine for the simulation, with the costs of this run's steps so far."""
        stats = self.llm.stats()
        costs, window, layers = stats["costs"], stats["window"], [s.num_layers for s in self.llm.layout.stages]
        first, *workers = (stage["gaps"]["host"] for stage in window["stages"])
        hops = tuple(Hop(costs["hop"] + (0.0 if self._computes_at_launch else each["p50"])) for each in workers)
        measured = Machine(
            tuple(map(StageCosts.from_dict, costs["stages"])),
            (*hops, Hop(costs["hop"])),
            tuple(layers),
            host=first["seconds"] / max(1, window["steps"]) if self._computes_at_launch else first["p50"],
            launches_ahead=not self._computes_at_launch,
        )
        file = emulated_machine()
        return measured if file is None else _as_described(measured, read_devices(file, layers))

    @property
    def _computes_at_launch(self) -> bool:
        return bool(self.llm.stats()["stages"][0]["device"] == "cpu")

    def _simulated(
        self, serving_options: dict[str, Any], arrivals: Sequence[Arrival], objective: float | None = None
    ) -> Outcome:
        options = ServingOptions(**serving_options)
        served = simulate(
            self.machine(),
            arrivals,
            token_budget=self.llm.stats()["token_budget"],
            max_running=options.max_running or MAX_RUNNING,
            policy_config=options.policy_config,
            kv=self.llm.kv_budget,
        )
        return outcome_of(served, objective)

    def _max_rate(self) -> float:
        """Requests a second that the stages finish when all arrive at once."""
        at_once = poisson(self.lengths, self.options.requests, _AT_ONCE, self.options.seed)
        return self._simulated({}, at_once).requests_per_second


def _as_described(measured: Machine, devices: Sequence[Machine]) -> Machine:
    """A measured machine with its devices as they are described, because they are emulated."""
    return replace(
        measured,
        stages=tuple(device.stages[0] for device in devices),
        buffers=tuple(device.buffers_of(0) for device in devices),
        device=devices[0].device,
        draft=devices[0].draft,
        draft_buffers=devices[0].draft_buffers,
    )


def _gaps(served: Sequence[Served], after: float) -> list[float]:
    return [b - a for one in served for a, b in pairwise(one.token_times) if a >= after]


def _compared(there: Outcome, live: Outcome) -> dict[str, float]:
    """Simulated to live, figure by figure."""
    pairs = {
        "tokens_per_second": (there.tokens_per_second, live.tokens_per_second),
        "ttft_p50": (there.ttft.p50, live.ttft.p50),
        "itl_p50": (there.itl.p50, live.itl.p50),
        "itl_p99": (there.itl.p99, live.itl.p99),
    }
    return {name: a / b if b else 0.0 for name, (a, b) in pairs.items()}


# -- whoever serves --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Job:
    """One request. ``at``: seconds from the start of the run to its arrival."""

    at: float
    prompt: tuple[int, ...]
    max_tokens: int


def jobs_of(arrivals: Sequence[Arrival], vocab_size: int, seed: int) -> tuple[Job, ...]:
    """Prompts of made-up tokens for some arrivals; the same for every system."""
    return tuple(
        Job(one.at, made_up(f"{seed} serve {i}", one.num_prompt_tokens, vocab_size), one.num_output_tokens)
        for i, one in enumerate(arrivals)
    )


def serve_live(
    llm: LLM, serving_options: Mapping[str, object], jobs: Sequence[Job], until: int | None = None
) -> list[Served]:
    """Run all jobs on the pipeline, each from its arrival; token times are the engine's.

    ``serving_options``: those to change before; they stay changed. ``until``: the index of the job after whose end
    every other one gets one more token and is ended.
    """
    llm.tune(**serving_options)
    start, requests = time.monotonic(), list[Request]()
    try:
        for job in jobs:
            time.sleep(max(0.0, start + job.at - time.monotonic()))
            params = SamplingParams(max_tokens=job.max_tokens, ignore_eos=True)
            requests.append(llm.submit(job.prompt, params))
        if until is not None:
            _end_after(requests, jobs, until)
        outputs = [whole(request.result()) for request in requests]
    except BaseException:
        for request in requests:
            request.abort()
        raise
    return [
        Served(job.at, [job.at + t for t in output.token_times], output.queue_seconds)
        for job, output in zip(jobs, outputs, strict=True)
    ]


def _end_after(requests: Sequence[Request], jobs: Sequence[Job], until: int) -> None:
    over = jobs[until].at + requests[until].result().token_times[-1]
    for request, job in zip(requests, jobs, strict=True):
        for _ in request:  # leaving early aborts it
            if job.at + request.output.token_times[-1] > over:
                break


def serve_batch(plain: PlainMlxLm, jobs: Sequence[Job], until: int | None = None) -> list[Served]:
    """Run all jobs in mlx-lm's batch generator, each from its arrival; token times are the process's."""
    times = plain.serve([(job.at, job.prompt, job.max_tokens) for job in jobs], until)
    return [Served(job.at, each) for job, each in zip(jobs, times, strict=True)]
