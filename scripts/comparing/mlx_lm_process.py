"""mlx-lm in a process, as ``splitinfer.bench.mlx_lm_process``, that may also be one of several, and judges answers.

    {"folder": ..., "dtype": ..., "layers": [8, 8]}          -> {} or {"refused": "..."}
    {"folder": ..., "dtype": ..., "parallel": 2}             -> the same in tensor parallel
    {"judge": [[...], [...]]}                                -> {"gaps": [...]}, as ``probes.plain.gaps``
    {"rounding": [...]}                                      -> {"exact": ..., "logits_move": ..., ...}

mlx-lm cuts some of its models by layers, too: every process runs the same batch generator on the same prompts, hidden
states go from one to the next (MLX's ring of sockets), and the last ones to all, which choose the same tokens. While
one process computes the others wait. Rank 0 has the last layers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream, wired_limit
from mlx_lm.utils import load_model

from splitinfer.bench.child_process import Handle, serve
from splitinfer.bench.mlx_lm_process import handle, loaded
from splitinfer.probes.plain import gaps, rounding


@contextmanager
def opened(options: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Handle]]:
    """The model, or a stage or a rank of it."""
    if "layers" not in options and "parallel" not in options:
        with loaded(options) as (model, draft):
            yield {}, lambda task: _judged(model, draft, task)
        return
    model = load_model(Path(options["folder"]), lazy=True, strict=False)[0]
    refused = _refusal(model, options.get("parallel"))
    if refused is not None:
        yield {"refused": refused}, lambda _task: {}  # waits for its end: one that is gone has failed
        return
    _keep_own_part(model, options)
    with wired_limit(model, [generation_stream]):
        yield {}, lambda task: handle(model, None, task)


def _judged(model: Any, draft: Any, task: dict[str, Any]) -> dict[str, Any]:
    """Run one task of any kind, and return its answer."""
    if "judge" in task:
        return {"gaps": gaps(model, *task["judge"])}
    return rounding(model, task["rounding"]) if "rounding" in task else handle(model, draft, task)


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


if __name__ == "__main__":
    serve(opened)
