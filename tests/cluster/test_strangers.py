"""Whatever comes to a worker's port, the worker lives, says so in its log, and serves the next coordinator right.

One worker process takes all of it, one test after another. After every test a well-behaved peer must get the
tokens that the fresh worker gave, and after each kind of mischief a real coordinator the right answer.
"""

import os
import random
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace

import fuzz
import msgpack
import numpy as np
import peers
import psutil
import pytest
from effort import thorough
from peers import Peer, at, hello, load, new, step
from processes import RunningWorker, until, worker

import transports
from splitinfer.core.metrics.link_measurement import MOST_BYTES
from splitinfer.core.plan import NewSequence, Save, StepPlan, StepResult, TensorSpec
from splitinfer.core.sequence import SamplingParams
from splitinfer.engine.versions import own_versions
from splitinfer.wire import codec
from splitinfer.wire.messages import (
    AskManifest,
    Connect,
    Echo,
    Fault,
    Message,
    Ready,
    Refuse,
    Result,
    Step,
    Unavailable,
    Welcome,
)  # fmt: skip
from transports import Frame
from transports.framing import Kind, encode

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)  # ZMTP 3.0, no security
DEALER = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return peers.generate_alone()


@pytest.fixture(scope="module")
def victim(expected: list[int]) -> Iterator[RunningWorker]:
    with worker() as running:
        assert peers.generate(running.address) == expected
        with Peer(running.address) as silent:  # it beats, and says nothing for as long as these tests take
            yield running
            assert "lost" in silent.ending
        assert len(re.findall(r"dropped tcp://\S+: it sent no message for 10 s", running.err)) == 1
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
    assert victim.rss < before + 30 * 2**20


def turned_away(victim: RunningWorker) -> list[str]:
    """The log's lines about peers that were not let in."""
    return [line for line in victim.complaints if re.search("refused|dropped|lost", line)]


def open_link(connection: socket.socket) -> None:
    """Say by hand what a transport says first."""
    connection.sendall(GREETING + DEALER)
    heard = b""
    while b"ROUTER" not in heard:  # libzmq takes no messages before its handshake is over
        heard += connection.recv(4096)
    packet = bytes(encode(Kind.OPEN, seq=0)[0])
    connection.sendall(bytes([0, len(packet)]) + packet)


def probe(victim: RunningWorker) -> list[int]:
    """Tokens of three steps on hidden states that are always the same."""
    chance, tokens = np.random.default_rng(3), []
    with ready(victim) as peer:
        for number, part in enumerate((at(1, 0, 5, 6, 7), at(1, 3), at(1, 4))):
            said, hidden = step(part, new=(new(1, temperature=0.8),) if number == 0 else (), number=number)
            answer = peer.say(said, chance.normal(size=hidden.shape).astype(np.float32)).hear()
            assert isinstance(answer, Result), answer
            tokens += [token.token_id for token in answer.result.sampled[0].tokens]
        peer.link.close("thank you")
    return tokens


def greeted(victim: RunningWorker) -> Peer:
    peer = Peer(victim.address)
    assert isinstance(peer.say(hello()).hear(), Welcome)
    return peer


def ready(victim: RunningWorker) -> Peer:
    peer = greeted(victim)
    answer = peer.say(load()).hear()
    assert isinstance(answer, Ready), answer
    return peer


# -- below our messages ----------------------------------------------------------------------


def test_bytes_that_are_no_zmtp(victim: RunningWorker):
    chance = random.Random(1)
    with ExitStack() as stack:
        sockets = [stack.enter_context(peers.raw(victim.address)) for _ in range(40)]
        for i, connection in enumerate(sockets):
            with suppress(ConnectionError):
                connection.sendall((b"", GREETING[:7], GREETING, GREETING + DEALER)[i % 4] + chance.randbytes(200))
    victim.sees("not a usable peer")


def test_half_a_frame_and_one_too_large(victim: RunningWorker):
    announced = {"half": (1000, 10), "oversize": (1 << 50, 10), "unending": (1 << 27, 1 << 20)}
    with ExitStack() as stack:
        for size, sent in announced.values():
            connection = stack.enter_context(peers.raw(victim.address))
            with suppress(ConnectionError):  # the oversize one is cut off at once
                connection.sendall(GREETING + DEALER + b"\x02" + size.to_bytes(8, "big") + bytes(sent))
        peers.generate(victim.address, num_tokens=2)  # while they hang


