"""Pipelines for tests: a layout dictionary, and workers in this process or on loopback."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

import splitinfer
from splitinfer.core.kv import growth
from splitinfer.core.kv.format import format_of
from splitinfer.core.rng import position_key
from splitinfer.engine.worker.handshake import AccessControl
from splitinfer.engine.worker.worker import Worker
from splitinfer.keyring import Keyring
from splitinfer.kvstore.store import Disk
from splitinfer.llm import LLM, MakeDrafter, Notice, Settings, setup
from splitinfer.models.cut.cut import StageModel
from splitinfer.models.folder.checkpoint import open_folder
from splitinfer.models.load.loader import load_stage, survey
from splitinfer.models.rows.kv_pool import KVPool
from splitinfer.models.rows.step import nbytes
from splitinfer.weights.models import ModelStore
from tests.emulation.jaccl.world import World
from transports import Link, Listener, listen

_names = itertools.count()


def held_in(pool: KVPool) -> int:
    """Bytes that a pool holds for all sequences, also for those retained."""
    return nbytes([entry.caches for entry in (*pool._entries.values(), *pool._retained.values())])


class Cables(Listener):
    """A listener whose links can be cut."""

    def __init__(self, listener: Listener) -> None:
        self.address, self._listener, self._links = listener.address, listener, list[Link]()

    def accept(self, timeout: float | None = None) -> Link:
        link = self._listener.accept(timeout)
        self._links.append(link)
        return link

    def cut(self) -> None:
        """As a machine does that goes away; those who connect again are accepted."""
        links, self._links = self._links, []
        for link in links:
            link.abort("it went away")

    def close(self) -> None:
        self._listener.close()


@dataclass
class Here:
    """A worker in this process; a test may stop it, and start it again at the same address."""

    cables: Cables
    worker: Worker
    disk: Disk | None

    @property
    def address(self) -> str:
        return self.cables.address.replace("rdma://", "tcp://")

    def stop(self) -> None:
        assert self.worker.stop(timeout=10)

    def start(self) -> None:
        """A new process takes the place of one that ended."""
        self.cables = Cables(listen(self.cables.address))
        self.worker = Worker(self.cables, disk=self.disk)


_here: dict[str, Here] = {}  # by address


@contextmanager
def here(scheme: str = "inproc", disk: Disk | None = None, store: ModelStore | None = None) -> Iterator[Here]:
    address = f"inproc://stage-{next(_names)}" if scheme == "inproc" else f"{scheme}://127.0.0.1:0"
    cables = Cables(listen(address))
    running = Here(cables, Worker(cables, disk=disk, store=store), disk)
    _here[running.address] = running
    try:
        yield running
    finally:
        del _here[running.address]
        running.stop()


@contextmanager
def worker(scheme: str, disk: Disk | None = None, store: ModelStore | None = None) -> Iterator[str]:
    with here(scheme, disk, store) as running:
        yield running.address


@contextmanager
def keyed_worker(keys: Keyring, access: AccessControl, store: ModelStore | None = None) -> Iterator[str]:
    """The address of a worker in this process that admits the coordinators in its ``keys``."""
    listener = listen("tcp://127.0.0.1:0", options=access.options)
    running = Worker(listener, keys=keys, access=access, store=store)
    try:
        yield listener.address
    finally:
        assert running.stop(timeout=10)


def shorten_blocks(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Blocks of KV so short that short prompts and answers fill several: the coordinator's, and the stages' arrays."""
    for module in (setup, growth):
        monkeypatch.setattr(module, "BLOCK", size)


def layout(
    model: Path | str,
    cuts: Sequence[int],
    addresses: Sequence[str],
    dtype: str = "auto",
    codec: str = "none",
    across: Sequence[int] = (),
) -> dict[str, Any]:
    """A layout whose stages hold ``cuts`` layers each; ``codec``: of all links. Those ``across`` two machines have two
    processes here, and no address."""
    left, stages = iter(addresses), list[dict[str, Any]]()
    for i, n in enumerate(cuts):
        stages.append({"name": f"s{i}", "layers": n, **({"codec": codec} if i else {})})
        if i in across:
            stages[i]["across"] = ["local", "local"]
        elif i:
            stages[i]["address"] = next(left)
    return {"model": str(model), "dtype": dtype, "stages": stages}


def lose(llm: LLM) -> None:
    """Cut the links to the second stage, as a machine does that goes away."""
    _here[str(llm.layout.stages[1].address)].cables.cut()


