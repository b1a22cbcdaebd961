"""``splitinfer bench --mode prefix``: what the prefix cache is worth, and what storing its blocks costs.

    second turn    a conversation of so many tokens, answered, and 32 tokens more: the time to the first token, beside
                   that of a new prompt of the same length
    after restart  the same once the pipeline was closed and opened again, so that it finds the KV on disk; where the
                   system can, its files are evicted from the page cache first
    one prompt     32 requests at once with a common prefix: how many tokens were computed for them
    writing        tokens per second of a pipeline that writes its KV behind, beside one that does not

Everything is measured in this run, trial by trial in turns; ratios are of one trial.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from splitinfer import cleanup
from splitinfer.bench.shared import machine
from splitinfer.bench.shared.inputs import check_context
from splitinfer.bench.shared.measure import ratios, summarize
from splitinfer.bench.shared.options import Options
from splitinfer.bench.shared.printing import range_of, say
from splitinfer.bench.shared.systems import open_stages
from splitinfer.bench.shared.throughput import BatchRun
from splitinfer.bench.shared.workload import alternating, made_up
from splitinfer.core.sequence import SamplingParams
from splitinfer.engine.coordinator.requests import RequestOutput
from splitinfer.errors import ConfigError
from splitinfer.llm import LLM, Settings

NEW_TOKENS = 32  # of the second turn
_ANSWER = 8  # tokens of each turn's answer
_SHARING = 32  # requests with a common prefix
_SYSTEM, _OWN = 1024, 16  # tokens of the common prefix, and of each request after it
_STREAM_PROMPT, _STREAM = 120, 160  # tokens of the single stream: it completes a block
_STREAMS = 8  # for each stage
_STREAM_TOKENS = 96


def measure(options: Options) -> dict[str, Any]:
    """Measure, and return the document.

    Raises:
        SplitinferError: something cannot be measured.
    """
    if options.prompt_tokens <= _ANSWER:
        raise ConfigError(f"--prompt-tokens must be at least {_ANSWER + 1}: a conversation and its answer")
    checkpoint = options.checkpoint
    check_context(checkpoint, max(options.prompt_tokens + NEW_TOKENS + _ANSWER, _SYSTEM + _OWN + 1), "--prompt-tokens")
    on, vocab = machine.describe(), checkpoint.vocab_size or 2
    with cleanup.temporary_folder("splitinfer-bench-kv-") as folder:
        path = Path(folder)
        with _pipeline(options, path) as writing, _pipeline(options, None) as silent:
            for llm in (writing, silent):
                _ask(llm, [made_up(f"warm up {i}", 300, vocab) for i in range(4)])
            first = [_first_run(writing, options, trial, vocab) for trial in range(options.trials)]
            shared = _one_prompt(writing, vocab, options.seed)
            cost = [_writing(writing, silent, trial, vocab, options.seed) for trial in range(options.trials)]
            pinned = machine.assign(writing.layout.stages, machine.free_processors())
        was_dropped = _evict_from_page_cache(path)
        stored_bytes = sum(file.stat().st_size for file in path.rglob("*.kv"))
        with _pipeline(options, path) as again:
            _ask(again, [made_up(f"{options.seed} again", 64, vocab)])
            second = [_second_run(again, options, trial, vocab, each.turn) for trial, each in enumerate(first)]
    return {
        "measured_on": {**on, "pinned": pinned, "files_were_out_of_the_page_cache": was_dropped},
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": NEW_TOKENS,
        "kept_bytes": stored_bytes,
        **_compared(first, "cold_ttft", "second_turn"),
        **_compared(second, "restarted_cold_ttft", "restarted"),
        "one_prompt": shared,
        "writing_to_silent": {
            name: ratios([each[name][0] for each in cost], [each[name][1] for each in cost]) for name in cost[0]
        },
    }


@contextmanager
def _pipeline(options: Options, kv_dir: Path | None) -> Iterator[LLM]:
    """A pipeline, each stage of which has a processor of its own."""
    longest = max(options.prompt_tokens + 2 * _ANSWER + NEW_TOKENS, _SYSTEM + 64) + 256
    settings = Settings(context=longest, token_budget=options.token_budget, kv_dir=kv_dir, rejoin_timeout=0.0)
    with ExitStack() as stack:
        llm = open_stages(stack, options, settings, " without a disk" if kv_dir is None else "")
        machine.pin_stages(llm.layout.stages)
        yield llm


def _ask(llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: int = _ANSWER) -> list[RequestOutput]:
    """Greedy answers to some prompts at once."""
    return llm.generate(prompts, SamplingParams(max_tokens=max_tokens, ignore_eos=True))


@dataclass(frozen=True, slots=True)
class _Turns:
    """Seconds to the first token of a new prompt (``cold``) and of a second turn (``warm``); the turn's tokens, and how
    many of them were found in the cache."""

    cold: float
    warm: float
    turn: list[int]
    cached: int


def _compared(turns: Sequence[_Turns], cold: str, warm: str) -> dict[str, Any]:
    """The figures of all trials. ``cold``, ``warm``: how their names begin."""
    colds, warms = [each.cold for each in turns], [each.warm for each in turns]
    return {
        cold: summarize(colds),
        f"{warm}_ttft": summarize(warms),
        f"{warm}_to_cold": ratios(warms, colds),
        f"{warm}_cached": [each.cached for each in turns],
    }


def _first_run(llm: LLM, options: Options, trial: int, vocab: int) -> _Turns:
    """The second turn of a conversation, and a new prompt of the same length."""
    opening = made_up(f"{options.seed} {trial} first", options.prompt_tokens - _ANSWER, vocab)
    turn = [*opening, *_ask(llm, [opening])[0].token_ids, *made_up(f"{options.seed} {trial} more", NEW_TOKENS, vocab)]
    return _turns(llm, trial, turn, made_up(f"{options.seed} {trial} cold", len(turn), vocab), "")


def _second_run(llm: LLM, options: Options, trial: int, vocab: int, first_turn: list[int]) -> _Turns:
    """Another second turn of the same conversation, after a restart, and a new prompt of the same length."""
    turn = [*first_turn[:-NEW_TOKENS], *made_up(f"{options.seed} {trial} other", NEW_TOKENS, vocab)]
    cold = made_up(f"{options.seed} {trial} cold again", len(turn), vocab)
    return _turns(llm, trial, turn, cold, " after a restart")


def _turns(llm: LLM, trial: int, turn: Sequence[int], cold: Sequence[int], when: str) -> _Turns:
    """Answer a second turn, then a new prompt."""
    (warm,), (new,) = _ask(llm, [turn]), _ask(llm, [cold])
    say(f"trial {trial + 1}: cold {new.token_times[0]:.3g} s, second turn{when} {warm.token_times[0]:.3g} s")
    return _Turns(new.token_times[0], warm.token_times[0], list(turn), warm.num_cached_tokens or 0)


def _one_prompt(llm: LLM, vocab: int, seed: int) -> dict[str, Any]:
    """Requests with a common prefix, all at once: how many tokens were computed."""
    system = made_up(f"{seed} system", _SYSTEM, vocab)
    prompts = [[*system, *made_up(f"{seed} own {i}", _OWN, vocab)] for i in range(_SHARING)]
    _ask(llm, [made_up(f"{seed} before", 16, vocab)], 1)
    before = llm.stats()
    _ask(llm, prompts, 1)
    after = llm.stats()
    distinct = len(system) + _SHARING * _OWN
    computed = after["computed_tokens"] - before["computed_tokens"]
    say(f"{_SHARING} requests on one prompt: {computed} tokens computed, {distinct} distinct")
    figures = {
        name: [a.get(name, 0) - b.get(name, 0) for a, b in zip(after["stages"], before["stages"], strict=True)]
        for name in ("bytes_copied", "copy_seconds", "kv_bytes_stored")
    }
    return {"requests": _SHARING, "computed": computed, "distinct": distinct, "ratio": computed / distinct, **figures}


def _writing(writing: LLM, silent: LLM, trial: int, vocab: int, seed: int) -> dict[str, tuple[float, float]]:
    """Tokens per second with and without writing: one stream that completes a block, and many, whose blocks are
    completed one after the other."""
    one = [made_up(f"{seed} {trial} one", _STREAM_PROMPT, vocab)]
    count = _STREAMS * 2
    many = [made_up(f"{seed} {trial} many {i}", 256 - _STREAM_TOKENS + 6 * i, vocab) for i in range(count)]
    found: dict[str, tuple[float, float]] = {}
    for name, prompts, max_tokens in (("one stream", one, _STREAM), (f"{count} streams", many, _STREAM_TOKENS)):
        rates = {llm: _rate(_ask(llm, prompts, max_tokens)) for llm in alternating((silent, writing), trial)}
        found[name] = rates[writing], rates[silent]
        say(f"trial {trial + 1}: {name}: {rates[writing]:.4g} tokens/s writing, {rates[silent]:.4g} silent")
    return found


def _rate(answers: Sequence[RequestOutput]) -> float:
    run = BatchRun(tuple(tuple(each.token_ids) for each in answers), tuple(tuple(each.token_times) for each in answers))
    run.check()
    return run.tokens_per_second


def _evict_from_page_cache(path: Path) -> bool:
    """Evict the files' contents from the system's page cache; false where the system has no way to do it."""
    if sys.platform == "darwin":
        return False
    for file in path.rglob("*.kv"):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return True


def tables(found: Mapping[str, Any]) -> list[Table]:
    """One table of all parts."""
    table = Table("", "seconds to the first token", "of a cold one", title="Prefix cache", title_justify="left")
    length = found["prompt_tokens"] + NEW_TOKENS
    table.add_row(f"cold, {length:,} tokens", range_of(found["cold_ttft"], 3), "")
    table.add_row("second turn", range_of(found["second_turn_ttft"], 3), range_of(found["second_turn_to_cold"], 3))
    table.add_row("after a restart", range_of(found["restarted_ttft"], 3), range_of(found["restarted_to_cold"], 3))
    table.add_section()
    shared = found["one_prompt"]
    table.add_row(
        f"{shared['requests']} requests on one prompt",
        f"{shared['computed']:,} tokens computed",
        f"{shared['ratio']:.3f} of the distinct ones",
    )
    for name, ratio in found["writing_to_silent"].items():
        table.add_row(f"tokens/s while writing, {name}", "", range_of(ratio, 3))
    return [table]
