"""The contract of a link, once, against the abstract API. Every check takes an address to listen on and works anywhere.

`pair` gives both ends of a fresh link; everything else is plain use of the public functions.
"""

from __future__ import annotations

import contextlib
import queue
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import numpy as np
import psutil
import pytest
import zmq
from held_port import held_port
from processes import until

import transports
from transports import Frame, FrameError, Link, LinkClosed, LinkOptions, LinkTimeout

SECONDS = 60.0  # for everything that must happen; nothing here waits that long when it works
QUICK = LinkOptions(beat_every=0.02, dead_after=2.0, silent_after=2.0)


@contextlib.contextmanager
def pair(address: str, options: LinkOptions = QUICK) -> Iterator[tuple[Link, Link]]:
    with transports.listen(address, options=options) as listener:
        here = transports.connect(listener.address, timeout=SECONDS, options=options)
        there = listener.accept(SECONDS)
        try:
            yield here, there
        finally:
            here.abort("the test is over")
            there.abort("the test is over")


@contextlib.contextmanager
def raw_dealer(address: str) -> Iterator[zmq.Socket[bytes]]:
    """A socket at a listener, to say what no link says."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.rcvtimeo = int(SECONDS * 1000)
        dealer.connect(address.partition("?")[0].replace("rdma", "tcp"))
        yield dealer


@contextlib.contextmanager
def nobody_at(address: str) -> Iterator[str]:
    """An address of this kind at which nobody listens, nor will anybody else."""
    with transports.listen(address) as listener:
        known = listener.address
    with held_port() as port:
        yield re.sub(r"(?<=\d:)\d+", str(port), known)


def payload(frame: Frame) -> list[bytes]:
    return [bytes(memoryview(part)) for part in frame.parts]


def numbered(index: int) -> Frame:
    return Frame(index.to_bytes(4, "little"), (b"x" * (index % 7),))


def number(frame: Frame) -> int:
    return int.from_bytes(frame.header, "little")


def reason_at(link: Link) -> str:
    with pytest.raises(LinkClosed) as ending:
        link.recv(SECONDS)
    return ending.value.reason


def check_late_receiver(address: str) -> None:
    """Everything was sent before anybody reads."""
    with pair(address) as (here, there):
        for link in (here, there):
            for index in range(40):
                link.send(Frame(index.to_bytes(4, "little"), (bytes(index * 20_000),)))
        time.sleep(0.3)
        for link in (here, there):
            frames = [link.recv(SECONDS) for _ in range(40)]
            assert [number(frame) for frame in frames] == list(range(40))
            assert [len(payload(frame)[0]) for frame in frames] == [index * 20_000 for index in range(40)]


def check_pauses(address: str) -> None:
    """Longer and shorter than any carrier may take for a reason to rest."""
    with pair(address) as (here, there):
        for index, pause in enumerate([0.0] * 20 + [0.01, 0.02, 0.03, 0.05, 0.1]):
            time.sleep(pause)
            here.send(numbered(index))
            assert there.recv(SECONDS) == numbered(index)
            there.send(Frame(b"pong"))
            assert here.recv(SECONDS) == Frame(b"pong")


def check_thousands_in_both_directions_at_once(address: str) -> None:
    """One in ten of them is large."""
    count = 2000
    with pair(address) as (here, there):

        def talk(link: Link) -> None:
            for index in range(count):
                link.send(Frame(index.to_bytes(4, "little"), (bytes(index % 7 if index % 10 else 100_000),)))

        with ThreadPoolExecutor() as pool:
            for link in (here, there):
                pool.submit(talk, link)
            for link in (here, there):
                assert [number(link.recv(SECONDS)) for _ in range(count)] == list(range(count))


def check_many_clients(address: str) -> None:
    with transports.listen(address, options=QUICK) as listener, contextlib.ExitStack() as stack:
        clients = [transports.connect(listener.address, timeout=SECONDS, options=QUICK) for _ in range(4)]
        servers = [listener.accept(SECONDS) for _ in clients]
        for link in (*clients, *servers):
            stack.callback(link.abort)
        for index, client in enumerate(clients):
            client.send(numbered(index))
        for server in servers:
            server.send(server.recv(SECONDS))
        assert [number(client.recv(SECONDS)) for client in clients] == list(range(len(clients)))
        came: queue.SimpleQueue[Frame | LinkClosed] = queue.SimpleQueue()
        for server in servers:
            server.deliver_to(came.put)
        clients[0].abort()
        clients[1].send(numbered(99))  # one client's end is nobody else's
        items = [came.get(timeout=SECONDS) for _ in range(2)]
        assert sorted(map(_what, items)) == ["99", "the end"]
        clients[2].send(numbered(100))
        assert _what(came.get(timeout=SECONDS)) == "100"


def _what(item: Frame | LinkClosed) -> str:
    return "the end" if isinstance(item, LinkClosed) else str(number(item))


def check_sizes_and_arrays(address: str) -> None:
    with pair(address) as (here, there):
        large = np.random.default_rng(0).integers(0, 256, 12 << 20, dtype=np.uint8)
        for parts in ((), (b"",), (b"", b"a", b""), (large,), (b"x" * 65535, b"y" * 65536)):
            here.send(Frame(b"", parts))
            frame = there.recv(SECONDS)
            assert frame.header == b""
            assert len(frame.parts) == len(parts)
            assert all(memoryview(got) == memoryview(sent) for got, sent in zip(frame.parts, parts, strict=True))
        here.send(Frame(b"h" * 100_000))
        assert there.recv(SECONDS).header == b"h" * 100_000
        hidden = (mx.arange(3 * 40_000).reshape(3, 1, 40_000) / 7).astype(mx.bfloat16)
        mx.eval(hidden)
        ids = np.arange(12, dtype=np.int32)
        here.send(Frame(b"step", (hidden, ids, np.zeros((0, 4)))))
        first, second, third = (memoryview(part) for part in there.recv(SECONDS).parts)
        assert first.format == second.format == third.format == "B"
        back = mx.array(np.frombuffer(first, np.uint16)).view(mx.bfloat16).reshape(3, 1, 40_000)
        assert mx.array_equal(back, hidden).item()
        assert np.array_equal(np.frombuffer(second, np.int32), ids)
        assert third.nbytes == 0


def check_close_comes_after_frames(address: str) -> None:
    for end in (0, 1):
        with pair(address) as links:
            mine, peers = links[end], links[1 - end]
            for index in range(300):
                mine.send(Frame(index.to_bytes(4, "little"), (bytes(10_000),)))
            mine.close("done for today")
            mine.close("said twice")
            assert [number(peers.recv(SECONDS)) for _ in range(300)] == list(range(300))
            assert reason_at(peers) == "done for today"
            assert reason_at(peers) == "done for today"  # every call, not only the first
            assert peers.closed is not None
            assert peers.closed.reason == mine.closed.reason == "done for today"  # type: ignore[union-attr]
            for link in links:
                with pytest.raises(LinkClosed, match="done for today"):
                    link.send(Frame(b"too late"))


def check_close_at_both_ends(address: str) -> None:
    """Neither waits for words that were never sent."""
    with pair(address) as (here, there):
        started = time.monotonic()
        with ThreadPoolExecutor() as pool:
            pool.submit(here.close, "mine")
            there.close("yours")
        assert time.monotonic() - started < 2.5
        assert here.closed is not None
        assert there.closed is not None


def check_abort(address: str) -> None:
    for end in (0, 1):
        with pair(address) as links:
            mine, peers = links[end], links[1 - end]
            with ThreadPoolExecutor() as pool:
                waiting = pool.submit(mine.recv, SECONDS)
                mine.abort("had enough")
            assert str(waiting.exception()) == "had enough"
            started = time.monotonic()
            reason_at(peers)
            assert time.monotonic() - started < 1.0
            mine.abort("again")
            mine.close("and again")
            assert reason_at(mine) == "had enough"
    with pair(address) as (here, there):
        here.send(Frame(b"never read"))
        here.set_progress(1)
        until(lambda: there.peer_progress == 1, "arrival")
        there.abort("had enough")
        assert reason_at(there) == "had enough"


def check_recv_timeout(address: str) -> None:
    with pair(address) as (here, there):
        with pytest.raises(LinkTimeout, match=r"0\.01 s"):
            here.recv(0.01)
        with pytest.raises(LinkTimeout):
            here.recv(0)
        there.send(Frame(b"still here"))
        assert here.recv(SECONDS).header == b"still here"


def check_connect_timeout(address: str) -> None:
    with nobody_at(address) as nobody, pytest.raises(LinkTimeout) as problem:
        transports.connect(nobody, timeout=0.2)
    assert nobody.removeprefix("curve+") in str(problem.value)
    assert "0.2 s" in str(problem.value)


def check_late_listener(address: str) -> None:
    with nobody_at(address) as later, ThreadPoolExecutor() as pool:
        connecting = pool.submit(transports.connect, later, timeout=SECONDS)
        time.sleep(0.15)  # several refused attempts
        assert not connecting.done()
        with transports.listen(later) as listener, listener.accept(SECONDS) as there, connecting.result() as here:
            here.send(Frame(b"hello"))
            assert there.recv(SECONDS).header == b"hello"


def check_address_in_use(address: str) -> None:
    with transports.listen(address) as listener:
        with pytest.raises(transports.AddressInUse, match=re.escape(listener.address.removeprefix("curve+"))):
            transports.listen(listener.address)
        assert transports.connect(listener.address, timeout=SECONDS).closed is None
    until(lambda: _can_listen(listener.address), "the address is free again")


def _can_listen(address: str) -> bool:
    try:
        transports.listen(address).close()
    except transports.AddressInUse:
        return False
    return True


def check_accept(address: str) -> None:
    listener = transports.listen(address)
    with pytest.raises(LinkTimeout):
        listener.accept(0.01)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(listener.accept, SECONDS)
        listener.close()
        listener.close()
    assert isinstance(waiting.exception(), transports.ListenerClosed)


def check_closing_the_listener_ends_its_links(address: str) -> None:
    listener = transports.listen(address)
    here = transports.connect(listener.address, timeout=SECONDS)
    there = listener.accept(SECONDS)
    listener.close()
    assert "stopped listening" in reason_at(there)
    reason_at(here)


def check_deliver_to(address: str) -> None:
    with pair(address) as (here, there):
        for index in range(20):
            here.send(numbered(index))
        here.set_progress(1)
        until(lambda: there.peer_progress == 1, "arrival")
        seen: list[Frame | LinkClosed] = []
        over = threading.Event()

        def sink(item: Frame | LinkClosed) -> None:
            seen.append(item)
            if isinstance(item, LinkClosed):
                over.set()
            else:
                there.send(item)  # a sink may use its link

        there.deliver_to(sink)
        for index in range(20, 40):
            here.send(numbered(index))
        assert [number(here.recv(SECONDS)) for _ in range(40)] == list(range(40))
        here.close("enough")
        assert over.wait(SECONDS)
        there.abort("and once more")
        assert [number(item) for item in seen[:-1] if isinstance(item, Frame)] == list(range(40))
        assert len(seen) == 41
        assert str(seen[-1]) == "enough"


def check_a_sink_after_a_reader(address: str) -> None:
    """Whoever has read by itself hands over; what comes then is delivered without anybody's asking."""
    with pair(address) as (here, there):
        for index in range(20):
            here.send(numbered(index))
            assert number(there.recv(SECONDS)) == index
        seen: list[Frame | LinkClosed] = []
        there.deliver_to(seen.append)
        here.send(numbered(20))
        until(lambda: len(seen) == 1, "delivery")


