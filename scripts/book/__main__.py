"""``python -m book``, with ``scripts`` on the path: whether the pages that are made of the code are as it is now.

With ``--fix`` it writes them. ``scripts/check`` runs it.
"""

import sys

from book import PAGES, ROOT
from book.errors import unknown


def main() -> int:
    stale = [name for name, made in PAGES.items() if _written(name) != made()]
    if "--fix" in sys.argv:
        for name in stale:
            (ROOT / name).write_text(PAGES[name](), encoding="utf-8")
    elif stale:
        print(f"the code says something else than {', '.join(stale)}; run scripts/check --fix", file=sys.stderr)
        return 1
    wrong = unknown(ROOT / "docs/reference/errors.md", ROOT / "splitinfer")
    for message in wrong:
        print(f"docs/reference/errors.md has a message that the code does not have: {message}", file=sys.stderr)
    return int(bool(wrong))


def _written(name: str) -> str:
    path = ROOT / name
    return path.read_text(encoding="utf-8") if path.exists() else ""


sys.exit(main())
