"""Runs the parts one after the other, prints the page and writes the document.

This process computes nothing and does not load MLX: whatever a device does to a part, there is a page and a document.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group

from splitinfer import cleanup
from splitinfer.core.json_text import dumps
from splitinfer.errors import ConfigError
from splitinfer.jobs.child import Outcome, run_job
from splitinfer.jobs.job import allotted, tails
from splitinfer.selftest.address import WorkerAddress
from splitinfer.selftest.checks import exit_code
from splitinfer.selftest.document import document
from splitinfer.selftest.judge import judge
from splitinfer.selftest.outcome import PartOutcome
from splitinfer.selftest.page import page
from splitinfer.selftest.parts import USUAL_SECONDS, Part, is_worth_it, parts

_PLAIN_WIDTH = 160  # columns where there is no terminal to say how many
_OWN_SECONDS = 2.0  # for judging, and for ending processes


@dataclass(frozen=True, slots=True)
class SelftestOptions:
    """The command line's options. ``seconds``: for everything, at most; ``file``: for the document."""

    worker: WorkerAddress | None = None
    seconds: float = USUAL_SECONDS
    quick: bool = False
    file: Path | None = None


def run_selftest(options: SelftestOptions) -> int:
    """Run everything; the exit code.

    Raises:
        ConfigError: the document could not be written.
    """
    began = time.monotonic()
    if options.file is not None:
        _write(options.file, {})
    outcomes = _run_parts(parts(options.worker, quick=options.quick), began, options.seconds - _OWN_SECONDS)
    checks, seconds = judge(outcomes), time.monotonic() - began
    if options.file is not None:
        limits = {"seconds": seconds, "limit_s": options.seconds, "quick": options.quick}
        _write(options.file, document(outcomes, checks, **limits))  # type: ignore[arg-type]
    _show(page(checks, seconds=seconds, file=None if options.file is None else str(options.file)))
    return exit_code(checks)


def _show(found: Group) -> None:
    """Print the page: as text without colours or trailing blanks where there is no terminal."""
    out = Console(highlight=False)
    if out.is_terminal:
        out.print(found)
        return
    out.width = max(out.width, _PLAIN_WIDTH)
    with out.capture() as captured:
        out.print(found)
    out.file.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))
    out.file.flush()


def _run_parts(chosen: tuple[Part, ...], began: float, seconds: float) -> dict[str, PartOutcome]:
    """Run the parts; those that overran once more, if time is left: a part that hangs does so again, and longer."""
    ends = began + seconds
    errors, found = Console(stderr=True, highlight=False), dict[str, PartOutcome]()
    with cleanup.temporary_folder("splitinfer-selftest-") as folder:
        for part, weights in zip(chosen, tails([part.weight for part in chosen]), strict=True):
            if not is_worth_it(part.name, found):
                continue
            limit = allotted(ends - time.monotonic(), weights, part.most_of(seconds))
            found[part.name] = _run_part(part, limit, folder, errors)
        for part in chosen:
            left = ends - time.monotonic()
            if part.name in found and found[part.name].overran and left > found[part.name].limit_s:
                found[part.name] = _run_part(part, left, folder, errors, found[part.name].found)
    return found


def _run_part(
    part: Part, limit: float, folder: str, errors: Console, known: Mapping[str, Any] | None = None
) -> PartOutcome:
    """Run a part. ``known``: what it found before, which stays as it is."""
    with errors.status(f"{part.name}, at most {limit:.0f} s"):
        found = part_outcome(run_job(part.job(folder), limit, {}, known=known))
    if not errors.is_terminal:
        errors.print(f"{part.name}: {found.seconds:.1f} s", soft_wrap=True)
    return found


def part_outcome(outcome: Outcome) -> PartOutcome:
    """What a job reported, as what is judged."""
    return PartOutcome(
        outcome.found,
        outcome.problem,
        outcome.trying,
        outcome.at or "",
        silent_s=outcome.silent_s,
        seconds=outcome.seconds,
        limit_s=outcome.limit_s,
    )


def _write(path: Path, found: Mapping[str, Any]) -> None:
    try:
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(dumps(found, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