def check_a_reader_that_stops(address: str) -> None:
    """Its link lives on, is heard of, and notices the end, though nobody reads."""
    options = LinkOptions(beat_every=0.02, dead_after=0.5)
    with pair(address, options) as (here, there):
        for link, other in ((here, there), (there, here)):
            link.send(Frame(b"hello"))
            other.recv(SECONDS)
        time.sleep(1.2)
        here.set_progress(5)
        until(lambda: there.peer_progress == 5, "progress")
        assert here.closed is None
        assert there.closed is None
        here.close("enough")
        until(lambda: there.closed is not None, "the end")


def check_deliver_to_after_the_end(address: str) -> None:
    with pair(address) as (here, there):
        there.send(Frame(b"one"))
        there.close("over")
        until(lambda: here.closed is not None, "the end")
        seen: list[Frame | LinkClosed] = []
        here.deliver_to(seen.append)
        until(lambda: len(seen) == 2, "delivery")
        assert isinstance(seen[0], Frame)
        assert str(seen[1]) == "over"


def check_close_inside_a_sink(address: str) -> None:
    with pair(address) as (here, there):
        took: list[float] = []

        def sink(item: Frame | LinkClosed) -> None:
            started = time.monotonic()
            there.close("seen enough")
            took.append(time.monotonic() - started)

        there.deliver_to(sink)
        here.send(Frame(b"hello"))
        assert reason_at(here) == "seen enough"
        until(lambda: there.closed is not None, "the end at the closing side")
        assert took[0] < 0.5


