"""The processes of mlx-lm that stand beside the stages, as they are asked from here."""

import json
import shlex
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from splitinfer.bench.child_process import ChildProcess, receive_all
from splitinfer.bench.figures import Run
from splitinfer.console import say
from splitinfer.core.layout import Layout
from splitinfer.core.plain_text import size
from splitinfer.engine.drafts.drafters import model_in
from splitinfer.errors import ModelError
from splitinfer.models.checkpoint import Checkpoint
from splitinfer.models.hub import fetch, open_model
from splitinfer.models.loader import resolve_dtype
from splitinfer.models.memory import free_bytes, on_gpu
from splitinfer.models.trained import is_trained
from splitinfer.probes.evidence import own_address

_PROCESS = "splitinfer.bench.mlx_lm_process"
_SSH = ("ssh", "-T", "-a", "-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "--")
_PORT = 32323
_TIMEOUT = 900.0  # seconds for a batch; only a ring that hangs takes as long


class MlxLm:
    """mlx-lm in child processes that sleep between tasks: its own loops on the whole model, or, if there are several
    ``children``, its pipeline or its tensor parallelism, the last layers first. ``options``: of the model.

    Raises:
        ModelError: mlx-lm cannot run this model here, or cut it; with the reason.
    """

    def __init__(self, children: list[ChildProcess], options: Mapping[str, Any]) -> None:
        self.has_draft, self._children = options.get("draft") is not None, children
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

    def run(self, prompt: Sequence[int], tokens: int, **how: Any) -> Run:
        """Answer one prompt; several processes do it in their batch generator. ``num_draft``: by mlx-lm's own
        speculative decoding, with so many drafts at a time. ``then``: the run of a second turn, these tokens after the
        answer, with the KV of both kept."""
        if len(self._children) > 1:
            return self.run_batch([prompt], tokens)[0]
        answer = self._ask({"prompt": list(prompt), "max_tokens": tokens, **how})[0]
        return Run(tuple(answer["token_ids"]), tuple(answer["token_times"]))

    def run_batch(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[Run]:
        """Answer many prompts at once in the batch generator; times are those of the process with the last layers."""
        answer = self._ask({"prompts": prompts, "max_tokens": tokens})[0]
        return [Run(*map(tuple, each)) for each in zip(answer["token_ids"], answer["token_times"], strict=True)]

    def judge(self, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
        """How far, in logits, each token of an answer is below mlx-lm's own choice."""
        gaps: list[float] = self._ask({"judge": [list(prompt), list(answer)]})[0]["gaps"]
        return gaps

    def rounding(self, tokens: Sequence[int]) -> dict[str, Any]:
        """How far mlx-lm's own logits for some tokens move by how many are computed at once."""
        return self._ask({"rounding": list(tokens)})[0]

    def _ask(self, options: Mapping[str, Any]) -> list[dict[str, Any]]:
        for child in self._children:
            child.send(options)
        if len(self._children) > 1:
            return receive_all(self._children, _TIMEOUT)
        try:
            return [self._children[0].receive()]
        except ModelError as error:
            raise ModelError(f"plain mlx-lm cannot run this model here ({error})") from None

    def close(self) -> None:
        """End the processes."""
        for child in self._children:
            child.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def plain_mlx_lm(layout: Layout, checkpoint: Checkpoint) -> MlxLm:
    """The whole model of a pipeline in a process of its own, with the layout's draft model.

    Raises:
        ModelError: its weights do not fit into the memory that is free here.
    """
    needed, free = sum(info.end - info.begin for info in checkpoint.tensors.values()), free_bytes()
    if needed > free:
        raise ModelError(f"its {size(needed)} of weights do not fit into the {size(free)} free here")
    say("loading the whole model in plain mlx-lm")
    return alone(*fetched(layout), _draft_folder(layout))


def alone(folder: str, dtype: str | None, draft: str | None = None) -> MlxLm:
    """The model in one process."""
    return MlxLm([ChildProcess(_PROCESS)], {"folder": folder, "dtype": dtype, "draft": draft})


def _draft_folder(layout: Layout) -> str | None:
    """The folder of the small model that drafts in a layout; ``None`` if none does that mlx-lm could run."""
    name = None if layout.draft is None else model_in(layout.draft)
    draft = None if name is None else open_model(name)
    return None if draft is None or is_trained(draft) else str(draft.folder.resolve())


def fetched(layout: Layout) -> tuple[str, str | None]:
    """The folder with the whole model of a pipeline, of which this machine may have had a part, and its dtype."""
    name = str(layout.model)
    checkpoint = open_model(name)
    fetch(name, checkpoint, checkpoint.files, lambda _done, _total, _file: None)
    return str(checkpoint.folder.resolve()), resolve_dtype(layout.dtype, gpu=on_gpu())


def processes(
    folder: str, dtype: str | None, layers: Sequence[int], by_layers: bool = True,
    machines: Sequence[str | None] = (),
) -> MlxLm:  # fmt: skip
    """mlx-lm's own pipeline, or its tensor parallelism.

    ``layers``: the number of each process, in their order. ``by_layers``: whether layers are given to processes, or a
    part of each layer to every process. ``machines``: where each process runs, ``None`` for here; the others are
    reached by ssh, and have Python and the model's folder at the same paths.

    They are not started by `mlx.launch`, which gives its processes a terminal where ssh is used: a line of input, which
    a prompt is, would end at 4,096 bytes. What it sets is set here: the rank, and the addresses of all ranks.
    """
    cut: dict[str, Any] = {"layers": list(layers)} if by_layers else {"parallel": len(layers)}
    ranks, children = list(reversed(machines or [None] * len(layers))), list[ChildProcess]()
    with tempfile.NamedTemporaryFile("w", prefix="splitinfer-ring-", suffix=".json") as hosts:
        json.dump([[address] for address in _ring(ranks)], hosts)
        hosts.flush()
        children += [_rank(rank, machine, Path(hosts.name)) for rank, machine in enumerate(ranks)]
        return MlxLm(children, {"folder": folder, "dtype": dtype, **cut})


def _rank(rank: int, machine: str | None, hosts: Path) -> ChildProcess:
    """A process of a ring. Another machine gets a copy of the file with the addresses, for as long as it runs."""
    if machine is None:
        return ChildProcess(_PROCESS, {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)})
    script = (
        f'hosts=$(mktemp) && trap \'rm -f "$hosts"\' EXIT && echo {shlex.quote(hosts.read_text())} >"$hosts" && '
        f'MLX_RANK={rank} MLX_HOSTFILE="$hosts" {shlex.quote(sys.executable)} -m {_PROCESS}'
    )
    return ChildProcess(_PROCESS, command=[*_SSH, machine, shlex.join(["/bin/sh", "-c", script])])


def _ring(machines: Sequence[str | None]) -> list[str]:
    """The address of each rank. A ring must know its ports before it starts: here they are free ones; on another
    machine, where nobody can know, `mlx.launch`'s.

    Raises:
        ModelError: the name of a machine is unknown.
    """
    there = [machine for machine in machines if machine is not None]
    try:
        own = own_address(socket.gethostbyname(there[0]), _PORT) if there else "127.0.0.1"
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
