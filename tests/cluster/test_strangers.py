"""Whatever comes to a worker's port, the worker lives, says so in its log, and serves the next coordinator right.

One worker process takes all of it, one test after another. After every test a well-behaved peer must get the tokens
that the fresh worker gave. A few kinds of strangers come by default, all of them nightly.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import zip_longest

import msgpack
import numpy as np
import peers
import psutil
import pytest
from peers import Peer, at, hello, load, new, step
from processes import RunningWorker, until, worker

from splitinfer.core.plan import Save, StepPlan, TensorSpec
from splitinfer.wire import headers
from splitinfer.wire.messages import (
    AskManifest,
    Connect,
    Fault,
    Message,
    NextStage,
    Plan,
    Ready,
    Refuse,
    Result,
    Rows,
    Unavailable,
    Welcome,
)  # fmt: skip

MOST_GROWTH = 30 * 2**20  # bytes


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return peers.generate()


@pytest.fixture(scope="module")
def victim(expected: list[int]) -> Iterator[RunningWorker]:
    with worker() as running:
        yield running
        assert peers.generate(running.address) == expected


@pytest.fixture(scope="module")
def fresh(victim: RunningWorker) -> list[int]:
    return probe(victim)


@pytest.fixture(autouse=True)
def _serves_on(victim: RunningWorker, fresh: list[int]) -> Iterator[None]:
    """After every test: the same process, no larger, gives the same tokens."""
    before = victim.rss
    yield
    assert victim.is_alive, victim.err[-2000:]
    assert probe(victim) == fresh
    assert victim.rss < before + MOST_GROWTH


def probe(victim: RunningWorker) -> list[int]:
    """Tokens of three steps on hidden states that are always the same."""
    chance, tokens = np.random.default_rng(3), []
    with ready(victim) as peer:
        for number, part in enumerate((at(1, 0, 5, 6, 7), at(1, 3), at(1, 4))):
            plan, rows, hidden = step(part, new=(new(1, temperature=0.8),) if number == 0 else (), number=number)
            answer = peer.say(plan).say(rows, chance.normal(size=hidden.shape).astype(np.float32)).hear()
            assert isinstance(answer, Result), answer
            tokens += [token.token_id for token in answer.sampled[0].tokens]
        peer.link.close("thank you")
    return tokens


def unknown(victim: RunningWorker) -> Peer:
    return Peer(victim.address)


def greeted(victim: RunningWorker) -> Peer:
    peer = unknown(victim)
    assert isinstance(peer.say(hello()).hear(), Welcome)
    return peer


def ready(victim: RunningWorker) -> Peer:
    peer = greeted(victim)
    answer = peer.say(load()).hear()
    assert isinstance(answer, Ready), answer
    return peer


@pytest.mark.nightly
@pytest.mark.skipif(not hasattr(psutil, "RLIMIT_NOFILE"), reason="this system sets no limits for other processes")
def test_more_connections_than_descriptors(victim: RunningWorker):
    before, limits = victim.process.num_fds(), victim.process.rlimit(psutil.RLIMIT_NOFILE)
    victim.process.rlimit(psutil.RLIMIT_NOFILE, (100, limits[1]))
    try:
        with ExitStack() as stack:
            for _ in range(300):
                stack.enter_context(peers.raw(victim.address))
            until(lambda: victim.process.num_fds() > 90, "it has as many as it may")
        until(lambda: victim.process.num_fds() < before + 10, "they are shut")
    finally:
        victim.process.rlimit(psutil.RLIMIT_NOFILE, limits)


FIRST_WORDS: dict[str, bytes] = {
    "deep": b"\x91" * 2000 + b"\xc0",
    "plan first": headers.encode(Plan(StepPlan(0))),
    "huge name": headers.encode(hello(role="king", name="\x1b[31mx\n" * 500_000)),
}

WRONG_LOADS: dict[str, dict[str, object]] = {
    "absurd bounds": {"bounds": (0, 2**62, 2**63)},
    "no such model": {"model": "nonexistent"},
    "a megabyte of name": {"model": "x" * 2**20},
    "another dtype": {"dtype": "int3\n"},
    "more memory than there is": {"kv_tokens": 2**62},
}


def wrong_load(changes: dict[str, object]) -> bytes:
    """A header that our own message refuses to be."""
    return bytes(msgpack.packb({**msgpack.unpackb(headers.encode(load())), **changes}))


Said = tuple[Message | np.ndarray, ...]
TWO = step(at(1, 0, 5, 6), new=(new(1),))


WRONG_STEPS: dict[str, Said] = {
    "half a payload": (*TWO[:2], TWO[2][:1]),
    "rows without a plan": TWO[1:],
    "rows of another step": (TWO[0], Rows(7, None)),
    "ten thousand plans": (TWO[0],) * 10_000,
    "too narrow": (TWO[0], Rows(0, TensorSpec("float32", (2, 64))), np.zeros((2, 64), np.float32)),
    "never opened": step(at(9, 0)),
    "beyond all room": step(at(1, 0, *[5] * 20_000), new=(new(1),)),
    "saving the unknown": step(at(1, 0), new=(new(1),), saves=(Save(1, 9, 0, 1),)),
    "a token of 64 bits": step(at(1, 0, 2**64 - 1), new=(new(1),)),
    "hello again": (hello(),),
    "an address that is none": (Connect(NextStage("garbage\n" * 1000, "")),),
}

# A penalty reads the logits of the tokens before; MLX does not check where it reads.
BEYOND_VOCABULARY = step(at(1, 0, 5, 2**31 - 1, 2**31 - 1), new=(new(1, repetition_penalty=1.5),))
HARMLESS: dict[str, Said] = {
    "nothing to do": (Plan(StepPlan(0), waits=False),),
    "freeing the unknown": (Plan(StepPlan(0, freed=(1, -3, 2**60)), waits=False),),
    "not a number": (*TWO[:2], TWO[2] * np.float32("nan")),
    "ten thousand sequences": (Plan(StepPlan(0, new=tuple(new(i) for i in range(10_000))), waits=False),),
    "odd parameters": step(at(1, 0), new=(new(1, temperature=2, top_k=2**60, stop_token_ids=[2**60], logprobs=20),)),
    "tokens that no vocabulary has": BEYOND_VOCABULARY,
}

BY_DEFAULT = {"huge name", "no such model", "too narrow"}


def cases() -> Iterator[object]:
    """How far the worker has let the peer in, what it says then, and what the worker may answer."""
    for door, answers, table in (
        (unknown, Refuse, {name: (header,) for name, header in FIRST_WORDS.items()}),
        (greeted, Refuse | Fault, {name: (wrong_load(changes),) for name, changes in WRONG_LOADS.items()}),
        (ready, Fault, WRONG_STEPS),
        (ready, Result | Fault, HARMLESS),
    ):
        for name, said in table.items():
            marks = () if name in BY_DEFAULT else pytest.mark.nightly
            yield pytest.param(door, [*_frames(said)], answers, id=name, marks=marks)


def _frames(said: Iterable[Message | bytes | np.ndarray]) -> Iterator[tuple[bytes, tuple[np.ndarray, ...]]]:
    """The header of each message, and what comes with it."""
    for one, following in zip_longest(items := [*said], items[1:]):
        if not isinstance(one, np.ndarray):
            parts = (following,) if isinstance(following, np.ndarray) else ()
            yield one if isinstance(one, bytes) else headers.encode(one), parts


@pytest.mark.parametrize(("door", "frames", "answers"), cases())
def test_a_message_that_makes_no_sense(
    door: Callable[[RunningWorker], Peer],
    frames: list[tuple[bytes, tuple[np.ndarray, ...]]],
    answers: type,
    victim: RunningWorker,
):
    *first, (header, parts) = frames
    with door(victim) as peer:
        known = len(victim.complaints)
        for one, with_it in first:
            peer.send(one, *with_it)
        if answers == Result | Fault:
            heard = [peer.send(header, *parts).hear()]
        else:
            heard = peer.send(header, *parts).rest() if door is not greeted else order(peer, header)
            assert door is unknown or len(heard) == 1
            assert 0 < len(peer.ending) < 1000
            until(lambda: len(victim.complaints) > known, "the worker says so")
    for message in heard:
        assert isinstance(message, answers), message
        assert isinstance(message, Result) or 0 < len(message.reason) < 1000
        assert isinstance(message, Result | Refuse) or "\n" not in message.reason
    for line in victim.complaints[known:]:
        assert len(line) < 1000
        assert "\x1b" not in line


def order(peer: Peer, header: bytes) -> list[Message]:
    """What is answered to an order; a model that is not at the worker may be at the coordinator, and is not."""
    answer = peer.send(header).hear()
    if isinstance(answer, AskManifest):
        answer = peer.say(Unavailable("it is not here either")).hear()
    return [answer, *peer.rest()]


@pytest.mark.nightly
def test_what_one_coordinator_ordered_does_not_bind_the_next(victim: RunningWorker, expected: list[int]):
    """Weights stay from one to the next; how many values noise is drawn for, and room for KV, must not."""
    for changes in ({"bounds": (0, 11, 12)}, {"vocab_size": 1, "kv_tokens": 1}):
        with greeted(victim) as peer:
            assert isinstance(peer.say(load(**changes)).hear(), Ready)
    assert peers.generate(victim.address) == expected
