"""The page `reference/commands.md`: every command with its arguments and options, from the command line's parser.

A panel of options that several commands have in the same words is written once, and the commands link to it.
"""

import re
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, get_args

import typer

from splitinfer.cli import app

Row = tuple[str, str, str]
_FORM = re.compile(r"(?<![`\w])\[[A-Z]\S*\][\w\[\]:#.]*")  # [NAME=]ADDRESS: not a link
_HEAD = """\
# Commands

Every command and option, as `splitinfer COMMAND --help` prints them. The page is made of the program itself.
"""


def page() -> str:
    """The page as Markdown."""
    commands = [*_commands(typer.main.get_command(app), "splitinfer")]
    panels = {path: _panels(command) for path, command in commands}
    seen: dict[tuple[str, tuple[Row, ...]], list[str]] = {}
    for path, own in panels.items():
        for name, rows in own.items():
            if name:
                seen.setdefault((name, tuple(rows)), []).append(path)
    shared = {key: paths for key, paths in seen.items() if len(paths) > 1}
    titles = _titles(list(shared))
    lines = [_HEAD, *_index(commands), "## Options that several commands have\n"]
    for key, paths in shared.items():
        lines += [f"### {titles[key]}\n", f"Of {_and(f'`{path}`' for path in paths)}.\n", *_table(key[1])]
    for path, command in commands:
        lines += [f"## `{path}`\n", f"{_text(command.help)}\n"]
        same = next(other for other, _ in commands if panels[other] == panels[path])
        if same != path and panels[path]:
            lines += [f"Its options are those of [`{same}`](#{anchor(same)}).\n"]
            continue
        links = []
        for name, rows in panels[path].items():
            key = (name, tuple(rows))
            if key in shared:
                links.append(f"[{titles[key].partition(':')[0].lower()}](#{anchor(titles[key])})")
            else:
                lines += [f"**{name}**\n"] if name else []
                lines += _table(rows)
        if links:
            lines += [f"And the options of {_and(links)}.\n"]
    return "\n".join(lines)


def anchor(title: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield path, command
        return
    for name, inner in command.commands.items():
        if not inner.hidden:
            yield from _commands(inner, f"{path} {name}")


def _panels(command: Any) -> dict[str, list[Row]]:
    """The options by panel: their names, what they do, their defaults."""
    found: dict[str, list[Row]] = {}
    for each in command.params:
        if each.name != "help" and not getattr(each, "hidden", False):
            found.setdefault(getattr(each, "rich_help_panel", None) or "", []).append(_row(each))
    return dict(sorted(found.items(), key=lambda panel: panel[0] != ""))


def _row(each: Any) -> Row:
    if each.param_type_name == "argument":
        return f"`{_argument(each)}`", _text(each.help), "required" if each.required else ""
    takes = "" if each.is_flag else f" {_kind(each)}"
    names = ", ".join(f"`{name}{takes}`" for name in (*each.opts, *each.secondary_opts))
    return names, _text(each.help), _default(each)


def _argument(each: Any) -> str:
    word = (each.metavar or each.name.upper()) + ("..." if each.nargs == -1 else "")
    return word if each.required else f"[{word}]"


_KINDS = {int: "N", float: "X", Path: "PATH"}


def _kind(each: Any) -> str:
    """What an option takes: its choices, or a word for its type."""
    annotation = each.type_descriptor.annotation
    kind = (get_args(annotation) or (annotation,))[0]
    if issubclass(kind, Enum):
        return "\\|".join(str(one.value) for one in kind)
    return _KINDS.get(kind, "TEXT")


def _default(each: Any) -> str:
    value = getattr(each.default, "value", each.default)
    if callable(value) or value in (None, "", (), []) or (each.is_flag and value is False):
        return "required" if each.required else ""
    return f"`{'on' if value is True else value}`"


def _text(help_text: str | None) -> str:
    words = " ".join((help_text or "").split()).replace("\\[", "[").replace("|", "\\|")
    words = _FORM.sub(lambda form: f"`{form[0]}`", words)
    return words if words.endswith((".", "")) or not words else f"{words}."


def _index(commands: Sequence[tuple[str, Any]]) -> Iterator[str]:
    yield from ("| command | what it does |", "|---|---|")
    for path, command in commands:
        yield f"| [`{path}`](#{anchor(path)}) | {_text(command.help.split(chr(10) * 2)[0])} |"
    yield ""


def _table(rows: Sequence[Row]) -> Iterator[str]:
    if not rows:
        return
    yield from ("| option | what it does | default |", "|---|---|---|")
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""


def _titles(keys: Sequence[tuple[str, tuple[Row, ...]]]) -> dict[tuple[str, tuple[Row, ...]], str]:
    """A heading for each shared panel; several of one name are numbered."""
    titles: dict[tuple[str, tuple[Row, ...]], str] = {}
    for key in keys:
        number = 1 + sum(1 for other in titles if other[0] == key[0])
        titles[key] = key[0] if number == 1 else f"{key[0]} ({number})"
    return titles


def _and(words: Any) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else str(last)
