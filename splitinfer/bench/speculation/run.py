"""What speculation in flight is worth: ``splitinfer bench --mode spec``.

Contenders, trial by trial in turns, one stream: the same stages without drafts, with synchronous blocks of several
lengths, and with blocks in flight as the controller chooses them; plain mlx-lm in one process, and its own speculative
decoding where there is a draft model. The tokens of all have to be the same.

With ``replay`` as drafter acceptance is a dial (``bench.speculation.replay``), and each of several settings is a case.
A real drafter has the acceptance it has; its cases are temperatures, on passages of real text. Then eight requests at
once, with drafts and without, because there drafts must not cost anything."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from splitinfer.bench.inputs import check_context, check_text
from splitinfer.bench.shared import machine
from splitinfer.bench.shared.child_process import ChildProcess
from splitinfer.bench.shared.measure import ratios
from splitinfer.bench.shared.printing import print_found
from splitinfer.bench.shared.systems import PlainMlxLm
from splitinfer.bench.shared.texts import OPENINGS, passages
from splitinfer.bench.shared.workload import STEP_SIZES, Task, made_up
from splitinfer.bench.speculation.plot import check_plot, plot
from splitinfer.bench.speculation.replay import Replay
from splitinfer.bench.speculation.report import (
    IN_FLIGHT,
    SEQUENTIAL,
    Case,
    Cut,
    Trial,
    best_cuts,
    case_document,
    curve,
    gpu_like,
    link_effects,
)
from splitinfer.bench.speculation.tables import spec_tables
from splitinfer.cli.progress import errors
from splitinfer.config import find_layout
from splitinfer.core.sequence import SamplingParams
from splitinfer.core.speculation.flight import FIRSTS, FURTHERS, OFF, Flight, Rig, RowTimes
from splitinfer.engine.drafts.drafters import NGRAM
from splitinfer.errors import ConfigError, WorkerLost
from splitinfer.llm import LLM, NO_DRAFT, Settings
from splitinfer.models.checkpoint import Checkpoint
from splitinfer.models.hub import fetch, open_model
from splitinfer.models.loader import resolve_dtype
from splitinfer.models.memory import on_gpu
from transports.emulated import PRESETS, LinkProfile, installed, preset

REPLAY = "replay"
_WIDTH = 130  # columns, where there is no terminal
_PROMPT = 48  # tokens
_CROWD, _CROWD_TOKENS = 8, 32  # requests at once, and tokens of each
_SYNCHRONOUS = 3  # lengths of synchronous blocks that take part: those that should be fastest
_USUAL = 0.75  # of a draft model: which lengths take part; not what is measured
_WARM_UP, _SETTLE = 24, 50  # tokens
_TEACHER_TEXT, _TEACHER_TEXTS = 400, 12  # tokens of a passage that both models read, and passages


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """What the command line asked for. ``drafter``: ``replay``, or as in a layout; ``None``: the layout's."""

    layout: str
    model: str | None
    as_json: bool
    trials: int
    decode_tokens: int
    seed: int
    link_preset: str | None
    baseline: bool
    connect_timeout: float
    drafter: str | None = None
    acceptances: tuple[float, ...] = (0.0, 0.6, 0.8, 0.9)
    draft_share: float = 0.05
    temperatures: tuple[float, ...] = (0.0, 0.8)
    text: Path | None = None
    plot: Path | None = None


@dataclass(frozen=True, slots=True)
class _Setting:
    """One case to be: at an acceptance where that is a dial, at a temperature where it is not."""

    name: str
    acceptance: float | None
    temperature: float


def measure_spec(options: SpeculationOptions) -> int:
    """Measure, then print tables and, as the last line, the document; the exit code.

    Raises:
        SplitinferError: one sentence on what cannot be measured, and why.
    """
    if options.plot is not None:
        check_plot(options.plot)
    check_text(options.text)
    found = _measure(options)
    if options.plot is not None:
        plot(found, options.plot)
    print_found(found, spec_tables(found), as_json=options.as_json, least_width=_WIDTH)
    return 0


