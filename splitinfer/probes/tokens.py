"""Tokens by one way through a pipeline: greedy and sampled, without drafts and with them, several answers at once, and
from KV kept across a restart; and of a stage across two processes. Plain mlx-lm computes the same tokens in the same
process.

Where a pipeline chooses another token than the reference, the request is made again with the reference's tokens up to
and including that one. So every position is compared, whatever came before it.

Where arithmetic is batch invariant, tokens must be equal. Elsewhere a token may be another one where the reference's
own margin was no larger than what rounding moves: as much as mlx-lm's own logits move when it computes the same rows in
other numbers, or a few units in the last place of the largest logit, whichever is more. Any other token is wrong. A
token's *margin* is how far, in logits, the next likely one was from being chosen.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from splitinfer.core.json_text import dumps
from splitinfer.core.kv.budget import BLOCK
from splitinfer.core.layout import LOCAL
from splitinfer.core.link_transport import JACCL, RDMA, RING
from splitinfer.core.rng import position_key
from splitinfer.core.sequence import SamplingParams
from splitinfer.core.speculation.flight import OFF, Flight
from splitinfer.demo import TARGET
from splitinfer.engine.worker.handshake import AccessControl
from splitinfer.engine.worker.worker import Worker
from splitinfer.keyring import Keyring
from splitinfer.llm import LLM, Settings
from splitinfer.llm.prompts import tokenizer_of
from splitinfer.models.blas import is_batch_invariant
from splitinfer.models.checkpoint import read_config
from splitinfer.models.hub import open_model
from splitinfer.models.loader import resolve_dtype
from splitinfer.models.memory import on_gpu
from splitinfer.probes.child import Report
from splitinfer.probes.finding import SEND, STOP, Fault, Finding, Outcome, failed, passed
from splitinfer.probes.machine import DEMO_LAYERS
from transports import LinkOptions, TransportUnavailable, listen
from transports.rdma.probe import device_for

# -- plain mlx-lm's own tokens -----------------------------------------------------------------------------------------

PROMPT = "Once upon a time there was a poor woodcutter who"
_CHUNK = 7  # rows: neither one nor all, and no power of two


@dataclass(frozen=True, slots=True)
class Expected:
    """An answer's tokens, and the margin of each in logits. ``logits``: [N, vocabulary]."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    margins: tuple[float, ...]
    logits: mx.array


class PlainModel:
    """The demo model as mlx-lm loads it, or another one with its tokenizer, in the dtype that "auto" gives a stage."""

    def __init__(self, folder: Path = TARGET) -> None:
        self._model, _ = load_model(folder)
        dtype = resolve_dtype("auto", gpu=on_gpu())
        if dtype is not None:
            self._model.set_dtype(getattr(mx, dtype))
        tokenizer = tokenizer_of(open_model("demo"))
        assert tokenizer is not None
        self.vocab_size, self.prompt = tokenizer.vocab_size, tuple(tokenizer.encode(PROMPT))

    def answer(self, prompt: Sequence[int], num_tokens: int, sampling: SamplingParams) -> Expected:
        """What mlx-lm answers, its random key that of the token's position, as a pipeline's is."""
        cache, tokens, margins, rows = make_prompt_cache(self._model), list[int](), list[float](), list[mx.array]()
        new = list(prompt)
        for position in range(len(prompt), len(prompt) + num_tokens):
            rows.append(self._model(mx.array([new]), cache=cache)[0, -1:])
            token, margin = self._choose(rows[-1][0], position, sampling)
            tokens.append(token)
            margins.append(margin)
            new = [token]
        return Expected(tuple(prompt), tuple(tokens), tuple(margins), mx.concatenate(rows))

    def rounding(self, expected: Expected) -> dict[str, Any]:
        """How far the same logits move when more rows are computed at once, and how large they are."""
        tokens, count = [*expected.prompt, *expected.tokens[:-1]], len(expected.tokens)
        wanted, most = expected.logits.astype(mx.float32), 0.0
        for size in (len(tokens), _CHUNK):
            cache, rows = make_prompt_cache(self._model), list[mx.array]()
            for at in range(0, len(tokens), size):
                rows.append(self._model(mx.array([tokens[at : at + size]]), cache=cache)[0])
            moved = mx.abs(mx.concatenate(rows)[-count:].astype(mx.float32) - wanted).max()
            most = max(most, cast(float, moved.item()))
        return {
            "logits_move": most,
            "largest_logit": cast(float, mx.abs(wanted).max().item()),
            "epsilon": mx.finfo(expected.logits.dtype).eps,
            "dtype": self.dtype,
            "exact": is_batch_invariant(),
        }

    @cached_property
    def dtype(self) -> str:
        """The dtype of its norms, which are never quantised."""
        return str(self._model.model.norm.weight.dtype).removeprefix("mlx.core.")

    def _choose(self, logits: mx.array, position: int, sampling: SamplingParams) -> tuple[int, float]:
        """The token of one row's logits [vocabulary], and its margin."""
        scores = logits - mx.logsumexp(logits, keepdims=True)
        scale = sampling.temperature or 1.0
        if sampling.temperature:
            key = mx.array(position_key(sampling.seed or 0, position), dtype=mx.uint32)
            noise = mx.random.gumbel((self.vocab_size,), key=key)
            scores = scores[: self.vocab_size] * (1.0 / scale) + noise
        top = cast(list[float], mx.sort(scores.astype(mx.float32))[-2:].tolist())
        return cast(int, mx.argmax(scores).item()), scale * (top[1] - top[0])


