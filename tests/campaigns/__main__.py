"""Campaigns: the whole program for a long time, on choices that a seed makes.

    python -m tests.campaigns NAME --minutes M --seed S [--out FILE]      NAME --help: its own options

    soak            requests of every kind, agents and watchers on a server whose worker dies now and then
    deaths          kills, freezes, cuts and dead coordinators, over tcp and over a stand-in for rdma
    strangers       damaged frames at a worker's port
    clients         agents, programs and libraries, which it installs
    up              `splitinfer up`, `chat` and `init` on simulated machines with ssh
    browser         the page in Chromium: its scenes, and a hostile page beside it
    truth           the cut that `plan` chooses, beside every cut measured
    figures         the figures of `plan`, `init` and `/plan`, beside what is true, also under load
    json_schemas    answers in the form of schemas, and JSON Schema's own suite

What is not as it should be is said at once. The last line is one JSON document, which ``--out`` also writes to a file;
the exit code is 1 if something was wrong. Where the machine lacks what a campaign needs, the document says so in
``skipped``.
"""

import argparse
import importlib
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from splitinfer.common.json_text import dumps

from .report import Missing, Report

NAMES = ("soak", "deaths", "strangers", "clients", "up", "browser", "truth", "figures", "json_schemas")


def main(words: Sequence[str]) -> int:
    chooser = argparse.ArgumentParser(
        prog="python -m tests.campaigns", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    chooser.add_argument("name", choices=NAMES, metavar="NAME")
    name = chooser.parse_args(words[:1]).name
    module = importlib.import_module(f".{name}", __package__)
    parser = argparse.ArgumentParser(
        prog=f"{chooser.prog} {name}", description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--minutes", type=float, default=getattr(module, "MINUTES", 10.0), help="that it goes on, once set up"
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed, the same choices")
    parser.add_argument("--out", type=Path, metavar="FILE", help="for the document")
    module.options(parser)
    given = parser.parse_args(words[1:])
    with tempfile.TemporaryDirectory(prefix="campaign-", ignore_cleanup_errors=True) as folder:
        report = Report(name, given.seed, given.minutes, Path(folder))
        for variable in ("CACHE", "CONFIG", "DATA", "STATE"):  # a person's keys and caches stay as they are
            os.environ[f"XDG_{variable}_HOME"] = str(Path(folder) / variable.lower())
        try:
            module.campaign(report, given)
        except Missing as lacking:
            report.skipped = str(lacking)
        except Exception:  # noqa: BLE001 - whatever ends a campaign is its finding
            report.wrong(f"it came to no end: {traceback.format_exc(limit=-4)}")
    text = dumps(report.document())
    if given.out is not None:
        given.out.write_text(f"{text}\n", encoding="utf-8")
    print(text, flush=True)
    return int(bool(report.troubles))


def _end(number: int, _frame: FrameType | None) -> None:
    """Leave no process behind."""
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    sys.exit(main(sys.argv[1:]))