def _measure(options: SpeculationOptions) -> dict[str, Any]:
    layout = find_layout(options.layout)
    name = options.drafter or layout.draft or REPLAY
    link = _link(options.link_preset)
    on, processors = machine.describe(), machine.free_processors()
    if name == NO_DRAFT:
        raise ConfigError("--mode spec measures drafts, and --draft none leaves nobody who drafts")
    checkpoint = open_model(options.model or layout.model or "demo")
    check_context(checkpoint, _PROMPT + max(options.decode_tokens, _SETTLE), "--decode-tokens")
    replay = Replay(_vocabulary(checkpoint)) if name == REPLAY else None
    settings = Settings(
        context=max(_PROMPT + options.decode_tokens, 256) + _TEACHER_TEXT,
        draft=None if replay is not None else name,
        connect_timeout=options.connect_timeout,
        rejoin_timeout=0.0,
        prefix_cache=False,
    )
    with ExitStack() as stack:
        if link is not None:
            stack.enter_context(installed(link))
        errors.print("loading the stages", soft_wrap=True)
        llm = stack.enter_context(
            LLM(
                options.layout,
                model=options.model,
                settings=settings,
                drafter=None if replay is None else lambda: replay,
            )
        )
        checkpoint = open_model(str(llm.layout.model))
        dtype = resolve_dtype(llm.layout.dtype, gpu=on_gpu())
        fetch(str(llm.layout.model), checkpoint, checkpoint.files, lambda _done, _total, _file: None)
        draft = name if replay is None and name != NGRAM else None
        plain = stack.enter_context(_plain(options, checkpoint, dtype, draft))
        pinned = machine.pin_stages(llm.layout.stages, None if plain is None else plain.pid, processors)
        bench = _Bench(options, llm, replay, plain, draft is not None)
        cases = bench.run()
        crowd = bench.crowd()
        rig = bench.rig()
    agreement = _teacher(options, llm, checkpoint, draft, dtype)
    in_flight = layout.num_stages
    now = Cut(
        tuple(stage.num_layers for stage in llm.layout.stages), _head_in_layers(checkpoint, llm.layout.num_layers)
    )
    points = [i / 50 for i in range(50)]
    return {
        "measured_on": {**on, "pinned": pinned, "link": None if link is None else asdict(link)},
        "layout": {"name": llm.layout.name, "layers": now.layers},
        "drafter": name,
        "trials": options.trials,
        "decode_tokens": options.decode_tokens,
        "cases": [case_document(case, in_flight) for case in cases],
        "crowd": crowd,
        "teacher_forced": agreement,
        "step_ms_by_rows": [{n: 1000 * s for n, s in stage.measured.items()} for stage in rig.stages],
        "draft_ms": 1000 * rig.draft,
        "link_ms": 1000 * rig.link,
        "draft_share_of_a_step": rig.draft / sum(stage.at(1) for stage in rig.stages),
        "curve": curve(rig, in_flight, points),
        "best_cuts": best_cuts(rig, now, in_flight),
        "links": link_effects(rig, {name: each.latency for name, each in PRESETS.items()} | {"3ms": 0.003}, in_flight),
        "gpu_like": curve(gpu_like(rig), in_flight, (0.6, 0.8, 0.9)),
    }


