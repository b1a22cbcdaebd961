"""Real processes that send back what they get, over any scheme."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import curve
from contract import SECONDS

import transports
from transports import Frame, Link, LinkOptions

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

EXIT = b"exit"  # at this frame the process ends, as a program does that has open links
ECHO = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
import curve, transports
if sys.argv[1] == "listener":
    listener = transports.listen(sys.argv[2])
    print(listener.address, flush=True)
    link = listener.accept(20)
else:
    link = transports.connect(sys.argv[2], timeout=20)
while (frame := link.recv(60)).header != {EXIT!r}:
    link.send(frame)
"""


@contextlib.contextmanager
def process(code: str, *args: str, inside: Sequence[str] = ()) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [*inside, sys.executable, "-c", code, *args],
        cwd=ROOT,
        env={**os.environ, curve.VARIABLE: f"{curve.OWN.public}:{curve.OWN.secret}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            yield child
        finally:
            child.kill()


@contextlib.contextmanager
def echo(
    side: str, options: LinkOptions, address: str = "tcp://127.0.0.1:0", inside: Sequence[str] = ()
) -> Iterator[tuple[Link, subprocess.Popen[str]]]:
    """A link to a process that sends everything back; `side` is what we are. `inside`: words before its command."""
    with contextlib.ExitStack() as stack:
        if side == "connector":
            child = stack.enter_context(process(ECHO, "listener", address, inside=inside))
            assert child.stdout is not None
            link = transports.connect(child.stdout.readline().strip(), timeout=SECONDS, options=options)
        else:
            listener = stack.enter_context(transports.listen(address, options=options))
            child = stack.enter_context(process(ECHO, "connector", listener.address, inside=inside))
            link = listener.accept(SECONDS)
        stack.callback(link.abort)
        link.send(Frame(b"warm"))
        assert link.recv(SECONDS).header == b"warm"
        yield link, child
