"""Mutation testing: change the program in some hundred places, one at a time, and see whether a test notices.

    python -m tests.mutants                       # 300, as scripts/test --all does
    python -m tests.mutants --seed 5 --num 40 --room core
    python -m tests.mutants --out after.txt       # a line for each change: compare two states of the tests by diff

The changes are those of Cosmic Ray's operators. A place is drawn by a seed, then one of the operators that fit there.
First all tests of the rooms run once, and each notes which functions it calls. Then for each change a process is forked
in which the module is compiled from the changed source (no file is touched), and the quickest tests that call the
changed function run until one fails. Those that survive are printed: each is a promise without a test, or code that
could go. The same seed draws the same changes while the program is the same, whatever the tests are. Only rooms without
devices, links and clocks are judged; `planted.py` has faults of the others.
"""

from __future__ import annotations

import argparse
import ast
import importlib.machinery
import json
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import hypothesis  # noqa: F401 - what is imported here is not imported again for each change
import mlx.core  # noqa: F401
import numpy  # noqa: F401
import psutil  # noqa: F401
import pydantic  # noqa: F401
import pytest
import yaml  # noqa: F401
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.provider import OperatorProvider

from tests.who_calls import QUIETLY, ROOT, first_lines, in_processes, note_calls

ROOMS = ("core", "wire", "machine", "placement", "text", "kvstore")
LEAST_KILLED = 0.6  # the share
NOT_OURS = ("VariableReplacer", "VariableInserter", "RemoveDecorator")  # the first two need to be told of variables
TEST_SECONDS = 8.0  # of the quickest tests that call the changed function; more run in scripts/test
END_SECONDS = 60.0  # for a change that makes an endless loop


@dataclass(frozen=True)
class Mutant:
    path: str  # from the root
    line: int
    operator: str
    occurrence: int

    @property
    def room(self) -> str:
        return self.path.split("/")[1]

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.operator.removeprefix('Replace')} {self.occurrence}"


def places(path: str) -> Iterator[list[Mutant]]:
    """Where the file can be changed, and for each place the operators that fit."""
    source = (ROOT / path).read_text()
    left_out = _not_run(source)
    found: dict[tuple[int, int], list[Mutant]] = defaultdict(list)
    nodes = list(ast_nodes(get_ast(source)))
    for name in (name for name in OperatorProvider() if name not in NOT_OURS):
        operator = OperatorProvider()[name]()
        at = (begin for node in nodes for begin, _ in operator.mutation_positions(node))
        for occurrence, begin in enumerate(at):
            if not any(first <= begin < last for first, last in left_out):
                found[begin].append(Mutant(path, begin[0], name, occurrence))
    yield from found.values()


def _not_run(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where types and decorators are: who changes them, `slots=True` say, changes little that runs."""
    found: list[ast.expr | None] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.arg | ast.AnnAssign):
            found.append(node.annotation)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found += [node.returns, *node.decorator_list]
        elif isinstance(node, ast.ClassDef):
            found += node.decorator_list
    return [((n.lineno, n.col_offset), (n.end_lineno or 0, n.end_col_offset or 0)) for n in found if n]


def draw(rooms: Sequence[str], num: int, seed: int) -> list[Mutant]:
    chance = random.Random(seed)
    files = sorted(str(path.relative_to(ROOT)) for room in rooms for path in (ROOT / "splitinfer" / room).rglob("*.py"))
    every = [place for path in files for place in places(path)]
    return [chance.choice(place) for place in chance.sample(every, min(num, len(every)))]


def tests_of(mutant: Mutant, tests: dict[str, tuple[float, list[str]]]) -> list[str]:
    """The quickest tests that call the function of the change, up to TEST_SECONDS; of the module if it is in none."""
    begins = first_lines(mutant.path, mutant.line)
    callers = sorted(
        (seconds, name)
        for name, (seconds, called) in tests.items()
        if (begins.intersection(called) if begins else any(one.startswith(mutant.path + ":") for one in called))
    )
    chosen, total = [], 0.0
    for seconds, name in callers:
        total += seconds
        if chosen and total > TEST_SECONDS:
            break
        chosen.append(name)
    return chosen


# -- trying ------------------------------------------------------------------------------------------------------------


def try_out(mutant: Mutant, tests: Sequence[str]) -> int:
    """pytest's exit code, with this change."""
    changed = mutate_code((ROOT / mutant.path).read_text(), OperatorProvider()[mutant.operator](), mutant.occurrence)
    get_code = importlib.machinery.SourceFileLoader.get_code

    def get_changed(loader: importlib.machinery.SourceFileLoader, name: str) -> object:
        if Path(loader.path) != ROOT / mutant.path:
            return get_code(loader, name)
        return compile(changed, loader.path, "exec")

    importlib.machinery.SourceFileLoader.get_code = get_changed  # type: ignore[method-assign, assignment]
    return int(pytest.main([*tests, "-x", *QUIETLY]))


def _word(code: int, tests: Sequence[str]) -> str:
    if not tests:
        return "never called"
    return {0: "survived", -9: "endless"}.get(code, "killed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--room", choices=ROOMS, action="append", help="only this one")
    parser.add_argument("--out", metavar="FILE", type=Path, help="write there whether each change was killed")
    options = parser.parse_args()
    rooms, began = options.room or ROOMS, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        notes = [Path(folder, room) for room in rooms]
        tasks = [partial(note_calls, [f"tests/{room}"], note) for room, note in zip(rooms, notes, strict=True)]
        codes = in_processes(tasks, 900.0)
        if any(codes):
            print(f"tests fail without any change: {dict(zip(rooms, codes, strict=True))}")
            return 1
        tests = {name: found for note in notes for name, found in json.loads(note.read_text())["tests"].items()}
    print(f"{len(tests)} tests and what they call: {time.monotonic() - began:.0f} s", flush=True)
    mutants = draw(rooms, options.num, options.seed)
    chosen = [tests_of(mutant, tests) for mutant in mutants]
    tried = [partial(try_out, mutant, names) if names else int for mutant, names in zip(mutants, chosen, strict=True)]
    codes = in_processes(tried, END_SECONDS)
    if options.out is not None:
        words = map(_word, codes, chosen)
        options.out.write_text(
            "".join(sorted(f"{mutant}: {word}\n" for mutant, word in zip(mutants, words, strict=True)))
        )
    alive = [mutant for mutant, code in zip(mutants, codes, strict=True) if code == 0]
    for mutant in sorted(alive, key=lambda one: (one.path, one.line)):
        text = (ROOT / mutant.path).read_text().splitlines()[mutant.line - 1].strip()
        print(f"survived: {mutant}: {text}")
    num, left = Counter(one.room for one in mutants), Counter(one.room for one in alive)
    for room in sorted(num):
        print(f"{room:12} {num[room] - left[room]:4} killed {left[room]:4} survived")
    print(f"pytest's exit codes (1: a test failed; 2, 4: not importable; -9: endless): {dict(Counter(codes))}")
    share = 1 - len(alive) / len(mutants)
    print(
        f"{share:.0%} of {len(mutants)} killed in {time.monotonic() - began:.0f} s; at least {LEAST_KILLED:.0%} must be"
    )
    return int(share < LEAST_KILLED)


if __name__ == "__main__":
    sys.exit(main())