# -- the trials ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Bench:
    """One pipeline and its systems."""

    options: SpeculationOptions
    llm: LLM
    replay: Replay | None
    plain: PlainMlxLm | None
    has_draft_model: bool
    vocab_size: int = field(init=False)
    prompts: list[list[int]] = field(init=False)
    likely: dict[float | None, list[int]] = field(default_factory=dict)  # lengths of synchronous blocks, by acceptance

    def __post_init__(self) -> None:
        self.vocab_size = _vocabulary(open_model(str(self.llm.layout.model)))
        self.prompts = _prompts(self.options, self.llm, self.vocab_size, self.replay is not None)

    def run(self) -> list[Case]:
        """Case after case, each trial by trial: the controller learns a drafter once."""
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
            return [_Setting(f"temperature {t:g}", None, t) for t in self.options.temperatures]
        return [_Setting(f"acceptance {a:g}", a, 0.0) for a in self.options.acceptances]

    def _warm_up(self) -> None:
        """Every size of a block is seen before anything is timed."""
        prompt = made_up("warm up", _PROMPT, self.vocab_size)
        said = self._ask(prompt, OFF, 0.0, 0, _SETTLE)
        if self.replay is not None:
            self.replay.know(prompt, said.token_ids)
            self.replay.seconds = self.options.draft_share * sum(stage.at(1) for stage in self.rig().stages)
        for flight in (*map(Flight, FIRSTS), *(Flight(3, n, 2) for n in FURTHERS), OFF):
            self._ask(prompt, flight, 0.0, 0, _WARM_UP)
        _tell(
            f"a step of one row takes {1000 * self.rig().latency(1):.3g} ms, a draft {1000 * self.rig().draft:.3g} ms"
        )

    def _settle(self, setting: _Setting) -> None:
        """The controller meets this drafter before anything is timed, as one that has run for a while."""
        if self.replay is not None:
            self.replay.error = 1 - (setting.acceptance or 0.0)
        self._ask(made_up("warm up", _PROMPT, self.vocab_size), None, setting.temperature, 0, _SETTLE)

    def _take_turns(self, setting: _Setting, number: int) -> Iterator[tuple[str, Trial]]:
        """One trial of each system; every other time the other way round, because machines drift."""
        prompt = self.prompts[number % len(self.prompts)]
        seed, t, tokens = self.options.seed + number, setting.temperature, self.options.decode_tokens
        if self.replay is not None:
            self.replay.error, self.replay.seed = 1 - (setting.acceptance or 0.0), seed
            if tuple(prompt) not in self.replay:
                self.replay.know(prompt, self._ask(prompt, OFF, t, seed, tokens).token_ids)
        flights: dict[str, Flight | None] = {SEQUENTIAL: OFF, IN_FLIGHT: None}
        flights |= {f"synchronous {k}": Flight(k) for k in self._likely(setting.acceptance)}
        options = [*flights] if number % 2 == 0 else [*reversed(flights)]
        for name in options:
            trial = self._ask(prompt, flights[name], t, seed, tokens)
            self._say(number, setting, name, trial)
            yield name, trial
        if self.plain is not None and t == 0.0:
            for name, trial in self._others(prompt, number):
                self._say(number, setting, name, trial)
                yield name, trial

    def _likely(self, acceptance: float | None) -> list[int]:
        """The lengths of synchronous blocks that should be fastest; the same ones in every trial."""
        if acceptance not in self.likely:
            rig, a = self.rig(), acceptance if acceptance is not None else _USUAL
            best = sorted(FIRSTS, key=lambda k: -rig.synchronous(k, a))[:_SYNCHRONOUS]
            self.likely[acceptance] = sorted(best)
        return self.likely[acceptance]

    def _others(self, prompt: Sequence[int], number: int) -> Iterator[tuple[str, Trial]]:
        assert self.plain is not None
        task = Task("decode", number, tuple(prompt), self.options.decode_tokens)
        run = self.plain.run(task, STEP_SIZES[0])
        yield "plain mlx-lm", Trial(run.seconds_per_token, run.token_ids)
        for drafts in (2, 3) if self.has_draft_model else ():
            run = self.plain.run_with_drafts(task, drafts)
            yield f"mlx-lm with {drafts} drafts", Trial(run.seconds_per_token, run.token_ids)

    def _ask(self, prompt: Sequence[int], flight: Flight | None, t: float, seed: int, tokens: int) -> Trial:
        """One answer, and what it took."""
        before = self.llm.stats()["speculation"]
        params = SamplingParams(max_tokens=tokens, temperature=t, seed=seed, ignore_eos=True)
        output = self.llm.submit(prompt, params, flight=flight).result()
        if output.error is not None:
            raise WorkerLost(output.error)
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
            rig=_rig_of_trial(before, after) if sum(after["tried_at"]) else None,
            runs={n: count - before["runs"].get(n, 0) for n, count in after["runs"].items()},
            flight=Flight(**after["flight"]),
        )

    def crowd(self) -> dict[str, Any]:
        """Many requests at once, with drafts allowed and without: tokens per second of all."""
        rates: dict[str, list[float]] = {SEQUENTIAL: [], IN_FLIGHT: []}
        for number in range(self.options.trials):
            options = [*rates] if number % 2 == 0 else [*reversed(rates)]
            for name in options:
                rates[name].append(self._crowd_rate(number, OFF if name == SEQUENTIAL else None))
        ratio = ratios(rates[IN_FLIGHT], rates[SEQUENTIAL])
        _tell(f"{_CROWD} requests at once: {ratio.median:.3f} of the speed without drafts")
        return {"requests": _CROWD, "tokens_per_second": rates, "ratio": asdict(ratio)}

    def _crowd_rate(self, number: int, flight: Flight | None) -> float:
        params = SamplingParams(max_tokens=_CROWD_TOKENS, ignore_eos=True)
        prompts = [made_up(f"crowd {number} {i}", _PROMPT, self.vocab_size) for i in range(_CROWD)]
        requests = [self.llm.submit(prompt, params, flight=flight) for prompt in prompts]
        outputs = [request.result() for request in requests]
        first = max(output.token_times[0] for output in outputs)
        last = min(output.token_times[-1] for output in outputs)
        tokens = sum(sum(first < at <= last for at in output.token_times) for output in outputs)
        return tokens / (last - first)

    def rig(self) -> Rig:
        """What steps, drafts and links take by now."""
        return _rig(self.llm)

    def _say(self, number: int, setting: _Setting, name: str, trial: Trial) -> None:
        acceptance = f", acceptance {trial.acceptance:.2f}" if trial.tried else ""
        _tell(
            f"trial {number + 1} of {self.options.trials}, {setting.name}: {name}: "
            f"{1 / trial.seconds_per_token:.3g} tokens/s{acceptance}"
        )