def test_two_hundred_connections_and_two_hundred_links_that_say_nothing(victim: RunningWorker):
    descriptors, threads = victim.process.num_fds(), victim.process.num_threads()
    with ExitStack() as stack:
        for i in range(400):
            connection = stack.enter_context(peers.raw(victim.address))
            if i % 2:
                open_link(connection)
        until(lambda: victim.process.num_fds() > descriptors + 350, "all are connected")
        assert victim.process.num_threads() == threads
        peers.generate(victim.address, num_tokens=2)  # they are in nobody's way
        # Silence is cut off after OPEN_SECONDS, and links that do not beat after dead_after.
        until(lambda: victim.process.num_fds() < descriptors + 10, "all are shut", 20)


@pytest.mark.skipif(not hasattr(psutil, "RLIMIT_NOFILE"), reason="this system sets no limits for other processes")
def test_more_connections_than_descriptors(victim: RunningWorker):
    before, limits = victim.process.num_fds(), victim.process.rlimit(psutil.RLIMIT_NOFILE)
    victim.process.rlimit(psutil.RLIMIT_NOFILE, (100, limits[1]))
    try:
        with ExitStack() as stack:
            for _ in range(300):
                stack.enter_context(peers.raw(victim.address))
            until(lambda: victim.process.num_fds() > 90, "it has as many as it may")
        until(lambda: victim.process.num_fds() < before + 10, "they are shut", 20)
    finally:
        victim.process.rlimit(psutil.RLIMIT_NOFILE, limits)


# -- the first word --------------------------------------------------------------------------

FIRST_WORDS: dict[str, bytes] = {
    "nothing": b"",
    "no msgpack": b"\xc1",
    "random": random.Random(2).randbytes(500),
    "no map": msgpack.packb([1, 2, 3]),
    "no kind": msgpack.packb({"name": "x"}),
    "unknown kind": msgpack.packb({"kind": "sudo\nroot " * 1000}),
    "deep": b"\x91" * 2000 + b"\xc0",
    "too many fields": msgpack.packb({"kind": "hello", **{f"k{i}\n": i for i in range(10_000)}}),
    "no fields": msgpack.packb({"kind": "hello"}),
    "wrong types": msgpack.packb({"kind": "hello", "role": 1, "name": [], "session": {}, "versions": None}),
    "load first": codec.encode(load()),
    "step first": codec.encode(Step(StepPlan(0), None)),
    "welcome first": codec.encode(Welcome("x", own_versions(), "cpu", 0)),
    "refuse first": codec.encode(Refuse("go away")),
    "huge name": codec.encode(hello(role="king", name="\x1b[31mx\n" * 500_000)),
    "huge version": codec.encode(hello(mlx="9\n" * 500_000)),
    "another pipeline": codec.encode(hello(role="upstream", session="guessed")),
}


def answered(victim: RunningWorker) -> list[str]:
    """What it says of those who said something: silent links of other tests end whenever their time is over."""
    return [line for line in turned_away(victim) if "it sent no message for" not in line]


@pytest.mark.parametrize("header", FIRST_WORDS.values(), ids=FIRST_WORDS.keys())
def test_a_first_word_that_is_none(header: bytes, victim: RunningWorker):
    known = len(answered(victim))
    with Peer(victim.address) as peer:
        heard = peer.send(header).rest()
        assert all(isinstance(message, Refuse) for message in heard)
        assert 0 < len(peer.ending) < 1000
    until(lambda: len(answered(victim)) > known, "the worker says so")
    said = answered(victim)[known:]
    assert len(said) == 1, said
    assert len(said[0]) < 1000
    assert "\x1b" not in said[0]


# -- orders ----------------------------------------------------------------------------------

WRONG_LOADS: dict[str, dict[str, object]] = {
    "more layers than there are": {"bounds": (0, 6, 200)},
    "absurd bounds": {"bounds": (0, 2**62, 2**63)},
    "no such model": {"model": "nonexistent"},
    "no model's folder": {"model": "/etc"},
    "no file's name": {"model": "a\0b\n\x1b[31m"},
    "no home": {"model": "~nobody-of-that-name/model"},
    "a megabyte of name": {"model": "x" * 2**20},
    "another dtype": {"dtype": "int3\n"},
    "more memory than there is": {"kv_tokens": 2**62},
    "negative memory": {"kv_tokens": -5},
    "negative vocabulary": {"vocab_size": -5},
    "other weights": {"fingerprint": replace(load().fingerprint, config="0")},
}


