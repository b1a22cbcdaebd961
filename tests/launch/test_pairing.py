"""Two machines that know each other's codes get each other's keys, and nobody else gets anything."""

import contextlib
import hashlib
import importlib
import json
import socket
import threading
import time
from dataclasses import asdict, replace
from typing import Any

import pytest

from splitinfer.errors import ConfigError
from splitinfer.launch import background, pairing
from splitinfer.launch.answer import FoundWorker, How, WorkersAnswer
from splitinfer.launch.pairing import (
    Meeting,
    PairingHello,
    WrongCode,
    ask_code,
    exchange,
    new_code,
    read_code,
    secret_of,
)
from splitinfer.wire.messages import Versions

VERSIONS = Versions(11, "0.1.0", "0.32.4", "0.32.2")
STUDIO, MINI = PairingHello("studio", "ab" * 32, None, 1), PairingHello("mini", "cd" * 32, 5577, 1)
CODES = ("K7M-2QX", "PPA-B34")


def both(
    one: PairingHello, codes: tuple[str, str], other: PairingHello, others: tuple[str, str]
) -> list[PairingHello | Exception]:
    """What each end of a link gets."""
    results: dict[str, PairingHello | Exception] = {}

    def run(link: socket.socket, own: PairingHello, known: tuple[str, str]) -> None:
        with link:
            try:
                results[own.nonce] = exchange(link, own, secret_of(known))
            except (WrongCode, ConfigError, OSError, ValueError) as error:
                results[own.nonce] = error

    here, there = socket.socketpair()
    thread = threading.Thread(target=run, args=(there, other, others))
    thread.start()
    run(here, one, codes)
    thread.join(30)
    return [results[one.nonce], results[other.nonce]]


def test_each_gets_the_others_key():
    assert both(STUDIO, CODES, MINI, CODES[::-1]) == [MINI, STUDIO]


def test_who_stands_between_cannot_put_in_another_key():
    """Both hellos are under both proofs: one that passes everything on but the key is found out."""

    def changed(line: bytes) -> bytes:
        said = json.loads(line)
        return json.dumps({**said, "key": "ef" * 32}).encode() + b"\n" if "key" in said else line

    def passed_on(source: socket.socket, sink: socket.socket) -> None:
        with source.makefile("rb") as lines:
            hello = lines.readline()
            sink.sendall(changed(hello))
            sink.sendall(lines.readline())

    (here, left), (right, there) = socket.socketpair(), socket.socketpair()
    ends = [threading.Thread(target=passed_on, args=each) for each in ((left, right), (right, left))]
    got: list[Exception] = []

    def run(link: socket.socket, own: PairingHello) -> None:
        with pytest.raises(WrongCode) as raised:
            exchange(link, own, secret_of(CODES))
        got.append(raised.value)

    ends += [threading.Thread(target=run, args=each) for each in ((here, STUDIO), (there, MINI))]
    for each in ends:
        each.start()
    for each in ends:
        each.join(30)
    for link in (here, left, right, there):
        link.close()
    assert len(got) == 2


@pytest.mark.parametrize(
    ("other", "codes", "error", "said"),
    [
        (MINI, ("K7M-2QX", "PPA-B35"), WrongCode, ""),
        (MINI, ("K7M-2QW", "PPA-B34"), WrongCode, ""),
        (MINI, ("", ""), WrongCode, ""),
        (
            replace(MINI, key=STUDIO.key),
            ("", ""),
            WrongCode,
            "",
        ),  # a key is no secret: the proof comes first
        (replace(MINI, protocol=2), CODES, ConfigError, "mini runs another version of splitinfer"),
        (replace(MINI, port=None), CODES, ConfigError, "both machines have a model"),
        (replace(MINI, key=STUDIO.key), CODES, ConfigError, "mini has the same key as this machine"),
        (STUDIO, CODES, ValueError, "this machine itself"),
    ],
)
def test_who_is_not_the_other_machine_gets_nothing(
    other: PairingHello, codes: tuple[str, str], error: type[Exception], said: str
):
    here, there = both(STUDIO, CODES, other, codes)
    assert type(here) is error
    assert said in str(here)
    assert error is not WrongCode or type(there) is WrongCode