def _rig(llm: LLM) -> Rig:
    found = llm.stats()["speculation"]
    stages = tuple(RowTimes(seconds) for seconds in found["step_seconds_by_rows"])
    return Rig(stages, found["draft_seconds"] or 0.0, found["link_seconds"])


def _rig_of_trial(before: Mapping[str, Any], after: Mapping[str, Any]) -> Rig:
    """What everything took in one trial; what was not used in it, as it was by then."""
    stages = [dict(seconds) for seconds in after["step_seconds_by_rows"]]
    earlier = {(stage, rows): (count, seconds) for stage, rows, count, seconds in before["steps"]}
    for stage, rows, count, seconds in after["steps"]:
        count_before, seconds_before = earlier.get((stage, rows), (0, 0.0))
        if count > count_before:
            stages[stage][rows] = (seconds - seconds_before) / (count - count_before)
    drafts, drafting = (a - b for a, b in zip(after["drafting"], before["drafting"], strict=True))
    trips, link = (a - b for a, b in zip(after["links"], before["links"], strict=True))
    return Rig(
        tuple(map(RowTimes, stages)),
        drafting / drafts if drafts else after["draft_seconds"] or 0.0,
        link / trips / len(stages) if trips else after["link_seconds"],
    )


# -- what takes part -----------------------------------------------------------------------------


def _link(name: str | None) -> LinkProfile | None:
    try:
        return None if name is None else preset(name)
    except ValueError as error:
        raise ConfigError(str(error)) from error


@contextmanager
def _plain(
    options: SpeculationOptions, checkpoint: Checkpoint, dtype: str | None, draft: str | None
) -> Iterator[PlainMlxLm | None]:
    if not options.baseline:
        yield None
        return
    errors.print("loading the whole model in plain mlx-lm", soft_wrap=True)
    folder = None if draft is None else str(open_model(draft).folder.resolve())
    plain = PlainMlxLm(str(checkpoint.folder.resolve()), dtype, draft=folder)
    try:
        yield plain
    finally:
        plain.close()


def _prompts(options: SpeculationOptions, llm: LLM, vocab_size: int, is_made_up: bool) -> list[list[int]]:
    """A prompt for each trial: beginnings of passages, or made up where only a number of drafts is right."""
    if is_made_up or llm.tokenizer is None:
        return [list(made_up(f"{options.seed} spec {i}", _PROMPT, vocab_size)) for i in range(options.trials)]
    texts = list(OPENINGS) if options.text is None else passages(options.text, options.trials, 8 * _TEACHER_TEXT)
    return [llm.encode(text)[:_PROMPT] for text in texts]


def _teacher(
    options: SpeculationOptions, llm: LLM, checkpoint: Checkpoint, draft: str | None, dtype: str | None
) -> dict[str, Any] | None:
    """How often the draft model agrees with its target on the text; with a text and a draft model only."""
    if options.text is None or draft is None or llm.tokenizer is None:
        return None
    texts = [
        llm.encode(text)[:_TEACHER_TEXT]
        for text in passages(options.text, max(_TEACHER_TEXTS, options.trials), 8 * _TEACHER_TEXT)
    ]
    child = ChildProcess("splitinfer.bench.speculation.agreement")
    child.tell({
        "target": str(checkpoint.folder.resolve()), "draft": str(open_model(draft).folder.resolve()), "dtype": dtype,
        "texts": texts, "temperature": max(options.temperatures) or 1.0, "seed": options.seed,
        "vocab_size": llm.tokenizer.vocab_size,
    })  # fmt: skip
    try:
        return {**child.hear(), "text": options.text.name}
    finally:
        child.close()


def _vocabulary(checkpoint: Checkpoint) -> int:
    return checkpoint.vocab_size or 2


def _head_in_layers(checkpoint: Checkpoint, num_layers: int) -> float:
    """The head's work as a number of layers: decoding reads all weights once, so by bytes."""
    sizes = {name: info.nbytes for name, info in checkpoint.tensors.items()}
    in_layers = sum(size for name, size in sizes.items() if ".layers." in name)
    others = [size for name, size in sizes.items() if ".layers." not in name]
    return max(others, default=0) * num_layers / max(1, in_layers)


def _tell(text: str) -> None:
    errors.print(text, soft_wrap=True)
