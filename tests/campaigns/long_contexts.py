"""Where the time of a long prompt goes on two stages, what a second turn costs behind it, and the tokens in whose steps
KV grows: beside plain mlx-lm in one process, on the same prompts in one run.

The last stage has less to do with a prompt than its layers: of the last one, chunks without the prompt's end need only
keys and values, not attention and what follows. (mlx-lm leaves that out, too.) So with equal chunks and 4 + 4 layers
two stages take at least 4/7 of one process's time, and where layers are few, the stages are even with one more there.

    python -m tests.campaigns.long_contexts
    python -m tests.campaigns.long_contexts --hidden 256 --tokens 12000 --steps 512,128

A random model of 8 layers, and the CPU rig: OpenBLAS, a processor for each process; mlx-lm has the coordinator's while
the stages sleep. mlx-lm's TTFT is that of its better step size. A stage's line has the seconds of its chunks, and what
it waited for before them; *processor seconds*, of all threads and of prompt and answer together, say the same where the
machine is busy. A *second turn* is the prompt, its answer, and 32 tokens more. A token is *growing* if KV of some layer
is copied to a larger array in its step; the milliseconds are the stages' own. Exit code 1: some answer has other tokens
than mlx-lm's, which with OpenBLAS may be rounding.
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import Any

import psutil

from splitinfer.bench.shared.blas import prefer_openblas
from splitinfer.core.kv.growth import phases_of, room
from splitinfer.core.metrics.recent import RecentSteps, SeenStep

LAYERS, VOCAB, HEAD, NEW = 8, 512, 128, 32
_COPIES = ("bytes_copied", "copy_seconds")


def main() -> int:
    given = _arguments()
    prefer_openblas()  # may start this program anew, so before anything imports MLX
    from splitinfer.bench.shared import machine
    from splitinfer.bench.shared.mlx_lm import plain_mlx_lm
    from splitinfer.bench.shared.random_model import Shape, make
    from splitinfer.llm import LLM, Settings

    heads = max(1, given.hidden // HEAD)
    shape = Shape("qwen3", LAYERS, given.hidden, heads, max(1, heads // 2), 3 * given.hidden, VOCAB)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="long-contexts-"))) / "model"
        make(folder, shape, num_files=1)
        longest = max(given.tokens) + given.answer + 2 * NEW
        _lengthen(folder / "config.json", longest)
        stages = [{"name": "front", "layers": LAYERS // 2}, {"name": "back", "layers": LAYERS // 2, "address": "local"}]
        settings = Settings(context=longest, token_budget=given.chunk)
        llm = stack.enter_context(LLM({"model": str(folder), "stages": stages}, settings=settings))
        plain = stack.enter_context(plain_mlx_lm(llm.layout))
        machine.pin_stages(llm.layout.stages, {"plain mlx-lm": plain.pid})
        same = [_compare(llm, plain, length, given) for length in given.tokens]
    return int(not all(same))


def _arguments() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(one) for one in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=numbers, default=[12_000, 32_000], help="lengths of prompts")
    parser.add_argument("--hidden", type=int, default=128, help="width of the model")
    parser.add_argument("--streams", type=int, default=1, help="of the growing steps, also with so many streams")
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--chunk", type=int, help="prompt tokens in a step; the pipeline's own choice if not given")
    parser.add_argument("--steps", type=numbers, default=[512, 128], help="step sizes of mlx-lm")
    return parser.parse_args()


def _compare(llm: Any, plain: Any, length: int, given: argparse.Namespace) -> bool:
    """Print what one prompt and its second turn took; whether the answer is mlx-lm's."""
    from splitinfer.bench.shared import machine
    from splitinfer.bench.shared.workload import Task, made_up

    task = Task("decode", 0, made_up(f"{length} long", length, VOCAB), given.answer)
    _ask(llm, made_up(f"{length} warm up", 300, VOCAB), 4)
    pids = [os.getpid(), *machine.local_workers().values()]
    runs = {size: _spending([plain.pid], lambda size=size: plain.run(task, size)) for size in given.steps}
    theirs, _ = min(runs.values(), key=lambda item: item[0].ttft)
    (ours, steps), spent = _spending(pids, lambda: _ask(llm, task.prompt, given.answer))
    print(f"\n{length:,} tokens, width {given.hidden}: two stages {ours.token_times[0]:.2f} s", end=", ")
    print(f"{ours.token_times[0] / theirs.ttft:.3f} of mlx-lm's", end=" ")
    print(", ".join(f"{run.ttft:.2f} s by {size}" for size, (run, _) in runs.items()))
    print("  processor seconds:", " + ".join(f"{one:.2f}" for one in spent), "; mlx-lm's", end=" ")
    print(", ".join(f"{one:.2f} by {size}" for size, (_, (one,)) in runs.items()))
    chunks = [step for step in steps if step.rows.prefill]
    for number, stage in enumerate(("front", "back")):
        print(f"  {stage}: {_where(chunks, number)}")
    print(f"  a token: mlx-lm {theirs.seconds_per_token * 1e3:.2f} ms; {_by_growth(steps, length)}")
    turn = (*task.prompt, *ours.token_ids, *made_up(f"{length} more", NEW, VOCAB))
    print(f"  second turn: {_second_turn(llm, turn, ours.token_times[0])}")
    if given.streams > 1:
        print(f"  {given.streams} streams: {_of_streams(llm, task.prompt, given)}")
    is_same = tuple(ours.token_ids) == tuple(theirs.token_ids)
    print("  tokens as mlx-lm's" if is_same else "  OTHER TOKENS than mlx-lm's", flush=True)
    return is_same


