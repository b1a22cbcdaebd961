"""Plain mlx-lm in a process of its own: ``python -m splitinfer.bench.baseline``.

One JSON line in, one out. The first order names the model, each further one is a task; the end of standard
input is the end. Between the orders it waits for input and computes nothing.

    {"folder": ..., "dtype": ...}                       -> {"device": ..., "blas": ...}
    {"prompt": [...], "max_tokens": 64, "step_size": 2048} -> {"token_ids": [...], "token_times": [...]}
"""

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step, generation_stream, wired_limit
from mlx_lm.utils import load_model

from splitinfer.bench.blas import computed_by
from splitinfer.engine.versions import device_name


def main() -> None:
    """Obey until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; it closes the pipe
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not come between the answers
    order = json.loads(sys.stdin.readline())
    model, _ = load_model(Path(order["folder"]))
    if order["dtype"] is not None:
        model.set_dtype(getattr(mx, order["dtype"]))
    mx.eval(model.parameters())
    answer: dict[str, Any] = {"device": device_name(), "blas": computed_by()}
    with wired_limit(model, [generation_stream]):
        while True:
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
            line = sys.stdin.readline()
            if not line:
                return
            answer = run(model, json.loads(line))


def run(model: Any, order: Mapping[str, Any]) -> dict[str, Any]:
    """One task through mlx-lm's own loop, greedily."""
    token_ids, token_times = [], []
    start = time.monotonic()
    steps = generate_step(
        mx.array(order["prompt"]), model, max_tokens=order["max_tokens"], prefill_step_size=order["step_size"]
    )
    for token, _ in steps:
        token_times.append(time.monotonic() - start)
        token_ids.append(int(token))
    # The loop has one more step under way than it was asked for; the next contender must not feel it.
    mx.synchronize(generation_stream)
    return {"token_ids": token_ids, "token_times": token_times}


if __name__ == "__main__":
    main()