def check_a_sink_that_raises(address: str) -> None:
    """Its link ends at both ends, and no other link of the process does."""
    with pair(address) as (here, there):
        seen: list[Frame | LinkClosed] = []

        def sink(item: Frame | LinkClosed) -> None:
            seen.append(item)
            if isinstance(item, Frame):
                raise RuntimeError("a fault")

        there.deliver_to(sink)
        here.send(Frame(b"1"))
        until(lambda: len(seen) == 2, "the end at the sink")
        assert "a fault" in str(seen[1])
        until(lambda: here.closed is not None, "the end at the other end")
        assert "a fault" in str(here.closed)
    with pair(address) as (here, there):
        here.send(Frame(b"2"))
        assert there.recv(SECONDS) == Frame(b"2")


def check_bounds(address: str) -> None:
    options = LinkOptions(max_header_bytes=100, max_part_bytes=1000, max_parts=2)
    with pair(address, options) as (here, there):
        strided = np.zeros((4, 4))[:, ::2]
        for bad in (
            Frame(b"h" * 101),
            Frame(b"", (b"x" * 1001,)),
            Frame(b"", (b"", b"", b"")),
            Frame(b"", (strided,)),
            Frame(b"", ("text",)),  # type: ignore[arg-type]
        ):
            with pytest.raises(FrameError):
                here.send(bad)
        here.send(Frame(b"h" * 100, (b"x" * 1000, b"")))
        assert there.recv(SECONDS) == Frame(b"h" * 100, (b"x" * 1000, b""))


