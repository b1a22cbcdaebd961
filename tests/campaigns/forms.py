"""What the form of an answer costs and brings on the emulated accelerator *two-large*, with a tokenizer of 131,072.

    SPLITINFER_ACCELERATOR=two-large python -m tests.campaigns.forms TEKKEN [masks | speed | gain | hostile ...]

TEKKEN is ``mistral_common/data/tekken_240911.json`` of the wheel of mistral-common. The model is random,
so nothing but the mask makes a form.

    masks      microseconds of a mask, and bytes of its difference, p50 and p99 and the most, without a pipeline
    speed      tokens a second of 1, 8, 16 streams to those without a form, bounded and unbounded schemas; nothing
               forced goes out
    gain       tokens a second to those without a form, beside the limit that the share of forced tokens sets
    hostile    100 hostile schemas submitted beside 8 streams: the streams' longest gap, and that beside requests that
               are not
"""

import argparse
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from splitinfer.core.grammar import Grammar
from splitinfer.core.sequence import SamplingParams
from splitinfer.core.speculation.speculation import Speculation
from splitinfer.errors import SplitinferError
from splitinfer.grammar.masks import Masked, MaskSender
from splitinfer.grammar.rules import AnswerRules
from splitinfer.llm import LLM, Request, Settings
from splitinfer.llm.forms import AnswerForms
from splitinfer.llm.prompts import PromptEncoder
from splitinfer.models.hub import open_model
from splitinfer.places import caches

from .hostile_schemas import Form, hostile
from .tekken import model

Schema = dict[str, Any]

PROMPT = list(range(2000, 2016))
STREAMS = (1, 8, 16)
TEMPERATURE = 0.0  # noise for 131,072 tokens a row takes a processor longer than the emulated device for the row
_WARM = 5  # tokens of each stream that are not counted
_FOREVER = 40  # objects of an answer


