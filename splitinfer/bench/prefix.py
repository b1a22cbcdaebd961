"""``splitinfer bench --mode prefix``: what the prefix cache is worth, and what storing its blocks costs.

    second turn    a conversation of so many tokens, answered, and 32 tokens more: the time to the first token, beside
                   that of a new prompt of the same length
    after restart  the same in a second run of all processes, which finds the KV on disk; where the system can, its
                   files are evicted from the page cache first
    one prompt     32 requests at once with a common prefix: how many tokens were computed for them
    writing        tokens per second of a pipeline that writes its KV behind, beside one that does not

Everything is measured in this run, trial by trial in turns; ratios are of one trial. A run of a pipeline, from start to
end of all its processes, is a child process: this module as a program. One JSON line in, one out:

    {"layout": ..., "model": ..., "kv_dir": ..., "context": ..., "token_budget": ...} -> {"pinned": ...}
    {"prompts": [[...], ...], "max_tokens": 8}
        -> {"token_ids": [[...], ...], "token_times": [[...], ...], "cached": [...], "stats": ...}
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from splitinfer import cleanup
from splitinfer.bench.shared import machine
from splitinfer.bench.shared.child_process import ChildProcess, Handle, serve
from splitinfer.bench.shared.inputs import check_context
from splitinfer.bench.shared.measure import ratios, summarize
from splitinfer.bench.shared.options import Options
from splitinfer.bench.shared.printing import range_of, say
from splitinfer.bench.shared.throughput import BatchRun
from splitinfer.bench.shared.workload import alternating, made_up
from splitinfer.core.sequence import SamplingParams
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
            _warm_up(writing, silent, vocab)
            first = [_first_run(writing, options, trial, vocab) for trial in range(options.trials)]
            shared = _one_prompt(writing, vocab, options.seed)
            cost = [_writing(writing, silent, trial, vocab, options.seed) for trial in range(options.trials)]
            pinned = writing.pinned
        was_dropped = _evict_from_page_cache(path)
        stored_bytes = sum(file.stat().st_size for file in path.rglob("*.kv"))
        with _pipeline(options, path) as again:
            again.ask([made_up(f"{options.seed} again", 64, vocab)])
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
            name: asdict(ratios([each[name][0] for each in cost], [each[name][1] for each in cost])) for name in cost[0]
        },
    }


class _PipelineProcess:
    """All processes of one pipeline, from their start to their end."""

    def __init__(self, options: Options, kv_dir: Path | None) -> None:
        self._child = ChildProcess("splitinfer.bench.prefix")
        longest = max(options.prompt_tokens + 2 * _ANSWER + NEW_TOKENS, 1024 + 64, 512) + 256
        answer = self._child.ask({
            "layout": options.layout, "model": options.model, "kv_dir": None if kv_dir is None else str(kv_dir),
            "context": longest, "token_budget": options.token_budget,
        })  # fmt: skip
        self.pinned = answer["pinned"]

    def ask(self, prompts: Sequence[Sequence[int]], max_tokens: int = _ANSWER) -> dict[str, Any]:
        """Generate answers to some prompts at once."""
        return self._child.ask({"prompts": prompts, "max_tokens": max_tokens})

    def ttft(self, prompt: Sequence[int]) -> tuple[float, dict[str, Any]]:
        """Seconds to the first token after one prompt, and the whole answer."""
        answer = self.ask([prompt])
        return answer["token_times"][0][0], answer

    def close(self) -> None:
        """End all its processes."""
        self._child.close()


def _pipeline(options: Options, kv_dir: Path | None) -> closing[_PipelineProcess]:
    return closing(_PipelineProcess(options, kv_dir))


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
        cold: asdict(summarize(colds)),
        f"{warm}_ttft": asdict(summarize(warms)),
        f"{warm}_to_cold": asdict(ratios(warms, colds)),
        f"{warm}_cached": [each.cached for each in turns],
    }


def _first_run(pipeline: _PipelineProcess, options: Options, trial: int, vocab: int) -> _Turns:
    """The second turn of a conversation, and a new prompt of the same length."""
    opening = made_up(f"{options.seed} {trial} first", options.prompt_tokens - _ANSWER, vocab)
    answer = pipeline.ask([opening])["token_ids"][0]
    turn = [*opening, *answer, *made_up(f"{options.seed} {trial} more", NEW_TOKENS, vocab)]
    warm, about = pipeline.ttft(turn)
    cold, _ = pipeline.ttft(made_up(f"{options.seed} {trial} cold", len(turn), vocab))
    say(f"trial {trial + 1}: cold {cold:.3g} s, second turn {warm:.3g} s")
    return _Turns(cold, warm, turn, about["cached"][0])


def _second_run(pipeline: _PipelineProcess, options: Options, trial: int, vocab: int, first_turn: list[int]) -> _Turns:
    """Another second turn of the same conversation, after a restart, and a new prompt of the same length."""
    turn = [*first_turn[:-NEW_TOKENS], *made_up(f"{options.seed} {trial} other", NEW_TOKENS, vocab)]
    warm, about = pipeline.ttft(turn)
    cold, _ = pipeline.ttft(made_up(f"{options.seed} {trial} cold again", len(turn), vocab))
    say(f"trial {trial + 1}: cold {cold:.3g} s, second turn after a restart {warm:.3g} s")
    return _Turns(cold, warm, turn, about["cached"][0])


def _one_prompt(pipeline: _PipelineProcess, vocab: int, seed: int) -> dict[str, Any]:
    """Requests with a common prefix, all at once: how many tokens were computed."""
    system = made_up(f"{seed} system", _SYSTEM, vocab)
    prompts = [[*system, *made_up(f"{seed} own {i}", _OWN, vocab)] for i in range(_SHARING)]
    before = pipeline.ask([made_up(f"{seed} before", 16, vocab)], 1)["stats"]
    answers = pipeline.ask(prompts, 1)
    distinct = len(system) + _SHARING * _OWN
    computed = answers["stats"]["computed_tokens"] - before["computed_tokens"]
    say(f"{_SHARING} requests on one prompt: {computed} tokens computed, {distinct} distinct")
    figures = {
        name: [
            a.get(name, 0) - b.get(name, 0) for a, b in zip(answers["stats"]["stages"], before["stages"], strict=True)
        ]
        for name in ("bytes_copied", "copy_seconds", "kv_bytes_stored")
    }
    return {"requests": _SHARING, "computed": computed, "distinct": distinct, "ratio": computed / distinct, **figures}


def _writing(
    writing: _PipelineProcess, silent: _PipelineProcess, trial: int, vocab: int, seed: int
) -> dict[str, tuple[float, float]]:
    """Tokens per second with and without writing: one stream that completes a block, and many, whose blocks are
    completed one after the other."""
    one = [made_up(f"{seed} {trial} one", _STREAM_PROMPT, vocab)]
    count = _STREAMS * 2
    many = [made_up(f"{seed} {trial} many {i}", 256 - _STREAM_TOKENS + 6 * i, vocab) for i in range(count)]
    found: dict[str, tuple[float, float]] = {}
    for name, prompts, max_tokens in (("one stream", one, _STREAM), (f"{count} streams", many, _STREAM_TOKENS)):
        options = alternating((silent, writing), trial)
        rates = {pipeline: _rate(pipeline.ask(prompts, max_tokens)) for pipeline in options}
        found[name] = rates[writing], rates[silent]
        say(f"trial {trial + 1}: {name}: {rates[writing]:.4g} tokens/s writing, {rates[silent]:.4g} silent")
    return found


def _rate(answer: Mapping[str, Any]) -> float:
    run = BatchRun(tuple(map(tuple, answer["token_ids"])), tuple(map(tuple, answer["token_times"])))
    run.check()
    return run.tokens_per_second


def _warm_up(writing: _PipelineProcess, silent: _PipelineProcess, vocab: int) -> None:
    for pipeline in (writing, silent):
        pipeline.ask([made_up(f"warm up {i}", 300, vocab) for i in range(4)], 8)


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


# -- inside the child ----------------------------------------------------------------------------


@contextmanager
def _opened(options: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Handle]]:
    processors = machine.free_processors()
    settings = Settings(
        context=options["context"],
        token_budget=options["token_budget"],
        kv_dir=None if options["kv_dir"] is None else Path(options["kv_dir"]),
        rejoin_timeout=0.0,
    )
    with LLM(options["layout"], model=options["model"], settings=settings) as llm:
        yield {"pinned": machine.pin_stages(llm.layout.stages, None, processors)}, lambda task: _run(llm, task)


def _run(llm: LLM, task: Mapping[str, Any]) -> dict[str, Any]:
    """Generate greedy answers to all prompts of a task at once."""
    params = SamplingParams(max_tokens=task["max_tokens"], ignore_eos=True)
    outs = llm.generate(task["prompts"], params)
    return {
        "token_ids": [out.token_ids for out in outs],
        "token_times": [out.token_times for out in outs],
        "cached": [out.num_cached_tokens for out in outs],
        "stats": llm.stats(),
    }


if __name__ == "__main__":
    serve(_opened)
