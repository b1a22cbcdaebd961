"""``scripts/compare``: prints tables, then one JSON document on the last line."""

import argparse
import sys
from pathlib import Path

from scripts.comparing import comparison, links, page
from scripts.comparing.machine import prefer_openblas
from scripts.comparing.options import Wanted
from splitinfer.bench.report import print_found
from splitinfer.errors import SplitinferError


def main() -> None:
    """Compare what the command line names."""
    parser = argparse.ArgumentParser(prog="scripts/compare", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--layout", help="a layout file, or the name of one: compare programs")
    what.add_argument("--links", action="store_true", help="compare links with bare ZeroMQ, on this machine")
    parser.add_argument("--model", help="OWNER/MODEL at the hub, a folder or 'demo'; default: the layout's")
    parser.add_argument("--trials", type=int, default=5, help="at most")
    parser.add_argument("--decode-tokens", type=int, default=64, help="tokens of each stream")
    parser.add_argument("--minutes", type=float, default=15.0, help="how long it may take")
    parser.add_argument("--report", type=Path, help="write the page to share to this file")
    parser.add_argument(
        "--ssh",
        action="store_true",
        help="start mlx-lm's own ways on the layout's machines; each needs this checkout, its Python environment and "
        "the whole model at the same paths",
    )
    given = parser.parse_args()
    if given.links:
        found = links.measure(given.trials)
        print_found(found, links.tables(found))
        return
    prefer_openblas()  # may start this program anew
    found = comparison.measure(
        Wanted(
            given.layout,
            given.model,
            trials=given.trials,
            decode_tokens=given.decode_tokens,
            minutes=given.minutes,
            report=given.report,
            ssh=given.ssh,
        )
    )
    print_found(found, page.tables(found))


if __name__ == "__main__":
    try:
        main()
    except SplitinferError as error:
        sys.exit(str(error))
