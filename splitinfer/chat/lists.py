"""Markdown whose numbered lists keep the dot after the number, which rich does not draw."""

from typing import ClassVar

from rich import markdown
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment


class _Item(markdown.ListItem):
    def render_number(self, console: Console, options: ConsoleOptions, number: int, last_number: int) -> RenderResult:
        width = len(f"{last_number}. ") + 1
        for i, line in enumerate(console.render_lines(self.elements, options.update(width=options.max_width - width))):
            yield Segment(" " * width if i else f"{number}. ".rjust(width))
            yield from (*line, Segment("\n"))


class Markdown(markdown.Markdown):
    elements: ClassVar = {**markdown.Markdown.elements, "list_item_open": _Item}
