"""What only tcp:// can do wrong: strangers on the port, leaks, exits, names."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import threading

import psutil
import pytest
from contract import QUICK, SECONDS, pair, raw_dealer, reason_at, until
from curve import secured
from echoes import echo, process

import transports
from transports import Frame, LinkOptions, LinkRefused, LinkTimeout
from transports.framing import VERSION, FrameKind, encode

LOOPBACK = "tcp://127.0.0.1:0"


def test_our_own_long_hold_of_the_gil_does_not_kill_a_healthy_link() -> None:
    with echo("connector", LinkOptions(beat_every=0.1, dead_after=0.5)) as (link, _):
        ctypes.PyDLL(None).usleep(1_500_000)  # PyDLL keeps the GIL
        link.send(Frame(b"still there?"))
        assert link.recv(SECONDS).header == b"still there?"


def greeting() -> bytes:
    """The 64 bytes with which ZMTP 3.1 begins."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)


def command(name: bytes, body: bytes) -> bytes:
    inner = bytes([len(name)]) + name + body
    return bytes([4, len(inner)]) + inner


def ready() -> bytes:
    kind = b"DEALER"
    return command(b"READY", b"\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind)


def strangers(port: int) -> list[socket.socket]:
    """Everything that may knock on an open port."""
    speech = [b""] * 200 + [os.urandom(300) for _ in range(20)]
    speech += [greeting()[:11], greeting()[:40], greeting(), b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x01\x00"]
    handshake = greeting() + ready()
    speech += [
        handshake,  # a zmq peer that says nothing
        handshake + b"\x02" + (1 << 62).to_bytes(8, "big"),  # an impossible frame
        handshake + b"\x02" + (200 << 20).to_bytes(8, "big") + b"x" * 1000,  # a huge frame that never comes
        handshake + b"\x00\x05hello",
        handshake + b"\x01\x05hello\x00\x05world",
        handshake + b"\x00\xc8" + b"x" * 10,  # half a frame
    ]
    connections = []
    for words in speech:
        connection = socket.create_connection(("127.0.0.1", port), timeout=SECONDS)
        connection.sendall(words)
        connections.append(connection)
    return connections


def test_strangers_get_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    me = psutil.Process()
    with transports.listen(LOOPBACK, options=QUICK) as listener:
        port = int(listener.address.rpartition(":")[2])
        with transports.connect(listener.address, timeout=SECONDS, options=QUICK):
            listener.accept(SECONDS)  # zmq makes what it needs for connecting at the first time, and keeps it
        num_files = me.num_fds()
        for connection in strangers(port):  # once before measuring, so that pools are filled
            connection.close()
        before = me.memory_info().rss
        for _ in range(3):
            connections = strangers(port)
            with transports.connect(listener.address, timeout=SECONDS, options=QUICK) as here:
                there = listener.accept(SECONDS)
                here.send(Frame(b"hello", (bytes(100_000),)))
                assert there.recv(SECONDS).header == b"hello"
            for connection in connections:
                connection.close()
        # Seen with libzmq 4.3.5: it keeps an event descriptor for about one in 700 such strangers.
        until(lambda: me.num_fds() <= num_files + 20, "the strangers' descriptors are given back")
        assert me.memory_info().rss - before < 20 << 20
        with pytest.raises(transports.LinkTimeout):
            listener.accept(0)
    assert 1 <= len(caplog.records) <= 3
    assert "127.0.0.1:" in caplog.text


def test_silent_connections_are_shut(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Without a handshake, and with one but without an OPEN."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr("transports.listener_hub.OPEN_SECONDS", 0.3)
    with transports.listen(LOOPBACK, options=QUICK) as listener:
        port = int(listener.address.rpartition(":")[2])
        for words in (b"", greeting() + ready()):
            with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as stranger:
                stranger.sendall(words)
                while stranger.recv(4096):
                    pass  # ends when the other side hangs up
    assert "without opening a link" in caplog.text
    assert "(0 " not in caplog.text


@pytest.mark.parametrize(
    ("open_seconds", "dies", "said"),
    [(SECONDS, False, "connected, but no answer"), (0.1, False, "no answer from"), (SECONDS, True, "refused")],
    ids=["silent", "silent until zmq gives up", "dies"],
)
@pytest.mark.parametrize(
    "options", [QUICK, pytest.param(secured(QUICK), marks=pytest.mark.nightly)], ids=["plain", "with keys"]
)
def test_who_does_not_shake_hands_refuses_nothing(
    options: LinkOptions, open_seconds: float, dies: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that stands still, or dies meanwhile, or a program that is no peer: nothing was said of keys."""
    monkeypatch.setattr("transports.tcp.OPEN_SECONDS", open_seconds)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        dying = threading.Timer(0.2, stranger.close if dies else lambda: None)
        dying.start()
        with pytest.raises(LinkTimeout, match=said) as caught:
            transports.connect(f"tcp://127.0.0.1:{stranger.getsockname()[1]}", timeout=1.0, options=options)
        assert caught.value.unreachable is not None
        assert caught.value.unreachable.is_silent is not dies, "a plain socket connects to who is silent"
        dying.join(SECONDS)


def hang_up(stranger: socket.socket, times: int) -> None:
    """As an encrypted listener does that has read a plain greeting before it has said what it wants."""
    for _ in range(times):
        with stranger.accept()[0] as connection:
            while len(connection.recv(64, socket.MSG_PEEK)) < 10:
                pass
            connection.recv(64)
    stranger.close()


@pytest.mark.parametrize(("times", "error"), [(3, LinkRefused), (1, LinkTimeout)], ids=["always", "once"])
def test_who_hangs_up_again_and_again_refuses_a_plain_link(times: int, error: type[Exception]) -> None:
    """And who does it once, and is gone, may have died."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        hanging_up = threading.Thread(target=hang_up, args=(stranger, times))
        hanging_up.start()
        with pytest.raises(error):
            transports.connect(f"tcp://127.0.0.1:{stranger.getsockname()[1]}", timeout=1.0, options=QUICK)
        hanging_up.join(SECONDS)


def test_another_version_is_told_so() -> None:
    opening = bytearray(memoryview(encode(FrameKind.OPEN, seq=0)[0]))
    opening[4] = VERSION + 1
    with transports.listen(LOOPBACK, options=QUICK) as listener, raw_dealer(listener.address) as dealer:
        dealer.send_multipart([bytes(opening)])
        answer = dealer.recv_multipart()
    assert f"transport version {VERSION + 1} there, version {VERSION} here".encode() in answer[0]


def test_a_peer_that_skips_a_frame_ends_its_link() -> None:
    with transports.listen(LOOPBACK, options=QUICK) as listener, raw_dealer(listener.address) as dealer:
        for packet in (encode(FrameKind.OPEN, seq=0), encode(FrameKind.DATA, seq=0), encode(FrameKind.DATA, seq=2)):
            dealer.send_multipart(packet)
        link = listener.accept(SECONDS)
        assert link.recv(SECONDS) == Frame(b"")
        assert "frames are missing" in reason_at(link)


def test_a_process_with_open_links_exits() -> None:
    code = """
import transports
from transports import Frame
listener = transports.listen("tcp://127.0.0.1:0")
link = transports.connect(listener.address, timeout=10)
there = listener.accept(10)
link.send(Frame(b"", (bytes(1000000),)))
there.recv(10)
link.send(Frame(b"unread"))
"""
    with process(code) as child:
        out, problems = child.communicate(timeout=SECONDS)
        assert (child.returncode, out, problems) == (0, "", "")


def test_what_was_sent_before_close_arrives_though_the_process_exits() -> None:
    code = """
import sys, transports
link = transports.connect(sys.argv[1], timeout=10)
for index in range(200):
    link.send(transports.Frame(b"%d" % index, (bytes(100_000),)))
link.close("that was all")
"""
    with transports.listen(LOOPBACK) as listener, process(code, listener.address):
        link = listener.accept(SECONDS)
        assert [link.recv(SECONDS).header for _ in range(200)] == [b"%d" % index for index in range(200)]
        assert reason_at(link) == "that was all"


@pytest.mark.parametrize("host", ["localhost", "[::1]"])
def test_names_and_ipv6(host: str) -> None:
    try:
        listener = transports.listen(f"tcp://{host}:0")
    except transports.AddressError as problem:
        pytest.skip(str(problem))
    with listener, transports.connect(listener.address, timeout=SECONDS) as here:
        assert listener.address.startswith(f"tcp://{host}:")
        here.send(Frame(b"hi"))
        assert listener.accept(SECONDS).recv(SECONDS).header == b"hi"


def test_ctrl_c_while_waiting_leaves_the_link_as_it_is() -> None:
    """A reader does the network thread's work; interrupted between two frames it has lost nothing. A heartbeat is a
    frame, too: interrupted within one, it ends the link."""
    with pair(LOOPBACK, LinkOptions(beat_every=60.0, dead_after=120.0)) as (here, there):
        here.send(Frame(b"one"))
        assert there.recv(SECONDS).header == b"one"
        main = threading.main_thread().ident
        assert main is not None
        timer = threading.Timer(0.2, lambda: signal.pthread_kill(main, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            there.recv(SECONDS)
        timer.join()
        here.send(Frame(b"two"))
        assert there.recv(SECONDS).header == b"two"