# -- tokens by one way -------------------------------------------------------------------------------------------------

GREEDY, SAMPLED = SamplingParams(seed=0), SamplingParams(temperature=0.8, seed=7)
CASES = {"greedy": GREEDY, "sampled": SAMPLED}
_LAYERS = (5, 7)  # here, and on the worker
_SCALE = 0.18  # of random weights, so that layers matter and tokens vary
_DRAFTS = Flight(first=3, further=2, in_flight=2)
_KEPT_PROMPT, _KEPT_TOKENS = BLOCK + 40, 4
_TOGETHER = (6, 8, 11, 15)  # tokens of the prompts of answers at once: unequal
_MOST_PARTINGS = 4  # of one answer; with more than that something is wrong, whatever the margins
_STOP_SECONDS = 2.0
TIMES_MOVED, _UNITS = 4.0, 8.0  # of a margin: both logits move, and other kernels move them otherwise


def measure(options: Mapping[str, Any], report: Report) -> None:
    """Report each kind of answer.

    ``options``: ``way``, a name in ``registry``; ``tokens`` of an answer; ``restarts``, whether KV is kept across a
    restart, too; ``worker``, where one is that runs elsewhere.
    """
    if options["way"] == "worker, rdma":
        try:
            device_for("jaccl")
        except TransportUnavailable as problem:
            report(Finding("", Outcome.NOT_AVAILABLE, problem.reason))
            return
    is_halved, model = options["way"] == "across", TARGET
    if is_halved:
        model = even_model(Path(options["folder"]) / "even")
    plain = PlainModel(model)
    cases = {name: plain.answer(plain.prompt, options["tokens"], one) for name, one in CASES.items()}
    rounding = plain.rounding(cases["greedy"]) | ({"exact": False} if is_halved else {})  # sums of two halves
    report(passed("rounding", rounding_in_words(rounding), rounding))

    def look(name: str, find: Callable[[], Mapping[str, Any]]) -> None:
        report.guarded(name, lambda: judge_answer(name, find(), rounding))

    with _second_stage(options) as second:
        with pipeline(second, model, draft=None if is_halved else "demo-draft") as llm:
            report.is_alive()
            for name, expected in cases.items():
                look(name, partial(_answered, llm, expected, CASES[name], OFF))
            for name, expected in () if is_halved else cases.items():
                look(f"{name}, drafts", partial(_with_drafts, llm, expected, CASES[name]))
            if options["way"] == "one process":
                prompts = [made_up_prompt(length, plain.vocab_size) for length in _TOGETHER]
                several = [plain.answer(prompt, options["tokens"], GREEDY) for prompt in prompts]
                look("several at once", partial(_together, llm, several))
        if options.get("restarts"):
            long = plain.answer(made_up_prompt(_KEPT_PROMPT, plain.vocab_size), _KEPT_TOKENS, GREEDY)
            kept = Path(options["folder"]) / f"kv of {options['way']}"
            look("kept KV", partial(_across_a_restart, lambda: pipeline(second, kv_dir=kept), long, report.is_alive))


# -- pipelines ---------------------------------------------------------------------------------------------------------


@contextmanager
def pipeline(second: Mapping[str, Any] | None, model: Path = TARGET, **settings: Any) -> Iterator[LLM]:
    """The demo model, or one like it, over one stage or two. ``second``: of a layout; both, if it is across two."""
    stages: list[dict[str, Any]] = [{"name": "first", "layers": DEMO_LAYERS}]
    if second is not None and "across" in second:
        stages = [{**stages[0], **second}]
    elif second is not None:
        stages = [{"name": "first", "layers": _LAYERS[0]}, {"name": "second", "layers": _LAYERS[1], **second}]
    limits = Settings(context=1024, connect_timeout=8.0, rejoin_timeout=0.0, **settings)
    with LLM({"model": str(model), "stages": stages}, settings=limits) as llm:
        yield llm