@contextmanager
def pipeline(model: Path | str, cuts: Sequence[int], *args: Any, **options: Any) -> Iterator[LLM]:
    with opened(model, cuts, *args, **options) as (llm, _):
        yield llm


@contextmanager
def opened(
    model: Path | str,
    cuts: Sequence[int],
    scheme: str = "inproc",
    dtype: str = "auto",
    disks: Sequence[Disk] = (),
    drafter: MakeDrafter | None = None,
    codec: str = "none",
    notice: Notice | None = None,
    across: Sequence[int] = (),
    **settings: Any,
) -> Iterator[tuple[LLM, list[Here]]]:
    """An LLM over ``len(cuts)`` stages, and its workers, in this process. ``scheme``: "inproc", "tcp", "rdma" over
    MLX's ring, or "jaccl", rdma over emulated JACCL, a cable for each worker. ``disks``: where each stage keeps KV.
    ``drafter``: makes one. ``notice``: told of the loading. ``across``: the stages that are two processes each."""
    with ExitStack() as stack:
        own = [i for i in range(1, len(cuts)) if i not in across]
        there = [disks[i] for i in own] if disks else [None] * len(own)
        listening = "rdma" if scheme == "jaccl" else scheme
        workers = [stack.enter_context(here(listening, disk)) for disk in there]
        if disks:
            settings |= {"kv_dir": disks[0].path, "kv_dir_bytes": disks[0].cap_bytes}
        described = layout(model, cuts, [one.address for one in workers], dtype, codec, across)
        for stage in described["stages"][1:] if scheme == "rdma" else ():
            stage |= {"transport": "rdma", "backend": "ring"}
        for cable, stage in enumerate(described["stages"][1:] if scheme == "jaccl" else ()):
            stage |= {"transport": "rdma", "device": World.devices(cable)}
        made = LLM(described, settings=Settings(**settings), drafter=drafter, notice=notice)
        yield stack.enter_context(made), workers


def loaded(folder: Path, *ends: int, kv_format: str = "exact") -> list[StageModel]:
    """The stages of a model's folder that end behind these layers, in float32."""
    checkpoint, made = open_folder(folder), list[StageModel]()
    for start, end in itertools.pairwise((0, *ends)):
        found = survey(checkpoint, start, end, "float32", format_of(kv_format))
        made.append(load_stage(checkpoint, found, start, end, "float32", lambda _done, _total: None))
    return made


def prompt(num_tokens: int, vocab: int = 150, seed: int = 11) -> list[int]:
    return [(i * 37 + seed + i * i) % vocab for i in range(num_tokens)]


def plain_greedy(folder: Path | str, tokens: Sequence[int], num_tokens: int) -> list[int]:
    """What mlx-lm itself generates greedily, in float32 as the CPU's "auto" has it."""
    return _plain(folder, tokens, num_tokens, lambda logprobs, _position: mx.argmax(logprobs, axis=-1))


def plain_sampled(
    folder: Path | str, tokens: Sequence[int], num_tokens: int, *, temperature: float, seed: int, vocab_size: int
) -> list[int]:
    """What mlx-lm samples when its random key is the one of the position."""

    def choose(logprobs: mx.array, position: int) -> mx.array:
        key = mx.array(position_key(seed, position), dtype=mx.uint32)
        noise = mx.random.gumbel((vocab_size,), key=key)
        return mx.argmax(logprobs[:, :vocab_size] * (1.0 / temperature) + noise, axis=-1)

    return _plain(folder, tokens, num_tokens, choose)


def _plain(
    folder: Path | str, tokens: Sequence[int], num_tokens: int, choose: Callable[[mx.array, int], mx.array]
) -> list[int]:
    model, _ = load_model(Path(folder))
    model.set_dtype(mx.float32)
    cache = make_prompt_cache(model)
    out: list[int] = []
    y = mx.array([list(tokens)])
    for i in range(num_tokens):
        logits = model(y, cache=cache)[:, -1, :]
        out.append(int(choose(logits - mx.logsumexp(logits, keepdims=True), len(tokens) + i).item()))
        y = mx.array([[out[-1]]])
    return out


def tokens_of(llm: LLM, tokens: Sequence[int], **params: Any) -> list[int]:
    return llm.generate([list(tokens)], splitinfer.SamplingParams(ignore_eos=True, **params))[0].token_ids
