"""The process that runs mlx-lm with the whole model: ``python -m splitinfer.bench.mlx_lm_process``. Between tasks it
waits for input and computes nothing.

    {"folder": ..., "dtype": ..., "draft": ...}              -> {}
    {"prompt": [...], "max_tokens": 64}                      -> {"token_ids": [...], "token_times": [...]}
    {"prompt": [...], "max_tokens": 64, "num_draft": 3}      -> the same, by mlx-lm's speculative decoding
    {"prompt": [...], "then": [...], ...}                    -> the same for a second turn, ``then`` after the answer
    {"prompts": [[...], ...], "max_tokens": 64}              -> the same, with a list for each prompt
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step, generation_stream, speculative_generate_step, wired_limit
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from splitinfer.bench.child_process import Handle, serve

_LEAST_BATCH = 32  # sequences that mlx-lm's batch generator decodes at once by default


@contextmanager
def opened(options: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Handle]]:
    """Load the model. Yield an empty answer and the function that handles tasks."""
    with loaded(options) as (model, draft):
        yield {}, lambda task: handle(model, draft, task)


@contextmanager
def loaded(options: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Load and yield the model of a folder, and its draft model or None."""
    model = _load(options["folder"], options["dtype"])
    draft = _load(options["draft"], options["dtype"]) if options.get("draft") else None
    with wired_limit(model, [generation_stream]):
        yield model, draft


def _load(folder: str, dtype: str | None) -> Any:
    model, _ = load_model(Path(folder))
    if dtype is not None:
        model.set_dtype(getattr(mx, dtype))
    mx.eval(model.parameters())
    return model


def handle(model: Any, draft: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Run one task of any kind and return its answer."""
    return run(model, draft, options) if "prompt" in options else run_batch(model, options)


def run(model: Any, draft: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Run one task in mlx-lm's own loop, greedily."""
    token_ids, token_times = [], []
    start = time.monotonic()
    prompt, most = mx.array(options["prompt"]), options["max_tokens"]
    steps: Iterator[tuple[Any, ...]]
    if "then" in options:
        cache = make_prompt_cache(model)
        for _ in generate_step(prompt, model, max_tokens=most, prompt_cache=cache):
            pass
        mx.synchronize(generation_stream)
        start, then = time.monotonic(), mx.array(options["then"])
        steps = generate_step(then, model, max_tokens=most, prompt_cache=cache)
    elif "num_draft" in options:
        steps = speculative_generate_step(prompt, model, draft, num_draft_tokens=options["num_draft"], max_tokens=most)
    else:
        steps = generate_step(prompt, model, max_tokens=most)
    for token, *_ in steps:
        token_times.append(time.monotonic() - start)
        token_ids.append(int(token))
    # The loop has launched one step more than necessary, which must not slow down the next system.
    mx.synchronize(generation_stream)
    return {"token_ids": token_ids, "token_times": token_times}


def run_batch(model: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Run many sequences in mlx-lm's batch generator with its defaults, greedily; all of them decode at once."""
    prompts = options["prompts"]
    start = time.monotonic()
    generator = BatchGenerator(
        model, max_tokens=options["max_tokens"], completion_batch_size=max(_LEAST_BATCH, len(prompts))
    )
    token_ids: dict[int, list[int]] = {uid: [] for uid in generator.insert(prompts)}
    token_times: dict[int, list[float]] = {uid: [] for uid in token_ids}
    going = len(token_ids)
    while going:
        _, responses = generator.next()
        now = time.monotonic() - start
        for response in responses:
            token_ids[response.uid].append(int(response.token))
            token_times[response.uid].append(now)
            going -= response.finish_reason is not None
    mx.synchronize(generation_stream)
    generator.close()
    return {"token_ids": list(token_ids.values()), "token_times": list(token_times.values())}


if __name__ == "__main__":
    serve(opened)