def even_model(folder: Path) -> Path:
    """A random model like the demo model, in a new folder; its heads can be halved, as the three of that cannot."""
    config = {**read_config(TARGET), "num_attention_heads": 4, "num_key_value_heads": 2}
    weights = dict(tree_flatten(llama.Model(llama.ModelArgs.from_dict(config)).parameters()))
    for number, (name, array) in enumerate(weights.items()):
        if array.ndim > 1:
            weights[name] = mx.random.normal(array.shape, scale=_SCALE, key=mx.random.key(number))
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(dumps(config))
    return folder


@contextmanager
def _second_stage(options: Mapping[str, Any]) -> Iterator[dict[str, Any] | None]:
    """The second stage of a layout, its worker running; ``None`` if there is one stage only."""
    way = options["way"]
    here = {
        "one process": None,
        "tcp": {"address": LOCAL},
        "across": {"across": [LOCAL, LOCAL]},
        "ring": {"address": LOCAL, "transport": RDMA, "backend": RING},
    }
    with ExitStack() as stack:
        if way in here:
            yield here[way]
        elif way == "inproc":
            yield {"address": stack.enter_context(_worker_here("inproc://selftest"))}
        elif way == "curve":
            yield stack.enter_context(_keyed_worker(Path(options["folder"])))
        else:
            rdma = {"transport": RDMA, "backend": JACCL} if way == "worker, rdma" else {}
            yield {**options["worker"], **rdma}


@contextmanager
def _worker_here(address: str, options: LinkOptions | None = None, **more: Any) -> Iterator[str]:
    """A worker on threads of this process; where it listens."""
    listener = listen(address, options=options or LinkOptions())
    worker = Worker(listener, **more)
    try:
        yield listener.address
    finally:
        worker.stop(timeout=_STOP_SECONDS)


@contextmanager
def _keyed_worker(folder: Path) -> Iterator[dict[str, Any]]:
    """A worker on loopback with keys of its own, which admits this process's; none of them are the user's."""
    os.environ["XDG_CONFIG_HOME"] = str(folder / "config")
    keys = Keyring(folder / "worker")
    keys.admit(Keyring().own().public, "selftest")
    access = AccessControl(keys)
    with _worker_here("tcp://127.0.0.1:0", access.options, keys=keys, access=access) as address:
        yield {"address": address, "key": keys.own().public}


# -- answers -----------------------------------------------------------------------------------------------------------


def tolerance(rounding: Mapping[str, Any]) -> float:
    """The margin, in logits, up to which another token is rounding.

    >>> tolerance({"exact": True, "logits_move": 0.0})
    0.0
    >>> tolerance({"exact": False, "logits_move": 0.0625, "epsilon": 2**-10, "largest_logit": 16.0})
    0.25
    """
    if rounding["exact"]:
        return 0.0
    units: float = _UNITS * rounding["epsilon"] * rounding["largest_logit"]
    return max(TIMES_MOVED * float(rounding["logits_move"]), units)


def parting(wanted: Sequence[int], given: Sequence[int]) -> int | None:
    """The first place, counted from 0, at which two answers differ; ``None`` if they are the same.

    >>> parting([5, 6, 7], [5, 8, 7]), parting([5, 6], [5]), parting([5, 6], [5, 6])
    (1, 1, None)
    """
    pairs = zip_longest(wanted, given)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), None)


def made_up_prompt(length: int, vocab_size: int) -> list[int]:
    """Token ids that do not repeat soon."""
    return [(i * 37 + 11 + i * i) % vocab_size for i in range(length)]


def _answered(llm: LLM, expected: Expected, sampling: SamplingParams, flight: Flight) -> dict[str, Any]:
    """What the pipeline answers, compared at every position; figures of the first request."""
    given, partings, first = 0, list[dict[str, Any]](), None
    while given < len(expected.tokens) and len(partings) < _MOST_PARTINGS:
        params = replace(sampling, max_tokens=len(expected.tokens) - given, ignore_eos=True)
        output = llm.submit([*expected.prompt, *expected.tokens[:given]], params, flight=flight).result()
        first = first or output
        at = parting(expected.tokens[given:], output.token_ids)
        if at is None:
            break
        given += at
        token = output.token_ids[at] if at < len(output.token_ids) else None
        margin = expected.margins[given] if token is not None else None
        partings.append({"at": given, "token": token, "wanted": expected.tokens[given], "margin": margin})
        given += 1
    assert first is not None
    times = first.token_times
    rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 and times[-1] > times[0] else None
    return {
        "tokens": len(expected.tokens),
        "compared": len(expected.tokens) if len(partings) < _MOST_PARTINGS else given,
        "partings": partings,
        "ttft_seconds": times[0] if times else None,
        "tokens_per_second": rate,
        "cached_tokens": first.num_cached_tokens,
    }


