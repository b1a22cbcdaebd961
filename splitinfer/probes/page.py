"""Findings as text for a person: a mark, what was looked at, a sentence, and the remedy on a line of its own."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from splitinfer.probes.finding import Fault, Finding, Outcome, exit_code

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
    Fault.TOKENS: "wrong tokens",
    Fault.TRANSPORT: "a link on this machine",
    Fault.DEVICE: "the device",
    Fault.MEMORY: "memory or kept KV",
    Fault.WORKER: "the worker or the network to it",
    Fault.SPEED: "a slow link",
    Fault.TIME: "not everything could be tried",
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
    """How many findings have which outcome, the worst first.

    >>> counted([Finding("", Outcome.NOTE, ""), Finding("", Outcome.FAILED, ""), Finding("", Outcome.NOTE, "")])
    '1 failed, 2 notes'
    """
    counts = Counter(each.outcome for each in found)
    plurals = {Outcome.WARNING: "warnings", Outcome.NOTE: "notes"}
    return ", ".join(
        f"{counts[one]} {plurals.get(one, one) if counts[one] > 1 else one}" for one in Outcome if counts[one]
    )


def selftest_page(found: Sequence[Finding], *, seconds: float, sent: str | None) -> list[RenderableType]:
    """The findings by group, and what to do next. ``sent``: what is said of the document; ``None`` if there is none."""
    parts: list[RenderableType] = []
    for group, members in groupby(found, key=lambda each: each.group):
        parts += [Text(f"\n{group}", style="bold"), *lines(members)]
    return [*parts, Text(""), *map(Text, _closing(found, seconds, sent))]


def _closing(found: Sequence[Finding], seconds: float, sent: str | None) -> list[str]:
    """The last lines: the outcomes counted, what failed first of all, what to do next, what the document has."""
    code = exit_code(found)
    said = f"{counted(found)}, in {seconds:.0f} s; exit code {code}" + (f": {_FAULTS[Fault(code)]}" if code else "")
    following = "Next: splitinfer coord with a layout (docs/start/two-macs.md). On another Mac, use --worker, too."
    if code:
        worst = next(each for each in found if each.fault == code)
        following = f"First: {', '.join(filter(None, (worst.group, worst.name)))}: {worst.remedy or worst.sentence}"
    sent = sent and f"{sent} This page may name some."
    return [said, following, sent or "To send the figures in, run it again with --json FILE."]


def title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def grid(rows: Iterable[tuple[str, str]]) -> Table:
    found = Table.grid(padding=(0, 2))
    found.add_column(style="dim", no_wrap=True)
    found.add_column(overflow="fold")
    for name, text in rows:
        found.add_row(name, Text(text))
    return found
