"""``splitinfer bench --mode speculation --streams 2,4,8,16``: drafts for several streams at once.

For each acceptance and number of streams the systems take turns, every other trial in reverse order: without drafts in
as many groups as stages and in fewer, and with the live choice of groups and drafts. All get the same prompts; drafts
come from ``replay``, which is right as often as was asked for, and all answers must have the same tokens. Rates are of
the time in which all streams decode.

Then streams whose drafts are never right beside streams whose drafts nearly always are: each to its own speed without
drafts. And requests that come and go (``--come-and-go``): Poisson arrivals, one to twelve at once, to no drafts and to
fixed choices.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

from rich.table import Table

from splitinfer.bench.shared import machine as this_machine
from splitinfer.bench.shared.measure import quantile
from splitinfer.bench.shared.options import Options
from splitinfer.bench.shared.printing import say
from splitinfer.bench.shared.systems import open_stages, plain_layout, together, whole
from splitinfer.bench.shared.workload import alternating, made_up
from splitinfer.bench.speculation.replay import Replay
from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.core.sequence import SamplingParams
from splitinfer.core.speculation.flight import OFF, Flight
from splitinfer.llm import LLM, Request

LIVE = "drafts"
_PROMPT = 16  # tokens
_MIXED = ((0.0, 0.95), (0.0, 0.0, 0.95, 0.95), (0.3, 0.5, 0.7, 0.9))
_MOST_AT_ONCE = 12
_FIXED = (1, 2, 4)  # drafts of the fixed choices beside which requests come and go


@dataclass(frozen=True, slots=True)
class Choice:
    """``groups`` and ``flight`` of all streams; ``None``: as the live choice has it."""

    groups: int | None = None
    flight: Flight | None = None


def none_in(groups: int) -> str:
    """The name of a system without drafts."""
    return f"no drafts, {groups} group{'s' if groups > 1 else ''}"


def measure(options: Options) -> dict[str, Any]:
    """Measure, and return the document.

    Raises:
        SplitinferError: something cannot be measured.
    """
    streams = options.streams or ()
    checkpoint = options.checkpoint
    replay = Replay(checkpoint.vocab_size or 2)
    context, most = max(512, 2 * (_PROMPT + options.decode_tokens)), max(_MOST_AT_ONCE, *streams)
    settings = options.settings(context, draft=None, max_running=most)
    on = this_machine.describe()
    with ExitStack() as stack:
        llm = open_stages(stack, options, settings, drafter=lambda: replay)
        pinned = this_machine.pin_stages(llm.layout.stages)
        trials = _Several(options, llm, replay, checkpoint.vocab_size or 2)
        trials.warm_up()
        cases = [trials.case((a,) * n) for a in options.acceptances for n in streams]
        mixed = [trials.case(each) for each in _MIXED]
        visits = trials.come_and_go(options.come_and_go) if options.come_and_go else None
    return {
        "measured_on": {**on, "pinned": pinned},
        "layout": plain_layout(llm),
        "trials": options.trials,
        "decode_tokens": options.decode_tokens,
        "cases": cases,
        "mixed": mixed,
        "come_and_go": visits,
    }


@dataclass(slots=True)
class _Several:
    options: Options
    llm: LLM
    replay: Replay
    vocab_size: int
    known: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)

    @property
    def num_stages(self) -> int:
        return self.llm.layout.num_stages

    def warm_up(self) -> None:
        """Steps of many sizes, so that what follows is chosen by known costs."""
        for acceptance in (0.9, 0.6):
            for count in sorted({1, *(self.options.streams or ())}):
                prompts = self._prompts(f"warm up {count}", (acceptance,) * count)
                self._ask(prompts, Choice())

    def case(self, acceptance: tuple[float, ...]) -> dict[str, Any]:
        """One number of streams, with each one's acceptance."""
        count = len(acceptance)
        systems = {none_in(groups): Choice(groups, OFF) for groups in range(min(self.num_stages, count), 0, -1)}
        systems[LIVE] = Choice()
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
        for number in range(self.options.trials):
            prompts = self._prompts(f"{number}", acceptance)
            for name in alternating(list(systems), number):
                found[name].append(self._ask(prompts, systems[name]))
            shares = ", ".join(f"{a:g}" for a in sorted(set(acceptance)))
            rates = ", ".join(f"{name} {each[-1]['rate']:.4g}/s" for name, each in found.items())
            say(f"{count} streams, acceptance {shares}, trial {number + 1}: {rates}")
        today = none_in(min(self.num_stages, count))
        return {
            "acceptance": list(acceptance),
            "today": today,
            "systems": {name: _summary(each, found[today]) for name, each in found.items()},
            "to_best_without": min(_ratio(found[LIVE], each) for name, each in found.items() if name != LIVE),
            "same_tokens": all(one["tokens"] == found[today][i]["tokens"]
                               for each in found.values() for i, one in enumerate(each)),
        }  # fmt: skip

    def _prompts(self, name: str, acceptance: Sequence[float]) -> list[tuple[int, ...]]:
        """Prompts whose answers are known to the drafter, which errs about each as often as was asked for."""
        prompts = [
            tuple(made_up(f"{self.options.seed} several {name} {len(acceptance)} {i}", _PROMPT, self.vocab_size))
            for i in range(len(acceptance))
        ]
        unknown = [prompt for prompt in prompts if prompt not in self.known]
        if unknown:
            answers = self._ask(unknown, Choice(None, OFF))["tokens"]
            self.known |= dict(zip(unknown, answers, strict=True))
        for prompt, share in zip(prompts, acceptance, strict=True):
            self.replay.know(prompt, self.known[prompt], error=1 - share)
        return prompts

    def _ask(self, prompts: Sequence[tuple[int, ...]], system: Choice) -> dict[str, Any]:
        """All requests at once, by one system."""
        self._use(system)
        params = SamplingParams(max_tokens=self.options.decode_tokens, ignore_eos=True)
        run = together([
            (time.monotonic(), self.llm.submit(list(prompt), params, flight=system.flight)) for prompt in prompts
        ])  # fmt: skip
        times = run.token_times
        first, last = max(each[0] for each in times), min(each[-1] for each in times)
        counted = [[at for at in each if first < at <= last] for each in times]
        return {
            "rate": sum(map(len, counted)) / (last - first),
            "rates": [len(each) / (last - first) for each in counted],
            "gaps": sorted(b - a for each in counted for a, b in pairwise(each)),
            "per_token": [(each[-1] - each[0]) / (len(each) - 1) for each in times],
            "tokens": list(run.token_ids),
            "choice": self.llm.stats()["grouping"],
        }

    def _use(self, system: Choice) -> None:
        change = partial(Scheduler.fix_groups, count=system.groups)
        self.llm._engine.call(lambda loop: loop.tune("groups", change))

    # -- requests that come and go -----------------------------------------------------------------

    def come_and_go(self, seconds: float) -> dict[str, Any]:
        """Poisson arrivals, the same for every system: tokens per second of all that was answered."""
        acceptance = max(self.options.acceptances)
        fixed = {
            f"{count} drafts, {groups} group{'s' if groups > 1 else ''}": Choice(groups, Flight(count))
            for groups in range(1, self.num_stages + 1)
            for count in _FIXED
        }
        systems = {none_in(self.num_stages): Choice(self.num_stages, OFF), LIVE: Choice(), **fixed}
        arrivals = self._arrivals(seconds)
        prompts = self._prompts("visits", (acceptance,) * len({one for _, one in arrivals}))
        rates = dict[str, float]()
        for name, system in systems.items():
            rates[name] = self._visited(arrivals, prompts, system)
            say(f"requests that come and go: {name}: {rates[name]:.4g} tokens/s")
        best = max((name for name in rates if name != LIVE), key=lambda name: rates[name])
        return {
            "seconds": seconds,
            "acceptance": acceptance,
            "tokens_per_second": rates,
            "best_fixed": best,
            "to_none": rates[LIVE] / rates[none_in(self.num_stages)],
            "to_best_fixed": rates[LIVE] / rates[best],
        }

    def _arrivals(self, seconds: float) -> list[tuple[float, int]]:
        """Times, and which of the prompts: about six requests at once by the speed without drafts."""
        alone = self._ask(self._prompts("pace", (0.0,) * 6), Choice(None, OFF))
        each = statistics.median(alone["per_token"]) * self.options.decode_tokens
        chance, at, found = Random(self.options.seed), 0.0, list[tuple[float, int]]()
        while at < seconds:
            found.append((at, len(found) % (2 * _MOST_AT_ONCE)))
            at += chance.expovariate(_MOST_AT_ONCE / 2 / each)
        return found

    def _visited(
        self, arrivals: Sequence[tuple[float, int]], prompts: Sequence[tuple[int, ...]], system: Choice
    ) -> float:
        self._use(system)
        began, open_now, all_of_them = time.monotonic(), list[Request](), list[Request]()
        params = SamplingParams(max_tokens=self.options.decode_tokens, ignore_eos=True)
        for at, which in arrivals:
            time.sleep(max(0.0, began + at - time.monotonic()))
            while len(open_now := [one for one in open_now if one.output.finish_reason is None]) >= _MOST_AT_ONCE:
                time.sleep(0.005)
            open_now.append(self.llm.submit(list(prompts[which]), params, flight=system.flight))
            all_of_them.append(open_now[-1])
        outputs = [whole(request.result()) for request in all_of_them]
        return sum(len(out.token_ids) for out in outputs) / (time.monotonic() - began)


