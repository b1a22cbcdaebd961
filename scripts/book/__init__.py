"""The book: the pages of `docs/` that are made of the code (``PAGES``), and what mkdocs is told (``hook``)."""

from collections.abc import Callable, Mapping
from pathlib import Path

from book import commands, diagrams, settings

ROOT = Path(__file__).parents[2]
PAGES: Mapping[str, Callable[[], str]] = {
    "docs/reference/commands.md": commands.page,
    "docs/reference/settings.md": settings.page,
    **{f"docs/pictures/{name}.svg": made for name, made in diagrams.DIAGRAMS.items()},
}
