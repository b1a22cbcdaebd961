"""Experts that are read from disk: all in memory, one stage, two stages, and mlx-vlm's ``moe_offload``, by turns on one
random model. Prints one JSON document.

    python -m scripts.experiments.experts                        # a mixture of 1.6 GB, an eighth to all of the experts
    python -m scripts.experiments.experts --layers 24 --mlp 512 --bits 4 --shares 0.25     # of 2.7 GB, in 4 bits

An expert's tensor is 1 MB, as in 4 bits of a model of 30 billion parameters, but in float32: MLX on a CPU multiplies
4 bits so slowly that the disk would not be seen. Preload OpenBLAS, as ``scripts/bench`` does, for the same reason.

Every process has memory for the same number of experts, so two stages have twice as many. Another process drops the
model's files from the page cache all the time (``posix_fadvise``), so that the disk is really read; ``--cached`` leaves
them there. Figures: tokens a second of one answer, seconds of a prompt, what was read for each token, the share of
experts that were in memory, the process's largest memory; and whether the tokens are those of the first system. The
answer is sampled, because a random model's likeliest tokens repeat themselves; mlx-vlm is given the same tokens.
Nothing else may run on the machine.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.random_model import Shape, make
from splitinfer.bench.parts import made_up

VOCABULARY = 8192
_DROP_EVERY = 0.01  # seconds
_CHUNK = 512  # tokens of a prompt at a time
SYSTEMS = ("resident", "one", "two", "mlx-vlm")


def ours(folder: Path, stages: int, experts_gb: float | None, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    """Run an answer and a prompt on a pipeline of one or two processes."""
    from splitinfer.core.sequence import SamplingParams
    from splitinfer.llm import LLM, Settings

    layers = int(json.loads((folder / "config.json").read_text())["num_hidden_layers"])
    cut = [layers] if stages == 1 else [layers // 2, layers - layers // 2]
    given: list[dict[str, Any]] = [{"name": f"s{i}", "layers": count} for i, count in enumerate(cut)]
    for stage in given[1:]:
        stage["address"] = "local"
    layout = {"model": str(folder), "stages": given}
    context = len(prompt) + 2 * tokens
    settings = Settings(experts_gb=experts_gb, context=context, prefix_cache=False, token_budget=_CHUNK)
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=1.0, seed=1)
    with LLM(layout, settings=settings) as llm:
        llm.generate([list(prompt[:32])], params)  # what is in memory is then what an answer needs
        request = llm.submit(list(prompt[32:64]), params)
        events = iter(request)
        next(events)
        before, began = llm.stats()["stages"], time.monotonic()
        for _ in events:
            pass
        seconds, answer = time.monotonic() - began, request.output
        after = llm.stats()["stages"]
        began = time.monotonic()
        llm.generate([list(prompt)], SamplingParams(max_tokens=1, ignore_eos=True))
        prompted = time.monotonic() - began

    def counted(name: str) -> float:
        return sum(now[name] - was[name] for was, now in zip(before, after, strict=True))

    wanted = counted("experts_wanted")
    return {
        "tokens_per_second": (tokens - 1) / seconds,
        "ms_of_disk": 1e3 * counted("experts_waiting") / tokens,
        "prompt_seconds": prompted,
        "mb_per_token": counted("experts_read") / 1e6 / tokens,
        "in_memory": counted("experts_found") / wanted if wanted else 1.0,
        "tokens": answer.token_ids,
    }


def theirs(folder: Path, experts_gb: float, prompt: Sequence[int], given: Sequence[int]) -> dict[str, Any]:
    """Run the same with mlx-vlm on a folder that its ``repack`` wrote. ``given``: the tokens of the answer."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_vlm.utils import load_model

    whole = load_model(folder, expert_cache_gb=experts_gb)
    model, store = whole.language_model, whole.moe_offload_store
    if mx.default_device() == mx.cpu:  # as the others compute there
        whole.set_dtype(mx.float32)

    def answer(ids: Sequence[int], tokens: Sequence[int]) -> tuple[float, float, dict[str, Any]]:
        began, cache, logits = time.monotonic(), make_prompt_cache(model), None
        for at in range(0, len(ids), _CHUNK):
            logits = model(mx.array([ids[at : at + _CHUNK]]), cache=cache).logits
            mx.eval(logits, [one.state for one in cache])
        first, stats = time.monotonic(), store.stats()
        for token in tokens:
            mx.argmax(model(mx.array([[token]]), cache=cache).logits[:, -1]).item()
        return first - began, time.monotonic() - first, stats

    answer(prompt[:32], given[1:])
    _, seconds, before = answer(prompt[32:64], given[:-1])
    after = store.stats()
    prompted, *_ = answer(prompt, ())
    hits, misses = (after[name] - before[name] for name in ("hits", "misses"))
    each = after["resident_bytes"] / max(1, after["resident_experts"])
    return {
        "tokens_per_second": (len(given) - 1) / seconds,
        "prompt_seconds": prompted,
        "mb_per_token": misses * each / 1e6 / len(given),
        "in_memory": hits / max(1, hits + misses),
        "tokens": given,
    }


