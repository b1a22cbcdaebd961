"""Runs pytest in forks of a process that has imported what is the same for all of them.

Importing MLX, mlx-lm and transformers takes longer than most tests that are run for a fault. They are imported here
once; the packages under test never are, so each fork imports those of its tree as they are then.

A line of JSON on standard input: arguments for pytest and what to add to the environment. Two lines of answer: the
fork's process id, which is a process group's, too, and an empty one when it has ended.
"""

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Sequence

_COMMON = ("pytest", "numpy", "mlx.core", "mlx.nn", "mlx_lm", "transformers", "pydantic", "zmq", "msgpack")


def main() -> None:
    """Serve until standard input ends."""
    for name in (*_COMMON, "mlx_lm.models.base", "mlx_lm.models.cache", "mlx_lm.tokenizer_utils"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        arguments, changes = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _be_pytest(arguments, changes)
        answers.write(f"{pid}\n")
        os.waitpid(pid, 0)
        answers.write("\n")


def _be_pytest(arguments: Sequence[str], changes: dict[str, str]) -> None:
    """In the fork, which never returns."""
    code = 70
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        os.environ.update(changes)
        import pytest

        code = int(pytest.main(list(arguments)))
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