def _ratio(mine: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> float:
    return float(statistics.median(a["rate"] / b["rate"] for a, b in zip(mine, theirs, strict=True)))


def _summary(trials: Sequence[Mapping[str, Any]], today: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A system's figures, and its ratios to those without drafts in as many groups as stages."""

    def longest(each: Mapping[str, Any]) -> float:
        return float(each["gaps"][-1])

    def p99(each: Mapping[str, Any]) -> float:
        return float(quantile(each["gaps"], 0.99))

    def slowest(each: Mapping[str, Any]) -> float:
        return float(quantile(sorted(each["per_token"]), 0.99))

    pairs = list(zip(trials, today, strict=True))
    return {
        "tokens_per_second": statistics.median(one["rate"] for one in trials),
        "gain": _ratio(trials, today),
        "gains": [statistics.median(b["per_token"][i] / a["per_token"][i] for a, b in pairs)
                  for i in range(len(trials[0]["rates"]))],
        "seconds_a_token_p99": statistics.median(slowest(one) for one in trials),
        "seconds_a_token_p99_to_today": statistics.median(slowest(a) / slowest(b) for a, b in pairs),
        "gap_p99_to_today": statistics.median(p99(a) / p99(b) for a, b in pairs),
        "longest_gap": max(longest(one) for one in trials),
        "longest_gap_to_today": max(longest(one) for one in trials) / max(longest(one) for one in today),
        "choice": trials[-1]["choice"],
    }  # fmt: skip


# -- tables --------------------------------------------------------------------------------------


def tables(found: Mapping[str, Any]) -> list[Table]:
    """One table of equal acceptance, one of streams that differ, one of requests that come and go."""
    found_tables = [_case_table(found, found["cases"], "Drafts for several"), _mixed_table(found["mixed"])]
    return [*found_tables, _visit_table(found["come_and_go"])] if found["come_and_go"] else found_tables


def _case_table(found: Mapping[str, Any], cases: Sequence[Mapping[str, Any]], title: str) -> Table:
    cut = "+".join(map(str, found["layout"]["layers"]))
    table = Table(
        "acceptance", "streams", "tokens/s", "gain", "to the best without",
        "s a token, p99", "gap p99", "longest gap", "groups, drafts", "same tokens",
        title=f"{title}, {found['layout']['name']} ({cut} layers); ratios are to no drafts in as many groups as stages",
        title_justify="left",
    )  # fmt: skip
    for case in cases:
        live = case["systems"][LIVE]
        choice = live["choice"]
        table.add_row(
            f"{case['acceptance'][0]:g}",
            str(len(case["acceptance"])),
            f"{live['tokens_per_second']:.4g}",
            f"{live['gain']:.2f}",
            f"{case['to_best_without']:.2f}",
            f"{live['seconds_a_token_p99_to_today']:.2f}",
            f"{live['gap_p99_to_today']:.2f}",
            f"{live['longest_gap_to_today']:.2f}",
            f"{choice['groups']}, {_spread(choice['drafts'])}",
            "yes" if case["same_tokens"] else "[bold red]no[/bold red]",
        )
    return table


def _mixed_table(cases: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(
        "acceptance of each stream", "speed of each, to no drafts", "of all", "longest gap", "same tokens",
        title="Streams that differ", title_justify="left",
    )  # fmt: skip
    for case in cases:
        live = case["systems"][LIVE]
        table.add_row(
            ", ".join(f"{a:g}" for a in case["acceptance"]),
            ", ".join(f"{gain:.2f}" for gain in live["gains"]),
            f"{live['gain']:.2f}",
            f"{live['longest_gap_to_today']:.2f}",
            "yes" if case["same_tokens"] else "[bold red]no[/bold red]",
        )
    return table


def _visit_table(found: Mapping[str, Any]) -> Table:
    table = Table(
        "system", "tokens/s", title=f"Requests that come and go for {found['seconds']:g} s, acceptance "
        f"{found['acceptance']:g}: drafts to none {found['to_none']:.2f}, to the best fixed choice "
        f"{found['to_best_fixed']:.2f}", title_justify="left",
    )  # fmt: skip
    for name, rate in found["tokens_per_second"].items():
        table.add_row(name, f"{rate:.4g}")
    return table


def _spread(drafts: Sequence[int] | None) -> str:
    if not drafts:
        return ""
    return str(drafts[0]) if len(set(drafts)) == 1 else f"{min(drafts)} to {max(drafts)}"
