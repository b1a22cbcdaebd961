"""mlx-lm in a process of its own, the whole model or one stage of mlx-lm's own pipeline: ``python -m
splitinfer.bench.mlx_lm_process``. Between tasks it waits for input and computes nothing.

    {"folder": ..., "dtype": ..., "draft": ...}              -> {}
    {"folder": ..., "dtype": ..., "layers": [8, 8]}          -> {} or {"refused": "..."}
    {"folder": ..., "dtype": ..., "parallel": 2}             -> the same in tensor parallel
    {"prompt": [...], "max_tokens": 64}                      -> {"token_ids": [...], "token_times": [...]}
    {"prompt": [...], "max_tokens": 64, "num_draft": 3}      -> the same, by mlx-lm's speculative decoding
    {"prompt": [...], "then": [...], ...}                    -> the same of a second turn, ``then`` after the answer
    {"prompts": [[...], ...], "max_tokens": 64}              -> the same, with a list for each prompt
    {"judge": [[...], [...]]}                                -> {"gaps": [...]}, as ``probes.plain.gaps``
    {"rounding": [...]}                                      -> {"exact": ..., "logits_move": ..., ...}

mlx-lm cuts some of its models by layers, too: every process runs the same batch generator on the same prompts, hidden
states go from one to the next (MLX's ring of sockets), and the last ones to all, which choose the same tokens. While
one process computes the others wait. Rank 0 has the last layers.
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
from splitinfer.probes.plain import gaps, rounding

_LEAST_BATCH = 32  # sequences that mlx-lm's batch generator decodes at once by default


@contextmanager
def opened(options: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Handle]]:
    """The model, or a stage of it."""
    if "layers" in options or "parallel" in options:
        model, draft = load_model(Path(options["folder"]), lazy=True, strict=False)[0], None
        refused = _refusal(model, options.get("parallel"))
        if refused is not None:
            yield {"refused": refused}, lambda _task: {}  # waits for its end: one that is gone has failed
            return
        _keep_own_part(model, options)
    else:
        model = _load(options["folder"], options["dtype"])
        draft = _load(options["draft"], options["dtype"]) if options.get("draft") else None
    with wired_limit(model, [generation_stream]):
        yield {}, lambda task: handle(model, draft, task)


def _load(folder: str, dtype: str | None) -> Any:
    model, _ = load_model(Path(folder))
    if dtype is not None:
        model.set_dtype(getattr(mx, dtype))
    mx.eval(model.parameters())
    return model


def _refusal(model: Any, parallel: int | None) -> str | None:
    """Why mlx-lm cannot cut this model here; ``None`` if it can. ``parallel``: processes that share each layer."""
    if parallel is None and not hasattr(getattr(model, "model", None), "pipeline"):
        return f"its {model.model_type} has no pipeline"
    if parallel is not None:
        heads = getattr(model.args, "num_key_value_heads", None) or 0
        if not hasattr(model, "shard"):
            return f"its {model.model_type} has no tensor parallelism"
        if heads % parallel:
            return f"{parallel} processes cannot share {heads} KV heads"
    if not mx.distributed.is_available("ring"):
        return "this MLX has no ring of sockets"
    return None


def _keep_own_part(model: Any, options: dict[str, Any]) -> None:
    """Keep this rank's layers or its part of each, as ``mlx_lm.utils.sharded_load`` does, but cut where the layout
    cuts."""
    group = mx.distributed.init(strict=True, backend="ring")
    if "layers" in options:
        model.model.pipeline(group, options["layers"][::-1])
    else:
        model.shard(group)
    if options["dtype"] is not None:
        model.set_dtype(getattr(mx, options["dtype"]))
    mx.eval(model.parameters())
    mx.eval(mx.distributed.all_sum(mx.array(1.0), stream=mx.cpu))


def handle(model: Any, draft: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Run one task of any kind and return its answer."""
    if "judge" in options:
        return {"gaps": gaps(model, *options["judge"])}
    if "rounding" in options:
        return rounding(model, options["rounding"])
    if "prompt" in options:
        return run(model, draft, options)
    return run_batch(model, options)


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
    # The loop has launched one step more than it was asked for, which must not slow down the next system.
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