@pytest.mark.parametrize("changes", WRONG_LOADS.values(), ids=WRONG_LOADS.keys())
def test_an_order_that_cannot_be_carried_out(changes: dict[str, object], victim: RunningWorker):
    with greeted(victim) as peer:
        refusal = peer.say(load(**changes)).hear()
        if isinstance(refusal, AskManifest):  # what is not here may be there
            refusal = peer.say(Unavailable("it is not here either")).hear()
        assert isinstance(refusal, Refuse | Fault)
        assert peer.rest() == []
        assert 0 < len(refusal.reason) < 1000
        assert "\n" not in refusal.reason


def test_what_one_coordinator_ordered_does_not_bind_the_next(victim: RunningWorker, expected: list[int]):
    """Weights stay from one to the next; how many values noise is drawn for, and room for KV, must not."""
    for changes in ({"bounds": (0, 11, 12)}, {"vocab_size": 1, "kv_tokens": 1}):
        with greeted(victim) as peer:
            assert isinstance(peer.say(load(**changes)).hear(), Ready)
    assert peers.generate(victim.address) == expected


# -- steps -----------------------------------------------------------------------------------


def shaped(*shape: int, dtype: str = "float32") -> tuple[Step, np.ndarray]:
    good, _ = step(at(1, 0, 5, 6), new=(new(1),))
    return replace(good, tensor=TensorSpec(dtype, shape)), np.zeros(shape, np.float32)


TWO = step(at(1, 0, 5, 6), new=(new(1),))
WRONG_STEPS: dict[str, tuple[Message | np.ndarray, ...]] = {
    "no payload": (TWO[0],),
    "two payloads": (*TWO, TWO[1]),
    "half a payload": (TWO[0], TWO[1][:1]),
    "too narrow": shaped(2, 64),
    "too wide": shaped(2, 4000),
    "one axis": shaped(2),
    "three axes": shaped(2, 192, 1),
    "another dtype": shaped(2, 192, dtype="int8"),
    "payload for nothing": step(freed=(1,)),
    "never opened": step(at(9, 0)),
    "beyond its position": step(at(1, 7), new=(new(1),)),
    "beyond all room": step(at(1, 0, *[5] * 20_000), new=(new(1),)),
    "opened twice": step(at(1, 0), new=(new(1), new(1))),
    "a block unknown": step(at(1, 1), new=(NewSequence(1, SamplingParams(), 7, blocks=(9,), prefix=(5,)),)),
    "saving the unknown": step(at(1, 0), new=(new(1),), saves=(Save(1, 9, 0, 1),)),
    "saving what is not computed": step(at(1, 0), new=(new(1),), saves=(Save(1, 1, 0, 1),)),
    "a token of 40 bits": step(at(1, 0, 2**40), new=(new(1),)),
    "a token of 64 bits": step(at(1, 0, 2**64 - 1), new=(new(1),)),
    "hello again": (hello(),),
    "load again": (load(),),
    "the worker's own words": (Result(StepResult(0)),),
    "an address that is none": (Connect("garbage\n" * 1000, ""),),
    "a scheme that is none": (Connect("ftp://127.0.0.1:1", ""),),
}


@pytest.mark.parametrize("said", WRONG_STEPS.values(), ids=WRONG_STEPS.keys())
def test_a_step_that_cannot_be_run(said: tuple[Message, ...], victim: RunningWorker):
    with ready(victim) as peer:
        (fault,) = peer.say(*said).rest()
        assert isinstance(fault, Fault)
        assert 0 < len(fault.reason) < 1000
        assert "\n" not in fault.reason


def twice() -> tuple[Message | np.ndarray, ...]:
    """Two slices of one sequence, which no plan of ours can have."""
    said = step(at(1, 0), at(2, 0), new=(new(1),))
    object.__setattr__(said[0].plan.slices[1], "seq_id", 1)
    return said


HARMLESS: dict[str, tuple[Message | np.ndarray, ...]] = {
    "nothing to do": (Step(StepPlan(0), None),),
    "freeing the unknown": (Step(StepPlan(0, freed=(1, -3, 2**60)), None),),
    "a step's number": (Step(StepPlan(-(2**60)), None),),
    "not a number": (TWO[0], TWO[1] * np.float32("nan")),
    "infinite": (TWO[0], TWO[1] + np.float32("inf")),
    "ten thousand sequences": (Step(StepPlan(0, new=tuple(new(i) for i in range(10_000))), None),),
    "odd parameters": step(at(1, 0), new=(new(1, temperature=1e30, top_k=2**60, stop_token_ids=[2**60], logprobs=20),)),
    "twice in a plan": twice(),
}