def check_unread_frames_are_bounded(address: str) -> None:
    with pair(address, LinkOptions(max_waiting_bytes=100_000)) as (here, there):
        for _ in range(20):  # what was read counts no more
            for _ in range(10):
                here.send(Frame(b"", (bytes(1000),)))
            for _ in range(10):
                there.recv(SECONDS)
        with pytest.raises(LinkClosed):
            _send_for_ever(here)
        until(lambda: there.closed is not None, "the end")
        assert "wait unread" in str(there.closed)
        assert "wait unread" in str(here.closed)


def _send_for_ever(link: Link) -> None:
    while True:
        link.send(Frame(b"", (bytes(1000),)))


def check_progress(address: str) -> None:
    with pair(address) as (here, there):
        assert here.peer_progress == 0
        there.set_progress(7)
        here.set_progress(2**64 - 1)
        until(lambda: here.peer_progress == 7 and there.peer_progress == 2**64 - 1, "progress")
        there.set_progress(8)
        until(lambda: here.peer_progress == 8, "more progress")
        for wrong in (-1, 2**64):
            with pytest.raises(ValueError, match="progress"):
                here.set_progress(wrong)
        until(lambda: here.silent_for < 0.2 and there.silent_for < 0.2, "heartbeats")


def check_nothing_is_left_over(address: str) -> None:
    """However links end: threads, descriptors, shared memory. ``left_over.py`` looks for processes."""
    me, shared = psutil.Process(), _named_segments()

    def rounds(count: int) -> None:
        for index in range(count):
            with pair(address) as (here, there):
                here.send(Frame(b"x", (bytes(3 << 20),)))
                there.recv(SECONDS)
                (here.abort, here.close)[index % 2]("the end")
        until(lambda: not any(one.name.startswith("transports") for one in threading.enumerate()), "threads end")

    rounds(1)  # starts zmq's own threads
    num_files, num_threads = me.num_fds(), me.num_threads()
    num_rounds, more = (2, 0) if "rdma" in address else (40, 2)
    rounds(num_rounds)
    until(lambda: me.num_fds() <= num_files + more, "descriptors are given back")
    until(lambda: me.num_threads() <= num_threads, "native threads end")
    assert _named_segments() <= shared


def _named_segments() -> set[Path]:
    """Shared memory that would outlive us, where the system shows it."""
    return set(Path("/dev/shm").glob("splitinfer-*"))


def check_with_block(address: str) -> None:
    with pair(address) as (here, there):
        with pytest.raises(RuntimeError), here:
            raise RuntimeError("trouble")
        assert "trouble" in str(here.closed)
        reason_at(there)


CHECKS = {name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")}