def _together(llm: LLM, expected: Sequence[Expected]) -> dict[str, Any]:
    """As ``_answered``, of answers that are computed together."""
    with ThreadPoolExecutor(len(expected)) as pool:
        found = list(pool.map(lambda each: _answered(llm, each, GREEDY, OFF), expected))
    summed = {name: sum(each[name] for each in found) for name in ("tokens", "compared")}
    return {**found[0], **summed, "partings": [parting for each in found for parting in each["partings"]]}


def _with_drafts(llm: LLM, expected: Expected, sampling: SamplingParams) -> dict[str, Any]:
    before = _speculation(llm)
    found = _answered(llm, expected, sampling, _DRAFTS)
    after = _speculation(llm)
    return {**found, **{f"drafts_{name}": after[name] - before[name] for name in before}}


def _speculation(llm: LLM) -> dict[str, int]:
    said = llm.stats()["speculation"] or {}
    return {name: int(said.get(name, 0)) for name in ("sent", "accepted")}


def _across_a_restart(
    open_pipeline: Callable[[], Any], expected: Expected, is_alive: Callable[[], None]
) -> dict[str, Any]:
    """A prompt longer than a block, answered, and answered again by pipelines that start anew."""
    with open_pipeline() as llm:
        is_alive()
        before = _answered(llm, expected, GREEDY, OFF)
    is_alive()
    with open_pipeline() as llm:
        is_alive()
        after = _answered(llm, expected, GREEDY, OFF)
    return {**after, "partings": [*before["partings"], *after["partings"]], "kept_before": before["cached_tokens"]}


# -- what is right -----------------------------------------------------------------------------------------------------


def rounding_in_words(rounding: Mapping[str, Any]) -> str:
    if rounding["exact"]:
        return "rows do not depend on each other, so every token must be plain mlx-lm's"
    return f"mlx-lm's own logits move by {rounding['logits_move']:.2g}; up to {tolerance(rounding):.2g} is rounding"


def judge_answer(name: str, given: Mapping[str, Any], rounding: Mapping[str, Any]) -> Finding:
    """Whether an answer has the reference's tokens, and what it was to show besides."""
    partings: Sequence[Mapping[str, Any]] = given["partings"]
    allowed = tolerance(rounding)
    wrong = [one for one in partings if one["margin"] is None or one["margin"] > allowed]
    if wrong:
        return _wrong(name, given, wrong[0], rounding)
    if given["compared"] < given["tokens"]:
        sentence = f"{len(partings)} of the first {given['compared']} tokens are not plain mlx-lm's"
        return failed(name, Fault.TOKENS, sentence, STOP, given)
    if given.get("drafts_sent") == 0:
        return failed(name, Fault.DEVICE, "the tokens are plain mlx-lm's, but no draft was sent", SEND, given)
    if "kept_before" in given and not given["cached_tokens"]:
        sentence = "the tokens are plain mlx-lm's, but KV kept on disk was not found after a restart"
        return failed(name, Fault.MEMORY, sentence, f"look at the free disk space; {SEND}", given)
    if partings:
        near = max(one["margin"] for one in partings)
        sentence = (
            f"{given['tokens']} tokens are plain mlx-lm's but for {len(partings)} that were within {near:.2g} logits "
            f"of the one chosen, which is rounding here (up to {allowed:.2g})"
        )
        return passed(name, sentence, given)
    return passed(name, f"{given['tokens']} tokens are plain mlx-lm's{_more(given)}", given)


def _more(given: Mapping[str, Any]) -> str:
    if "drafts_sent" in given:
        return f"; {given['drafts_accepted']} of {given['drafts_sent']} drafts were right"
    if "kept_before" in given:
        return f"; {given['cached_tokens']} tokens of KV came back from disk"
    return "" if not given.get("tokens_per_second") else f", {given['tokens_per_second']:.3g} a second"


def _wrong(name: str, given: Mapping[str, Any], one: Mapping[str, Any], rounding: Mapping[str, Any]) -> Finding:
    place = f"token {one['at'] + 1} of {given['tokens']}"
    if one["token"] is None:
        return failed(name, Fault.TOKENS, f"{place} never came", STOP, given)
    sentence = (
        f"{place} is {one['token']}, and plain mlx-lm's is {one['wanted']} by {one['margin']:.3g} logits; "
        f"mlx-lm's own rounding moves them by {rounding['logits_move']:.2g}"
    )
    return failed(name, Fault.TOKENS, sentence, STOP, given)
