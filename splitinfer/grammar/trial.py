"""Compiles grammars of strangers in a process of its own, so that one that takes too long can be ended.

What a grammar costs is known only by compiling it: llguidance's own limits are in units of its own, and a thousand
properties may take ten seconds of them. A trial needs no vocabulary, so the process is small and answers a usual
grammar in about a millisecond. The operating system's limits give it so many seconds of a processor for each, and so
much memory; one that needs more is ended with its process, and the next trial begins another.

    stdin    a grammar, as llguidance has it, on a line of JSON
    stdout   why it cannot be compiled, on a line of JSON; empty text: it can
"""

import contextlib
import json
import resource
import signal
import subprocess
import sys
import threading
from typing import IO

from llguidance import LLMatcher, LLTokenizer

from splitinfer.errors import RequestError

CPU_SECONDS = 1
_MEMORY = 4 << 30  # bytes of addresses
_AT_ONCE = 2  # processes
TOO_LONG = f"the grammar takes more than {CPU_SECONDS} s to compile; make it smaller"


class Trials:
    """Processes that try grammars, begun when they are needed. From any thread."""

    def __init__(self) -> None:
        self._idle: list[subprocess.Popen[str]] = []
        self._room = threading.Semaphore(_AT_ONCE)

    def check(self, grammar: str) -> None:
        """Compile a grammar there.

        Raises:
            RequestError: it cannot be compiled, or takes too long.
        """
        with self._room:
            process = self._idle.pop() if self._idle else _begin()
            try:
                answer = _ask(process, grammar)
            except (OSError, ValueError):
                _end(process)
                raise RequestError(TOO_LONG) from None
            self._idle.append(process)
        if answer:
            raise RequestError(f"the grammar cannot be enforced: {first_lines(answer)}")

    def close(self) -> None:
        while self._idle:
            _end(self._idle.pop())


def first_lines(error: str) -> str:
    """Return what a reader needs of an error of many lines."""
    if "NoExtensionBias" in error:
        return "no text that ends has this form"
    _, _, of_schema = error.partition("failed to compile JSON schema: ")
    if of_schema:  # what follows is the grammar around it
        return of_schema.splitlines()[0][:400]
    lines = [line.strip() for line in error.strip().splitlines() if line.strip()]
    return " ".join(lines[:4])[:400]


def _begin() -> subprocess.Popen[str]:
    command = [sys.executable, "-m", __name__]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def _ask(process: subprocess.Popen[str], grammar: str) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(grammar) + "\n")
    process.stdin.flush()
    return str(json.loads(process.stdout.readline()))  # at the process's end an empty line, which is not JSON


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    with contextlib.suppress(OSError), process:
        pass


def main(source: IO[str], target: IO[str]) -> None:
    tokenizer = LLTokenizer("byte")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the coordinator, whose end this one follows
    with contextlib.suppress(ValueError, OSError):  # not everywhere
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, resource.RLIM_INFINITY))
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    for line in source:
        used = resource.getrusage(resource.RUSAGE_SELF)
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + CPU_SECONDS) + 1, hard))
        matcher = LLMatcher(tokenizer, json.loads(line), log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        print(json.dumps(matcher.get_error()), file=target, flush=True)


if __name__ == "__main__":
    main(sys.stdin, sys.stdout)