def drop(folders: Sequence[Path]) -> None:
    """Drop files from the page cache for ever."""
    files = [os.open(file, os.O_RDONLY) for folder in folders for file in folder.rglob("*.safetensors")]
    while True:
        for file in files:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        time.sleep(_DROP_EVERY)


def child(args: argparse.Namespace) -> None:
    """Run one system in this process, and print its figures."""
    prompt = list(made_up("experts", args.prompt, VOCABULARY))
    if args.child == "mlx-vlm":
        found = theirs(args.folder / "offloaded", args.experts_gb, prompt, args.given)
    else:
        given = None if args.child == "resident" else args.experts_gb
        found = ours(args.folder / "model", 2 if args.child == "two" else 1, given, prompt, args.tokens)
    largest = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(json.dumps({**found, "largest_mb": largest / (1e6 if sys.platform == "darwin" else 1e3)}))


def turn(
    system: str, folder: Path, experts_gb: float, args: argparse.Namespace, answer: Sequence[int]
) -> dict[str, Any]:
    """Return the figures of one system, run in a process of its own. ``answer``: the tokens of an answer before."""
    command = [sys.executable, "-m", "scripts.experiments.experts", "--child", system, "--folder", str(folder)]
    command += ["--experts-gb", str(experts_gb), "--prompt", str(args.prompt), "--tokens", str(args.tokens)]
    command += ["--given", *map(str, answer)]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=args.timeout)
    if found.returncode:
        raise SystemExit(f"{system} failed: {found.stderr[-2000:]}")
    figures: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    said = ", ".join(f"{name} {value:.4g}" for name, value in figures.items() if name != "tokens")
    print(f"{experts_gb:.3f} GB, {system}: {said}", file=sys.stderr, flush=True)
    return figures


def median_of(runs: Sequence[dict[str, Any]], right: Sequence[int]) -> dict[str, Any]:
    """Return the median of each figure, and whether the tokens are right."""
    figures = {name: statistics.median(one[name] for one in runs) for name in runs[0] if name != "tokens"}
    return {**figures, "same_tokens": all(one["tokens"] == right for one in runs)}


def main() -> None:
    """Make the model, run all systems by turns, and print the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in (("layers", 4), ("experts", 128), ("chosen", 8), ("hidden", 1024), ("mlp", 256), ("trials", 3)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--bits", type=int, default=0, help="of a weight; 0: float32, which a CPU multiplies fast")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.125, 0.25, 0.5, 1.0])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--cached", action="store_true", help="leave the files in the page cache")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one run")
    parser.add_argument("--child", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help="where the model is made and stays; usual: a temporary folder")
    parser.add_argument("--given", type=int, nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--experts-gb", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    with contextlib.ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        print(json.dumps(measured(folder, args), indent=2))


def measured(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return the document."""
    model, offloaded = folder / "model", folder / "offloaded"
    shape = Shape(
        "qwen3", args.layers, args.hidden, 16, 8, args.mlp, VOCABULARY, "float32", args.bits, args.experts, args.chosen
    )
    if not (model / "config.json").exists():
        make(model, shape)
    if "mlx-vlm" in args.systems and not (offloaded / "offload_index.json").exists():
        from mlx_vlm.moe_offload import repack

        with contextlib.redirect_stdout(sys.stderr):
            repack(str(model), str(offloaded))
    bits = args.bits + 1 if args.bits else 32  # for 64 weights a scale and a bias in float32
    each = 3 * args.hidden * args.mlp * bits / 8
    all_experts = args.layers * args.experts * each / 1e9
    dropper = multiprocessing.get_context("spawn").Process(target=drop, args=([folder],), daemon=True)
    if not args.cached:
        dropper.start()
    found, right = dict[str, Any](), list[int]()
    for share in args.shares:
        runs: dict[str, list[dict[str, Any]]] = {system: [] for system in args.systems}
        for _ in range(args.trials):
            for system in args.systems:
                runs[system].append(turn(system, folder, share * all_experts, args, right))
                right = right or runs[system][0]["tokens"]
        found[str(share)] = {system: median_of(several, right) for system, several in runs.items()}
    if not args.cached:
        dropper.kill()
    return {"experts_gb": all_experts, "cached": args.cached, "shape": vars(args) | {"folder": ""}, "shares": found}


if __name__ == "__main__":
    main()