NO_PORT = json.dumps({"key": MINI.key, "port": 0}).encode() + b"\n"


@pytest.mark.parametrize("line", [b"", b"x\n", b"[]\n", b'{"key": "x"}\n', NO_PORT])
def test_what_is_no_hello_is_refused(line: bytes):
    here, there = socket.socketpair()
    with here, there:
        there.sendall(line)
        there.shutdown(socket.SHUT_WR)
        with pytest.raises((OSError, ValueError)):
            exchange(here, STUDIO, secret_of(CODES))


def test_machines_meet_whichever_types_first_and_again_after_a_wrong_code(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pairing, "_AGAIN", 0.05)
    one = Meeting(STUDIO, port=0, near=[("127.0.0.1", 1)])
    other = Meeting(MINI, port=0, near=[("127.0.0.1", one.port)])
    found: list[tuple[PairingHello, str]] = []

    def run() -> None:
        with pytest.raises(WrongCode):
            other.with_code(CODES[1], "ZZZ-ZZZ")
        found.append(other.with_code(CODES[1], CODES[0]))

    with one.open(), other.open():
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        with pytest.raises(WrongCode):
            one.with_code(*CODES)
        assert one.with_code(*CODES) == (MINI, "127.0.0.1")
        thread.join(30)
    assert found == [(STUDIO, "127.0.0.1")]


def test_strangers_cost_neither_memory_nor_threads_and_keep_nobody_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pairing, "_AGAIN", 0.05)
    scrypt, made = hashlib.scrypt, list[int]()

    def counted(*arguments: Any, **more: Any) -> bytes:
        made.append(1)
        return scrypt(*arguments, **more)

    one = Meeting(STUDIO, port=0, near=[("127.0.0.1", 1)])
    other = Meeting(MINI, port=0, near=[("127.0.0.1", one.port)])
    found: list[tuple[PairingHello, str]] = []
    with one.open(), other.open(), contextlib.ExitStack() as stack:
        monkeypatch.setattr(hashlib, "scrypt", counted)
        before = threading.active_count()
        waiting = threading.Thread(target=lambda: found.append(one.with_code(*CODES)), daemon=True)
        waiting.start()
        hello = json.dumps(asdict(PairingHello("air", "ef" * 32, 5577, 1))).encode() + b"\n"
        for number in range(40):
            link = stack.enter_context(socket.create_connection(("127.0.0.1", one.port), timeout=30))
            link.makefile("rb").readline()  # that it was accepted
            if number % 2:
                link.sendall(hello)
        give_up = time.monotonic() + 10.0  # half of the patience with who says nothing
        while threading.active_count() - before > 10:
            assert time.monotonic() < give_up, "each stranger has a thread"
            time.sleep(0.01)
        assert len(made) == 1
        assert other.with_code(*CODES)[0] == STUDIO
        waiting.join(30)
    assert found == [(MINI, "127.0.0.1")]


def test_codes_as_people_type_them():
    assert read_code(new_code()) is not None
    said: list[str] = []
    typed = iter(["", "K7M", "ppab34", "k7m 2qx"])
    assert ask_code(lambda _: next(typed), said.append, "PPA-B34", None) == "K7M-2QX"
    assert said[:2] == ["a code has six letters and digits, such as K7M-2QX"] * 2
    assert said[2:] == ["this is this machine's code; type the one that the other machine shows"]
    assert ask_code(lambda _: "", said.append, "PPA-B34", "K7M-2QX") == "K7M-2QX"


def test_a_worker_that_runs_already_is_enough(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    command = importlib.import_module("splitinfer.cli.init")  # the package has the command by that name
    monkeypatch.setattr(command, "_meet", lambda *_: (STUDIO, "10.0.0.1"))
    monkeypatch.setattr(
        background, "show", lambda: WorkersAnswer(VERSIONS, None, 1, 1, (FoundWorker(5577, 71, How.UP),))
    )
    assert command._help(None, 5577) == 0
    assert "A worker waits at port 5577 already. From now on it serves studio, too." in capsys.readouterr().err
