"""Peers that do what they like: valid links, and words of any kind on them."""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

import numpy as np

import splitinfer
from splitinfer.core.plan import NewSequence, Slice, StepPlan, TensorSpec
from splitinfer.core.sequence import SamplingParams
from splitinfer.engine.versions import own_versions
from splitinfer.llm import LLM, Settings
from splitinfer.models.folder.hub import open_model
from splitinfer.wire import headers
from splitinfer.wire.messages import Hello, Load, Message, Plan, Progress, Rows
from transports import Frame, Link, LinkClosed, LinkOptions, connect

SECONDS = 20.0
MODEL, NUM_LAYERS, WIDTH = "demo", 12, 192


class Peer:
    """A link to a worker. Leaving the ``with`` block ends it, and the worker knows so by then."""

    def __init__(self, address: str, link: Link | None = None, options: LinkOptions | None = None) -> None:
        self.link = link or connect(address, timeout=SECONDS, options=options or LinkOptions())

    def say(self, message: Message, *parts: Any) -> Self:
        return self.send(headers.encode(message), *parts)

    def send(self, header: bytes, *parts: Any) -> Self:
        """Any bytes as a well-framed message."""
        with suppress(LinkClosed):
            self.link.send(Frame(header, parts))
        return self

    def hear(self, seconds: float = SECONDS) -> Message:
        """The next message that is not about progress."""
        while isinstance(message := headers.decode(self.link.recv(seconds).header), Progress):
            pass
        return message

    def rest(self, seconds: float = SECONDS) -> list[Message]:
        """What is still said until the worker ends the link, which it must."""
        heard, give_up = [], time.monotonic() + seconds
        while True:
            try:
                heard.append(headers.decode(self.link.recv(max(0.0, give_up - time.monotonic())).header))
            except LinkClosed:
                return heard

    @property
    def ending(self) -> str:
        """The reason with which the worker ended the link."""
        self.rest()
        assert self.link.closed is not None
        return self.link.closed.reason

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.link.close()


def hello(role: str = "coordinator", name: str = "attacker", session: str = "", **versions: Any) -> Hello:
    """A greeting; of a session of its own, as every coordinator begins one, if none is named."""
    session = session or uuid4().hex
    return Hello(role, name, session, replace(own_versions(), **versions))


def load(**changes: Any) -> Load:
    """The order for the second half of the demo model."""
    model = changes.get("model", MODEL)
    print_ = open_model(model if model == MODEL else MODEL).fingerprint()
    order = Load(MODEL, "auto", 1, (0, NUM_LAYERS // 2, NUM_LAYERS), print_, 2048, 512, b"", "exact", False)
    return replace(order, **changes)


def step(
    *slices: Slice, new: tuple[NewSequence, ...] = (), number: int = 0, width: int = WIDTH, **more: tuple[Any, ...]
) -> tuple[Plan, Rows, np.ndarray[Any, Any]]:
    """A step's plan, the message of its rows, and these."""
    plan = StepPlan(number, new, slices, **more)
    hidden = np.zeros((plan.num_tokens, width), np.float32)
    return Plan(plan), Rows(number, TensorSpec("float32", hidden.shape)), hidden


def new(seq_id: int, **params: Any) -> NewSequence:
    return NewSequence(seq_id, SamplingParams(**params), 7)


def at(seq_id: int, start: int, *token_ids: int) -> Slice:
    return Slice(seq_id, start, token_ids or (5,), 1)


@contextmanager
def raw(address: str) -> Iterator[socket.socket]:
    """A plain TCP connection to a worker's port."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=SECONDS) as connection:
        yield connection


def generate(address: str = "", num_tokens: int = 24, key: str | None = None, **settings: Any) -> list[int]:
    """What the demo model generates with its second half at ``address``; without, in one stage. ``key``: the worker's,
    if it has one."""
    worker = {"name": "b", "layers": NUM_LAYERS // 2, "address": address} | ({} if key is None else {"key": key})
    two = [{"name": "a", "layers": NUM_LAYERS // 2}, worker]
    layout = {"model": MODEL, "stages": two if address else [{"name": "a", "layers": NUM_LAYERS}]}
    params = splitinfer.SamplingParams(max_tokens=num_tokens, temperature=0.7, seed=3, ignore_eos=True)
    with LLM(layout, settings=Settings(**settings)) as llm:
        return llm.generate("The king had a", params)[0].token_ids
