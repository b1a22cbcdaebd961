"""mlx-lm's own ways over several processes, as they are asked from here; and what plain mlx-lm says of answers."""

import json
import shlex
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from splitinfer.bench.child_process import AskedProcess
from splitinfer.bench.figures import Run
from splitinfer.bench.mlx_lm import MlxLm
from splitinfer.errors import ModelError
from splitinfer.system.interfaces import source_towards

PROCESS = "scripts.comparing.mlx_lm_process"
_PATH = str(Path(__file__).parents[2])  # where a child finds that module
_SSH = ("ssh", "-T", "-a", "-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "--")
_PORT = 32323
_TIMEOUT = 900.0  # seconds for a batch; only a ring that hangs takes as long
_POLL = 0.2  # seconds between two checks of whether all children are alive


class Peers:
    """mlx-lm in child processes that sleep between tasks: its pipeline or its tensor parallelism, the last layers
    first. ``options``: of the model.

    Raises:
        ModelError: mlx-lm cannot run this model here, or cut it; with the reason.
    """

    has_draft = False

    def __init__(self, children: list[AskedProcess], options: Mapping[str, Any]) -> None:
        self._children = children
        try:
            for answer in self._ask(options):
                if "refused" in answer:
                    raise ModelError(answer["refused"])
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The process ids of the children."""
        return [child.pid for child in self._children]

    def run(self, prompt: Sequence[int], tokens: int) -> Run:
        """Answer one prompt in the batch generator."""
        return self.run_batch([prompt], tokens)[0]

    def run_batch(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[Run]:
        """Answer many prompts at once in the batch generator; times are those of the process with the last layers."""
        answer = self._ask({"prompts": prompts, "max_tokens": tokens})[0]
        return [Run(*map(tuple, each)) for each in zip(answer["token_ids"], answer["token_times"], strict=True)]

    def _ask(self, options: Mapping[str, Any]) -> list[dict[str, Any]]:
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


def receive_all(children: list[AskedProcess], timeout: float) -> list[dict[str, Any]]:
    """One answer of each. All are watched, because a child that waits for one that has ended would wait forever.

    Raises:
        ModelError: one of them ended, or there was no answer for ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    for child in children:
        while not child.has_answer(_POLL):
            for other in children:
                if not other.is_alive:
                    raise ModelError(other.last_line())
            if time.monotonic() > deadline:
                raise ModelError(f"no answer for {timeout:g} s")
    return [child.receive() for child in children]


def judge(plain: MlxLm, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
    """Return how far, in logits, each token of an answer is below plain mlx-lm's own choice."""
    gaps: list[float] = plain.ask({"judge": [list(prompt), list(answer)]})["gaps"]
    return gaps


def rounding(plain: MlxLm, tokens: Sequence[int]) -> dict[str, Any]:
    """Return how far mlx-lm's own logits for some tokens move by how many are computed at once."""
    return plain.ask({"rounding": list(tokens)})


def processes(
    folder: str, dtype: str | None, layers: Sequence[int], by_layers: bool = True,
    machines: Sequence[str | None] = (),
) -> Peers:  # fmt: skip
    """Open mlx-lm's own pipeline, or its tensor parallelism.

    ``layers``: the number of each process, in their order. ``by_layers``: whether layers are given to processes, or a
    part of each layer to every process. ``machines``: where each process runs, ``None`` for here; the others are
    reached by ssh, and have this checkout, Python and the model's folder at the same paths.

    They are not started by `mlx.launch`, which gives its processes a terminal where ssh is used: a line of input, which
    a prompt is, would end at 4,096 bytes. What it sets is set here: the rank, and the addresses of all ranks.
    """
    cut: dict[str, Any] = {"layers": list(layers)} if by_layers else {"parallel": len(layers)}
    ranks, children = list(reversed(machines or [None] * len(layers))), list[AskedProcess]()
    with tempfile.NamedTemporaryFile("w", prefix="splitinfer-ring-", suffix=".json") as hosts:
        json.dump([[address] for address in _ring(ranks)], hosts)
        hosts.flush()
        children += [_rank(rank, machine, Path(hosts.name)) for rank, machine in enumerate(ranks)]
        return Peers(children, {"folder": folder, "dtype": dtype, **cut})


def _rank(rank: int, machine: str | None, hosts: Path) -> AskedProcess:
    """A process of a ring. Another machine gets a copy of the file with the addresses, for as long as it runs."""
    if machine is None:
        return AskedProcess(PROCESS, {"PYTHONPATH": _PATH, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)})
    script = (
        f'hosts=$(mktemp) && trap \'rm -f "$hosts"\' EXIT && echo {shlex.quote(hosts.read_text())} >"$hosts" && '
        f'PYTHONPATH={shlex.quote(_PATH)} MLX_RANK={rank} MLX_HOSTFILE="$hosts" '
        f"{shlex.quote(sys.executable)} -m {PROCESS}"
    )
    return AskedProcess(PROCESS, command=[*_SSH, machine, shlex.join(["/bin/sh", "-c", script])])


def _ring(machines: Sequence[str | None]) -> list[str]:
    """The address of each rank. A ring must know its ports before it starts: here they are free ones; on another
    machine, where nobody can know, `mlx.launch`'s.

    Raises:
        ModelError: the name of a machine is unknown.
    """
    there = [machine for machine in machines if machine is not None]
    try:
        own = source_towards(there[0]) if there else "127.0.0.1"
        ports = iter(_free_ports(machines.count(None)))
        return [
            f"{own}:{next(ports)}" if machine is None else f"{socket.gethostbyname(machine)}:{_PORT + rank}"
            for rank, machine in enumerate(machines)
        ]
    except OSError as error:
        raise ModelError(f"a ring over {', '.join(there)} has no address: {error}") from None


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("", 0)) for _ in range(count)]
    ports: list[int] = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