def _lengthen(config: Path, context: int) -> None:
    """Let a random model have so long a context, at least: no number in it depends on that."""
    found = json.loads(config.read_text())
    found["max_position_embeddings"] = max(context, found["max_position_embeddings"])
    config.write_text(json.dumps(found))


def _ask(llm: Any, prompt: Sequence[int], num_tokens: int) -> tuple[Any, list[SeenStep]]:
    """An answer, and the steps that it took."""
    (output,), steps = _ask_all(llm, [prompt], num_tokens)
    return output, steps


def _ask_all(llm: Any, prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[list[Any], list[SeenStep]]:
    from splitinfer.core.sequence import SamplingParams

    recent = RecentSteps()
    llm.watch_steps(recent)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=num_tokens, ignore_eos=True))
    llm.stats()  # counts what has come back
    return outputs, recent.take()


def _of_streams(llm: Any, prompt: Sequence[int], given: argparse.Namespace) -> str:
    """The same of several that begin with the prompt's kept KV; of the steps in which all decode."""
    from splitinfer.bench.shared.workload import made_up

    prompts = [(*prompt, *made_up(f"stream {each}", NEW, VOCAB)) for each in range(given.streams)]
    _, steps = _ask_all(llm, prompts, given.answer)
    last = max(number for number, step in enumerate(steps) if step.rows.prefill)
    return _by_growth(steps[last + 1 :], len(prompts[0]), given.streams)


def _spending(pids: Sequence[int], run: Callable[[], Any]) -> tuple[Any, list[float]]:
    """What it returns, and the processor seconds that each of these processes took meanwhile."""

    def spent() -> list[float]:
        return [sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids]

    before, found = spent(), run()
    return found, [b - a for a, b in zip(before, spent(), strict=True)]


def _where(chunks: Sequence[SeenStep], stage: int) -> str:
    """The seconds of one stage, from its first chunk to its last."""
    visits = [step.visits[stage] for step in chunks]
    seconds = [visit.end - visit.start for visit in visits]
    gaps: dict[str, float] = {}
    for step in chunks[1:]:
        for cause, gap in step.gaps[stage].items():
            gaps[cause.value] = gaps.get(cause.value, 0.0) + gap
    waits = ", ".join(f"{cause} {gap:.3f}" for cause, gap in gaps.items() if gap >= 0.0005)
    return (
        f"{len(chunks)} chunks of {visits[0].tokens} to {visits[-1].tokens} tokens, {sum(seconds):.2f} s "
        f"(first {seconds[0] * 1e3:.0f} ms, last {seconds[-1] * 1e3:.0f}); waited {waits or 'for nothing'}"
    )


def _by_growth(steps: Sequence[SeenStep], length: int, streams: int = 1) -> str:
    """What a generated token's step took on both stages: those in which some layer's KV grows, and the others. All
    ``streams`` are equally long."""
    decodes = [step for step in steps if step.rows.decode]
    took = [sum(visit.end - visit.start for visit in step.visits) * 1e3 for step in decodes]
    before = accumulate((step.rows.decode for step in decodes), initial=0)
    grows = [
        any(room(end - 1, phase) < end for i in range(LAYERS) for phase in phases_of(i))
        for end in (length + 1 + rows // streams for _, rows in zip(decodes, before, strict=False))
    ]
    growing, others = ([ms for ms, one in zip(took, grows, strict=True) if one is wanted] for wanted in (True, False))
    usual = statistics.median(others)
    if not growing:
        return f"stages {usual:.2f} ms, none growing"
    most = ", ".join(f"{ms / usual:.2f}" for ms in growing)
    return f"stages {usual:.2f} ms, growing {most} of that"


def _second_turn(llm: Any, turn: Sequence[int], cold: float) -> str:
    before = llm.stats()["stages"]
    warm, steps = _ask(llm, turn, 4)
    after = llm.stats()["stages"]
    copies = (
        f"{spent['bytes_copied'] / 2**20:.1f} MiB in {spent['copy_seconds'] * 1e3:.1f} ms"
        for spent in ({key: b[key] - a[key] for key in _COPIES} for a, b in zip(before, after, strict=True))
    )
    chunks = [step for step in steps if step.rows.prefill]
    computed = ", ".join(
        " + ".join(f"{(visit.end - visit.start) * 1e3:.1f}" for visit in step.visits) for step in chunks
    )
    seconds = warm.token_times[0]
    copied = f"{warm.num_cached_tokens:,} cached, copied {' + '.join(copies)}"
    return f"{seconds * 1e3:.1f} ms, {seconds / cold:.4f} of cold; {copied}; its steps {computed} ms"


if __name__ == "__main__":
    raise SystemExit(main())
