"""mlx-lm's own pipeline: one process for each stage, ``python -m splitinfer.bench.shared.mlx_lm_pipeline``.

mlx-lm cuts some of its models by layers, too. Every process runs the same batch generator on the same prompts. In each
call of the model hidden states go from one process to the next (MLX's ring of sockets, here over loopback), the last
ones are sent to all, and each process computes the head and chooses the same tokens. Steps run one after the other, so
while one process computes the others wait; there are no micro-batches. Rank 0 has the last layers.

    {"folder": ..., "dtype": ..., "layers": [8, 8]}  -> {"blas": ...} or {"refused": "..."}
    a task of many sequences, as for the baseline    -> the same answer from every process
"""

import json
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import mlx.core as mx
from mlx_lm.generate import generation_stream, wired_limit
from mlx_lm.utils import load_model

from splitinfer.bench.shared.blas import computed_by
from splitinfer.bench.shared.child_process import ChildProcess, own_output, receive_all, serve_commands
from splitinfer.bench.shared.mlx_lm_process import run_batch
from splitinfer.bench.shared.throughput import BatchRun
from splitinfer.bench.shared.workload import Batch
from splitinfer.errors import ModelError

_TIMEOUT = 900.0  # seconds for a batch; only a ring that hangs takes as long


class MlxLmProcesses:
    """The processes of mlx-lm's pipeline, which sleep between tasks. ``layers``: the number of each, in their order.

    Raises:
        ModelError: mlx-lm cannot cut this model; with the reason.
    """

    def __init__(self, folder: str, dtype: str | None, layers: Sequence[int]) -> None:
        self._children: list[ChildProcess] = []
        with tempfile.NamedTemporaryFile("w", prefix="splitinfer-ring-", suffix=".json") as hosts:
            json.dump([[f"127.0.0.1:{port}"] for port in _free_ports(len(layers))], hosts)
            hosts.flush()
            try:
                for rank in range(len(layers)):
                    ring = {"MLX_RANK": str(rank), "MLX_HOSTFILE": hosts.name}
                    self._children.append(ChildProcess("splitinfer.bench.shared.mlx_lm_pipeline", ring))
                self._open({"folder": folder, "dtype": dtype, "layers": list(layers)})
            except BaseException:
                self.close()
                raise

    def _open(self, options: dict[str, Any]) -> None:
        for answer in self._ask(options):
            if "refused" in answer:
                raise ModelError(answer["refused"])

    @property
    def pids(self) -> list[int]:
        """The process ids, in the order of the layers."""
        return [child.pid for child in reversed(self._children)]

    def run(self, batch: Batch) -> BatchRun:
        """Run many sequences at once; times are those of the process with the last layers."""
        answer = self._ask({"prompts": batch.prompts, "max_tokens": batch.max_tokens})[0]
        return BatchRun(tuple(map(tuple, answer["token_ids"])), tuple(map(tuple, answer["token_times"])))

    def _ask(self, options: dict[str, Any]) -> list[dict[str, Any]]:
        for child in self._children:
            child.send(options)
        return receive_all(self._children, _TIMEOUT)

    def close(self) -> None:
        """End the processes."""
        for child in self._children:
            child.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _free_ports(count: int) -> list[int]:
    """Free ports; a ring must know them before it starts."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


# -- inside the child ----------------------------------------------------------------------------


def main() -> None:
    """Serve tasks until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; it closes the pipe
    answers = own_output()
    options = json.loads(sys.stdin.readline())
    model, _ = load_model(Path(options["folder"]), lazy=True, strict=False)
    refused = _refusal(model)
    if refused is None:
        _keep_own_layers(model, options)
    answers.write(json.dumps({"blas": computed_by()} if refused is None else {"refused": refused}) + "\n")
    answers.flush()
    with wired_limit(model, [generation_stream]):
        serve_commands(answers, lambda task: run_batch(model, task))


def _refusal(model: Any) -> str | None:
    """Why mlx-lm cannot cut this model here; ``None`` if it can."""
    if not hasattr(getattr(model, "model", None), "pipeline"):
        return f"its {model.model_type} has no pipeline"
    if not mx.distributed.is_available("ring"):
        return "this MLX has no ring of sockets"
    return None


def _keep_own_layers(model: Any, options: dict[str, Any]) -> None:
    """Keep this rank's layers, as ``mlx_lm.utils.sharded_load`` does, but cut where the layout cuts."""
    group = mx.distributed.init(strict=True, backend="ring")
    model.model.pipeline(group, options["layers"][::-1])
    if options["dtype"] is not None:
        model.set_dtype(getattr(mx, options["dtype"]))
    mx.eval(model.parameters())
    mx.eval(mx.distributed.all_sum(mx.array(1.0), stream=mx.cpu))


if __name__ == "__main__":
    main()
