"""Pages of the repository outside `docs/` join the book, and links that leave it become the names of files.

`mkdocs` knows the files of `docs/` only. A reader of the repository follows links from there to `layouts/README.md`
and back. `OUTSIDE` says under which address the book has such a page. A link to a file that the book does not have, a
module for instance, keeps its words and loses its target.
"""

import os
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[2]
OUTSIDE = {
    "CHANGELOG.md": "change/changelog.md",
    "CONTRIBUTING.md": "change/contributing.md",
    "README.md": "start/readme.md",
    "layouts/README.md": "reference/layouts.md",
    "scripts/README.md": "change/scripts.md",
    "splitinfer/models/SUPPORT.md": "reference/architectures.md",
    "tests/README.md": "change/tests.md",
    "transports/README.md": "change/transports.md",
}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?![a-z]+:|#)([^()\s#]+)(#[^()\s]*)?\)")


def _target(source: str, path: str) -> str:
    return os.path.normpath(PurePosixPath(source).parent / path)


def within(source: str, text: str) -> str:
    """``text`` of the file ``source`` (from the repository's root) with the links that it has in the book."""
    here = PurePosixPath(OUTSIDE.get(source, source.removeprefix("docs/"))).parent

    def link(match: re.Match[str]) -> str:
        mark, words, path, anchor = match.groups(default="")
        there = _target(source, path)
        inside = OUTSIDE.get(there, there.removeprefix("docs/") if there.startswith("docs/") else None)
        if inside is None:
            return words
        return f"{mark}[{words}]({os.path.relpath(inside, here)}{anchor})"

    return LINK.sub(link, text)


def on_files(files: "Files", config: Any) -> "Files":
    from mkdocs.structure.files import File  # the tests use ``within`` without it

    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=within(source, (ROOT / source).read_text())))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    source = page.file.src_uri
    return markdown if source in OUTSIDE.values() else within(f"docs/{source}", markdown)