@pytest.mark.parametrize("said", HARMLESS.values(), ids=HARMLESS.keys())
def test_an_odd_step_does_no_harm(said: tuple[Message, ...], victim: RunningWorker):
    with ready(victim) as peer:
        answer = peer.say(*said).hear()
        assert isinstance(answer, Result | Fault), answer


@pytest.mark.parametrize("token", [2**31 - 1])
def test_tokens_outside_the_vocabulary_are_not_looked_up(token: int):
    """A penalty reads the logits of the tokens before; MLX does not check where it reads."""
    with worker() as other, ready(other) as peer:
        said = step(at(1, 0, 5, token, token), new=(new(1, repetition_penalty=1.5),))
        assert isinstance(peer.say(*said).hear(), Result | Fault)


@pytest.mark.parametrize("answer", [b"\xc1", codec.encode(Refuse("no")), codec.encode(Result(StepResult(0)))])
def test_a_next_stage_that_is_none_leaves_no_link_behind(answer: bytes, victim: RunningWorker):
    threads = victim.process.num_threads()
    with transports.listen("tcp://127.0.0.1:0") as listener:
        with ready(victim) as peer:
            peer.say(Connect(listener.address, ""))
            link = listener.accept(peers.SECONDS)
            link.recv(peers.SECONDS)
            link.send(Frame(answer))
            (fault,) = peer.rest()
            assert isinstance(fault, Fault)
        until(lambda: link.closed is not None, "the worker ends that link", 5)
        until(lambda: victim.process.num_threads() <= threads, "its thread is gone", 5)


# -- echoes ----------------------------------------------------------------------------------


def test_echoes_that_nobody_reads_take_no_memory(victim: RunningWorker):
    """Two thousand times the most that one may ask for, 8 GB, on a connection that is never read from."""
    before = victim.rss
    packets = (
        encode(Kind.DATA, seq=i, header=codec.encode(m))[0] for i, m in enumerate([hello(), *[Echo(MOST_BYTES)] * 2000])
    )
    with peers.raw(victim.address) as connection:
        open_link(connection)
        for packet in map(bytes, packets):
            connection.sendall(b"\x02" + len(packet).to_bytes(8, "big") + packet)
        until(lambda: len(connection.recv(2**20, socket.MSG_PEEK)) > 2**16, "it answers")
        largest = 0
        give_up = time.monotonic() + 5
        while time.monotonic() < give_up:
            largest = max(largest, victim.rss - before)
            time.sleep(0.02)
    assert largest < 30 * 2**20


@pytest.mark.parametrize("size", [-1, MOST_BYTES + 1, 2**40])
def test_an_echo_of_a_size_that_none_has(size: int, victim: RunningWorker):
    with greeted(victim) as peer:
        header = msgpack.packb({"kind": "echo", "reply_bytes": size})
        (fault,) = peer.send(header).rest()
        assert isinstance(fault, Fault)
        assert f"an echo of {size} bytes; it may have 4,194,304" in fault.reason


# -- at random -------------------------------------------------------------------------------

TARGETS: list[Callable[[], bytes]] = [
    lambda: codec.encode(hello()),
    lambda: codec.encode(load()),
    lambda: codec.encode(TWO[0]),
    lambda: codec.encode(Connect("tcp://127.0.0.1:1", "")),
]


def test_mutated_words(victim: RunningWorker):
    """Many through the live port, a third each as first word, as order and as step."""
    chance, before = random.Random(int(os.environ.get("SEED", "4"))), victim.rss
    for i in range(thorough(3, 240)):
        with [Peer, greeted, ready][i % 3](victim) if i % 3 else Peer(victim.address) as peer:
            target = TARGETS[i % 3]()
            header = fuzz.mutate(target, chance)
            if b"kv_tokens" in header or i % 3 != 1:
                peer.send(header, *((TWO[1],) if i % 3 == 2 else ()))
            peer.send(b"\xc1")  # whatever it was taken for, here it ends
            peer.rest()
    assert victim.rss < before + 30 * 2**20


def test_a_worker_that_listens_to_itself(victim: RunningWorker):
    """A stage whose next stage is itself does no harm to the next coordinator."""
    with greeted(victim) as peer:
        assert isinstance(peer.say(load(stage=0, bounds=(0, 6, 12))).hear(), Ready)
        peer.say(Connect(victim.address, "")).hear()
        slices = (at(1, 0, 5, 6),)
        peer.say(Step(StepPlan(0, (new(1),), slices), TensorSpec("float32", (2, 192))), TWO[1])


def test_connections_that_are_reset(victim: RunningWorker):
    for _ in range(50):
        with peers.raw(victim.address) as connection:
            connection.sendall(GREETING + DEALER)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
