"""The trials on one pipeline: each case's systems take turns, then many requests run at once.

Before anything is timed, every size of a block is run (``_warm_up``), and before each case the engine adapts to its
drafter (``_settle``). In a trial every system gets the same prompt and seed; every other trial runs the systems in
reverse order, because machines drift. Costs of a trial are differences of the engine's own counters.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from splitinfer.bench.shared.measure import ratios
from splitinfer.bench.shared.mlx_lm import PlainMlxLm
from splitinfer.bench.shared.options import Options
from splitinfer.bench.shared.printing import say
from splitinfer.bench.shared.systems import together, whole
from splitinfer.bench.shared.texts import OPENINGS, passages
from splitinfer.bench.shared.workload import Task, alternating, made_up
from splitinfer.bench.speculation.replay import Replay
from splitinfer.bench.speculation.report import IN_FLIGHT, SEQUENTIAL, Case, Trial
from splitinfer.core.sequence import SamplingParams
from splitinfer.core.speculation.flight import OFF, Flight
from splitinfer.llm import LLM
from splitinfer.models.hub import open_model

PROMPT_TOKENS = 48
TEMPERATURES = (0.0, 0.8)  # of the cases of a draft model
_DRAFT_SHARE = 0.05  # of a step's time that a draft of ``replay`` takes
_CROWD, _CROWD_TOKENS = 8, 32  # requests at once, and tokens of each
_SYNCHRONOUS = (2, 4, 7)  # lengths of synchronous blocks that are measured
_FIRSTS, _FURTHERS = (1, 2, 3, 5, 7, 11, 15), (1, 2, 4, 8, 12)  # sizes of blocks that are run first
_WARM_UP, SETTLE = 24, 50  # tokens
_PASSAGE = 3200  # characters of a passage, whose beginning is a prompt


@dataclass(frozen=True, slots=True)
class _Setting:
    """The setting of a case: an acceptance where that is an option, else a temperature."""

    name: str
    acceptance: float | None
    temperature: float


@dataclass(slots=True)
class Trials:
    """The trials of a pipeline, and what is measured beside it."""

    options: Options
    llm: LLM
    replay: Replay | None
    plain: PlainMlxLm | None
    has_draft_model: bool
    vocab_size: int = field(init=False)
    prompts: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.vocab_size = open_model(str(self.llm.layout.model)).vocab_size or 2
        self.prompts = _prompts(self.options, self.llm, self.vocab_size, self.replay is not None)

    def run(self) -> list[Case]:
        """Run all cases, one after the other, so that the engine adapts to each drafter once."""
        self._warm_up()
        cases = []
        for setting in self._settings():
            self._settle(setting)
            trials: dict[str, list[Trial]] = {}
            for number in range(self.options.trials):
                for name, trial in self._take_turns(setting, number):
                    trials.setdefault(name, []).append(trial)
            cases.append(Case(setting.name, setting.temperature, trials))
        return cases

    def _settings(self) -> list[_Setting]:
        if self.replay is None:
            return [_Setting(f"temperature {t:g}", None, t) for t in TEMPERATURES]
        return [_Setting(f"acceptance {a:g}", a, 0.0) for a in self.options.acceptances]

    def _warm_up(self) -> None:
        """Run every size of a block before anything is timed."""
        prompt = made_up("warm up", PROMPT_TOKENS, self.vocab_size)
        answer = self._ask(prompt, OFF, 0.0, 0, SETTLE)
        if self.replay is not None:
            self.replay.know(prompt, answer.token_ids)
            stages = self.llm.stats()["speculation"]["step_seconds_by_rows"]
            self.replay.seconds = _DRAFT_SHARE * sum(seconds[1] for seconds in stages)
        for flight in (*map(Flight, _FIRSTS), *(Flight(3, n, 2) for n in _FURTHERS), OFF):
            self._ask(prompt, flight, 0.0, 0, _WARM_UP)

    def _settle(self, setting: _Setting) -> None:
        """Let the engine adapt to this drafter before anything is timed."""
        if self.replay is not None:
            self.replay.error = 1 - (setting.acceptance or 0.0)
        self._ask(made_up("warm up", PROMPT_TOKENS, self.vocab_size), None, setting.temperature, 0, SETTLE)

    def _take_turns(self, setting: _Setting, number: int) -> Iterator[tuple[str, Trial]]:
        """Run one trial of each system, every other time in reverse order, because machines drift."""
        prompt = self.prompts[number % len(self.prompts)]
        seed, t, tokens = self.options.seed + number, setting.temperature, self.options.decode_tokens
        if self.replay is not None:
            self.replay.error, self.replay.seed = 1 - (setting.acceptance or 0.0), seed
            if tuple(prompt) not in self.replay:
                self.replay.know(prompt, self._ask(prompt, OFF, t, seed, tokens).token_ids)
        flights: dict[str, Flight | None] = {SEQUENTIAL: OFF, IN_FLIGHT: None}
        flights |= {f"synchronous {k}": Flight(k) for k in _SYNCHRONOUS}
        for name in alternating(list(flights), number):
            trial = self._ask(prompt, flights[name], t, seed, tokens)
            self._notify_of(number, setting, name, trial)
            yield name, trial
        if self.plain is not None and t == 0.0:
            for name, trial in self._others(prompt, number):
                self._notify_of(number, setting, name, trial)
                yield name, trial

    def _others(self, prompt: Sequence[int], number: int) -> Iterator[tuple[str, Trial]]:
        assert self.plain is not None
        task = Task("decode", number, tuple(prompt), self.options.decode_tokens)
        run = self.plain.run(task)
        yield "plain mlx-lm", Trial(run.seconds_per_token, run.token_ids)
        for drafts in (2, 3) if self.has_draft_model else ():
            run = self.plain.run(task, num_draft=drafts)
            yield f"mlx-lm with {drafts} drafts", Trial(run.seconds_per_token, run.token_ids)

    def _ask(self, prompt: Sequence[int], flight: Flight | None, t: float, seed: int, tokens: int) -> Trial:
        """Run one request and read the counters around it."""
        before = self.llm.stats()["speculation"]
        params = SamplingParams(max_tokens=tokens, temperature=t, seed=seed, ignore_eos=True)
        output = whole(self.llm.submit(prompt, params, flight=flight).result())
        after = self.llm.stats()["speculation"]
        places = tuple(
            (after["tried_at"][i] - before["tried_at"][i], after["accepted_at"][i] - before["accepted_at"][i])
            for i in range(len(after["tried_at"]))
        )
        times = output.token_times
        return Trial(
            (times[-1] - times[0]) / (len(times) - 1),
            tuple(output.token_ids),
            sum(t for t, _ in places),
            sum(right for _, right in places),
            after["sent"] - before["sent"],
            places,
        )

    def crowd(self) -> dict[str, Any]:
        """Run many requests at once, with drafts allowed and without: tokens per second of all."""
        rates: dict[str, list[float]] = {SEQUENTIAL: [], IN_FLIGHT: []}
        for number in range(self.options.trials):
            for name in alternating(list(rates), number):
                rates[name].append(self._crowd_rate(number, OFF if name == SEQUENTIAL else None))
        ratio = ratios(rates[IN_FLIGHT], rates[SEQUENTIAL])
        say(f"{_CROWD} requests at once: {ratio['median']:.3f} of the speed without drafts")
        return {"requests": _CROWD, "tokens_per_second": rates, "ratio": ratio}

    def _crowd_rate(self, number: int, flight: Flight | None) -> float:
        params = SamplingParams(max_tokens=_CROWD_TOKENS, ignore_eos=True)
        prompts = [made_up(f"crowd {number} {i}", PROMPT_TOKENS, self.vocab_size) for i in range(_CROWD)]
        return together([
            (time.monotonic(), self.llm.submit(prompt, params, flight=flight)) for prompt in prompts
        ]).tokens_per_second  # fmt: skip

    def _notify_of(self, number: int, setting: _Setting, name: str, trial: Trial) -> None:
        acceptance = f", acceptance {trial.acceptance:.2f}" if trial.tried else ""
        say(
            f"trial {number + 1} of {self.options.trials}, {setting.name}: {name}: "
            f"{1 / trial.seconds_per_token:.3g} tokens/s{acceptance}"
        )


def _prompts(options: Options, llm: LLM, vocab_size: int, is_made_up: bool) -> list[list[int]]:
    """A prompt for each trial: the beginning of a passage, or random tokens for ``Replay``, which needs no text."""
    if is_made_up or not llm.has_tokenizer:
        return [list(made_up(f"{options.seed} spec {i}", PROMPT_TOKENS, vocab_size)) for i in range(options.trials)]
    texts = list(OPENINGS) if options.text is None else passages(options.text, options.trials, _PASSAGE)
    return [llm.tokenizer.encode(text)[:PROMPT_TOKENS] for text in texts]