def _object(properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _many(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": _FOREVER, "maxItems": _FOREVER}


_NUMBER = {"type": "integer", "minimum": 0, "maximum": 99999}
_WORDS = {"type": "string", "pattern": "^[a-z]{12,14}$"}
_COLOURS = {"enum": ["red", "green", "blue", "yellow"]}
UNBOUNDED: Schema = {"type": "string", "minLength": 4000}
BOUNDED = _many({"type": "string", "minLength": 30, "maxLength": 60})
FORCED: dict[str, Schema] = {
    "enums": _many(_object({"colour": _COLOURS, "second_colour": _COLOURS, "background": _COLOURS})),
    "invoice": _many(_object({"number": _NUMBER, "customer": _WORDS, "total": {"type": "number"}, "paid": _COLOURS})),
    "strings": _many(_object({"a": {"type": "string", "minLength": 30, "maxLength": 60}})),
    "60 % forced": _many(
        _object({"order_number": _NUMBER, "shipping_address": _COLOURS, "is_confirmed": {"type": "boolean"}})
    ),
}


def params(schema: Schema | Grammar | None, seed: int, count: int) -> SamplingParams:
    """An answer of ``count`` tokens."""
    return SamplingParams(
        grammar=schema, temperature=TEMPERATURE, seed=seed, max_tokens=count, ignore_eos=schema is None
    )


# -- masks without a pipeline ------------------------------------------------------------------


def masks(folder: Path, steps: int = 400) -> None:
    """Time masks and count their bytes: for each kind of schema, and for all of them in turns."""
    made = AnswerForms(PromptEncoder(open_model(str(folder))))
    schemas = {"unbounded": UNBOUNDED, "bounded": BOUNDED, **FORCED}
    try:
        for name, several in [*((name, [one] * 8) for name, one in schemas.items()), ("all", [*schemas.values()])]:
            began = time.monotonic()
            rules = [_rules(made, schema) for schema in several]
            compiled = time.monotonic() - began
            times, sizes = _walked(rules, steps)
            print(
                f"masks, {name}: {_at(times, 0.5):.0f} us p50, {_at(times, 0.99):.0f} p99, {max(times):.0f} most; "
                f"{_at(sizes, 0.5):.0f} bytes p50, {_at(sizes, 0.99):.0f} p99, {max(sizes):.0f} most; "
                f"{len(several)} compiled in {compiled:.2f} s"
            )
    finally:
        made.close()


def _rules(made: AnswerForms, schema: Schema) -> AnswerRules:
    rules = made.rules(params(schema, 0, 10), PROMPT, may_think=False)
    assert rules is not None
    return rules


def _walked(rules: list[AnswerRules], steps: int) -> tuple[list[float], list[float]]:
    """Answers in turns, a token each: microseconds of each mask, and the bytes of its difference."""
    drawn, sender = random.Random(0), MaskSender()
    answers = [list[int]() for _ in rules]
    times, sizes = list[float](), list[float]()
    for _ in range(steps):
        for number, (rule, answer) in enumerate(zip(rules, answers, strict=True)):
            began = time.perf_counter()
            (mask,) = rule.masks(answer, len(answer))
            times.append(1e6 * (time.perf_counter() - began))
            assert mask is not None
            (sent,) = sender.encode([Masked(number, 0, mask)])
            sizes.append(len(sent.difference))
            may = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little").nonzero()[0]
            answer.append(int(may[drawn.randrange(len(may))]))
    return times, sizes


def _at(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


# -- a pipeline --------------------------------------------------------------------------------


@contextmanager
def opened(folder: Path, streams: int, more: int = 0) -> Iterator[LLM]:
    """A pipeline of two processes; ``more``: requests that it may run beside the streams."""
    stages = [{"name": "front", "layers": 2}, {"name": "back", "layers": 2, "address": "local"}]
    settings = Settings(context=4096, max_running=max(streams, 8) + more, prefix_cache=False)
    with LLM({"model": str(folder), "stages": stages}, settings=settings) as llm:
        for count in {1, streams}:
            _run(llm, [None] * count, 8)
        yield llm


def _run(llm: LLM, schemas: list[Schema | None], count: int) -> tuple[float, float]:
    """Tokens a second of some streams together, and the share of their tokens that was forced."""
    before = llm.stats()["forced_tokens"]
    requests = [llm.submit(PROMPT, params(schema, seed, count)) for seed, schema in enumerate(schemas)]
    outputs = [request.result() for request in requests]
    for output in outputs:
        if output.error is not None:
            raise SystemExit(output.error)
    times = [output.token_times for output in outputs]
    rate = sum((len(one) - _WARM) / (one[-1] - one[_WARM - 1]) for one in times)
    return rate, (llm.stats()["forced_tokens"] - before) / sum(map(len, times))


def speed(folder: Path, trials: int, count: int) -> None:
    """Tokens a second to those without a form, nothing of which is forced."""
    force, Speculation.force = Speculation.force, lambda *_: None  # type: ignore[method-assign,assignment]
    try:
        for streams in STREAMS:
            with opened(folder, streams) as llm:
                found: dict[str, list[float]] = {"none": [], "bounded": [], "unbounded": []}
                for _ in range(trials):
                    for name, schema in (("none", None), ("bounded", BOUNDED), ("unbounded", UNBOUNDED)):
                        found[name].append(_run(llm, [schema] * streams, count)[0])
            plain = statistics.median(found["none"])
            ratios = {name: round(statistics.median(rates) / plain, 4) for name, rates in found.items()}
            print(f"speed, {streams} streams: {plain:.2f} tokens/s without; {ratios}", flush=True)
    finally:
        Speculation.force = force  # type: ignore[method-assign]


def gain(folder: Path, count: int) -> None:
    """Tokens a second of one stream and of four, to those without a form, beside tokens to steps."""
    for streams in (1, 4):
        with opened(folder, streams) as llm:
            plain, _ = _run(llm, [None] * streams, count)
            for name, schema in FORCED.items():
                rate, forced = _run(llm, [schema] * streams, 2 * count)
                limit = 1 / (1 - forced)
                print(
                    f"gain, {streams} streams, {name}: {rate / plain:.3f} times {plain:.2f} tokens/s; {forced:.0%} "
                    f"forced, limit {limit:.3f}: {rate / plain / limit:.3f} of it",
                    flush=True,
                )


def hostile_beside(folder: Path, count: int) -> None:
    """Hostile schemas beside streams, and as many requests without a form as of these were taken."""
    streams, schemas = 8, list(hostile())
    with opened(folder, streams, 8) as llm:
        alone = _longest([llm.submit(PROMPT, params(UNBOUNDED, seed, count)) for seed in range(streams)])
        beside = _beside(llm, streams, count, schemas)
        usual = _beside(llm, streams, count, [None] * beside.ends.total())
    for words, number in [*beside.refused.items(), *beside.ends.items()]:
        print(f"{number}: {words}")
    print(
        f"hostile: {len(schemas)} schemas, {beside.refused.total()} refused, in {beside.took:.1f} s, the slowest "
        f"{beside.slowest:.2f} s; longest gap of {streams} streams {1000 * beside.gap:.0f} ms, {1000 * usual.gap:.0f} "
        f"beside {usual.ends.total()} requests without a form, {1000 * alone:.0f} alone"
    )


@dataclass
class _Beside:
    """What became of requests beside streams, whose longest ``gap`` this was. ``took``: seconds to submit them all."""

    gap: float = 0.0
    took: float = 0.0
    slowest: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)


def _beside(llm: LLM, streams: int, count: int, several: Sequence[Form | None]) -> _Beside:
    found, others = _Beside(), list[Request]()
    requests = [llm.submit(PROMPT, params(UNBOUNDED, seed, 100 * count)) for seed in range(streams)]
    time.sleep(2)
    for one in several:
        at = time.monotonic()
        try:
            others.append(llm.submit(PROMPT, params(one, 1, 40)))
        except (SplitinferError, ValueError) as error:
            found.refused[re.sub("[0-9]+,[0-9,]+$", "more", str(error))[:70]] += 1
        seconds = time.monotonic() - at
        found.took, found.slowest = found.took + seconds, max(found.slowest, seconds)
    found.ends.update(str(other.result().error or other.output.finish_reason)[:70] for other in others)
    for request in requests:
        request.abort()
    found.gap = _longest(requests)
    return found


def _longest(requests: list[Any]) -> float:
    """The longest gap between two tokens of an answer."""
    gaps = list[float]()
    for request in requests:
        output = request.result()
        if output.error is not None:
            raise SystemExit(output.error)
        gaps += [b - a for a, b in pairwise(output.token_times[1:])]
    return max(gaps)


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tekken", type=Path)
    parser.add_argument("parts", nargs="*", default=["masks"])
    parser.add_argument("--trials", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=60)
    given = parser.parse_args()
    folder = model(caches() / "bench" / "tekken-4-layers", given.tekken)
    parts: dict[str, Callable[[], None]] = {
        "masks": lambda: masks(folder),
        "speed": lambda: speed(folder, given.trials, given.tokens),
        "gain": lambda: gain(folder, given.tokens),
        "hostile": lambda: hostile_beside(folder, given.tokens),
    }
    for part in given.parts:
        parts[part]()


if __name__ == "__main__":
    main()
