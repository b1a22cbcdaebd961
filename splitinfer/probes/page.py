"""Shows findings to a person: a mark, the subject, a sentence, and the remedy on its own line."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from splitinfer.probes.finding import Blame, Finding, Outcome, exit_code

MARKS = {
    Outcome.FAILED: ("✗", "red"),
    Outcome.WARNING: ("!", "yellow"),
    Outcome.NOT_RUN: ("?", "yellow"),
    Outcome.UNKNOWN: ("?", "yellow"),
    Outcome.NOTE: ("·", "dim"),
    Outcome.NOT_AVAILABLE: ("·", "dim"),
    Outcome.PASSED: ("✓", "green"),
}
_FAULTS = {
    Blame.TOKENS: "wrong tokens",
    Blame.TRANSPORT: "a link on this machine",
    Blame.DEVICE: "the device",
    Blame.MEMORY: "memory or kept KV",
    Blame.WORKER: "the worker or the network to it",
    Blame.SPEED: "a slow link",
    Blame.TIME: "not everything could be tried",
}
_ARROW = "  → "  # before a remedy
_PLAIN_WIDTH = 140  # columns where there is no terminal to say how many


def print_page(parts: Iterable[RenderableType]) -> None:
    """Print to standard output: without colours or trailing blanks where there is no terminal."""
    out = Console(highlight=False)
    if not out.is_terminal:
        out.width = max(out.width, _PLAIN_WIDTH)
    with out.capture() as captured:
        for part in parts:
            for line in part.split("\n", allow_blank=True) if isinstance(part, Text) else [part]:
                is_kept = isinstance(line, Text) and (line.plain.startswith(_ARROW) or not out.is_terminal)
                out.print(line, soft_wrap=is_kept)  # the terminal wraps remedies, so that commands can be copied
    text = captured.get()
    out.file.write(text if out.is_terminal else "".join(f"{line.rstrip()}\n" for line in text.splitlines()))
    out.file.flush()


def lines(found: Iterable[Finding]) -> list[Text]:
    return [_line(each) for each in found]


def _line(finding: Finding) -> Text:
    subject = f" {finding.name}:" if finding.name else ""
    text = Text.assemble(MARKS[finding.outcome], f"{subject} {finding.sentence}")
    if finding.remedy and finding.outcome not in (Outcome.PASSED, Outcome.NOT_AVAILABLE):
        text.append(f"\n{_ARROW}{finding.remedy}", style="bold" if finding.fault else "dim")
    return text


def counted(found: Iterable[Finding]) -> str:
    """Return how many findings have which outcome, the worst first.

    >>> counted([Finding("", Outcome.NOTE, ""), Finding("", Outcome.FAILED, ""), Finding("", Outcome.NOTE, "")])
    '1 failed, 2 notes'
    """
    counts = Counter(each.outcome for each in found)
    plurals = {Outcome.WARNING: "warnings", Outcome.NOTE: "notes"}
    return ", ".join(
        f"{counts[one]} {plurals.get(one, one) if counts[one] > 1 else one}" for one in Outcome if counts[one]
    )


def selftest_page(found: Sequence[Finding], *, seconds: float) -> list[RenderableType]:
    """Return a line for each feature that works, the slow and differing ones, and what failed first of all."""
    features: dict[str, list[Finding]] = {}
    for each in found:
        features.setdefault(each.group, []).append(each)
    slow = [each for each in found if is_slow(each)]
    sound = {
        name: members
        for name, members in features.items()
        if all(is_slow(each) or each.outcome in _SOUND for each in members)
    }
    others = [
        replace(each, name=", ".join(filter(None, (each.group, each.name))))
        for each in found
        if not is_slow(each) and (each.outcome not in _SOUND or _differs(each))
    ]
    return [
        *(title("Works"), *(_feature(name, members) for name, members in sound.items()), Text(_NOT_TRIED, style="dim")),
        *(() if not slow else (title("Slow, or in the way"), *lines(slow))),
        *(() if not others else (title("Differs"), *lines(others))),
        Text(f"\n{_closing(found, seconds)}"),
    ]


_NOT_TRIED = "· not tried: pictures"
_SOUND = (Outcome.PASSED, Outcome.NOT_AVAILABLE)


def is_slow(finding: Finding) -> bool:
    """Return whether a finding is about speed: a slow link, or what the doctor would have changed."""
    return finding.fault is Blame.SPEED or finding.outcome in (Outcome.WARNING, Outcome.NOTE)


def _differs(finding: Finding) -> bool:
    """Return whether rows round otherwise among others, or tokens are others than mlx-lm's."""
    gaps = finding.numbers.get("gaps") or ()
    return bool(finding.numbers.get("changes")) or any(gaps.values() if isinstance(gaps, Mapping) else gaps)


def _feature(name: str, members: Sequence[Finding]) -> Text:
    """Return the line of a feature that works: what passed, and the best rate of its answers."""
    there = [each for each in members if each.outcome is Outcome.PASSED]
    rates = [rate for each in there if (rate := each.numbers.get("tokens_per_second"))]
    said = there[0].sentence if len(there) == 1 else f"{len(there)} checks"
    if not there:
        said = "; ".join(each.sentence for each in members)
    mark = MARKS[Outcome.PASSED if there else Outcome.NOT_AVAILABLE]
    rate = f", up to {max(rates):.3g} tokens a second" if rates and len(there) > 1 else ""
    return Text.assemble(mark, f" {name}: {said}{rate}")


def _closing(found: Sequence[Finding], seconds: float) -> str:
    """Return the outcomes counted, and what failed first of all."""
    code = exit_code(found)
    said = f"{counted(found)}, in {seconds:.0f} s; exit code {code}"
    if not code:
        return said
    worst = next(each for each in found if each.fault == code)
    first = f"First: {', '.join(filter(None, (worst.group, worst.name)))}: {worst.remedy or worst.sentence}"
    return f"{said}: {_FAULTS[Blame(code)]}\n{first}"


def title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def grid(rows: Iterable[tuple[str, str]]) -> Table:
    found = Table.grid(padding=(0, 2))
    found.add_column(style="dim", no_wrap=True)
    found.add_column(overflow="fold")
    for name, text in rows:
        found.add_row(name, Text(text))
    return found
