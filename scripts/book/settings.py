"""The page `reference/settings.md`: every option of a pipeline, from the fields that declare them."""

import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from splitinfer.core.sequence import SamplingParams
from splitinfer.core.serving_options import SERVING_OPTIONS, Declared, declared
from splitinfer.settings import Settings

_HEAD = """\
# Settings

Every option of a pipeline, and where it can be set. The page is made of the fields of `splitinfer.Settings` and
`splitinfer.SamplingParams`. The command line and `Settings` come before the layout, the layout before the default.

## Of a pipeline

`Settings(NAME=VALUE)` in the library, an option on the command line ([Commands](commands.md)).

"""
_SERVING = """\
## Of serving

They can also be written under `serving` in [a layout](../../layouts/README.md), and changed while the pipeline runs:
with `llm.tune(NAME=VALUE)`, or as [a dial of the server](../use/server.md#the-dials-of-serving).

"""
_LIBRARY = """\
## Of the library alone

"""
_SAMPLING = """\
## Of a request

`splitinfer.SamplingParams(NAME=VALUE)`. Where the values come from if you give none: [Sampling](../use/sampling.md).

"""


def page() -> str:
    """The page as Markdown."""
    options = declared(Settings)
    own = [each for name, each in options.items() if name not in SERVING_OPTIONS]
    lines = [_HEAD + "\n".join(_options(own)), _SERVING + "\n".join(_options([*SERVING_OPTIONS.values()]))]
    lines.append(_LIBRARY + "\n".join(_documented(Settings, {*options})))
    lines.append(_SAMPLING + "\n".join(_documented(SamplingParams, set())))
    return "\n".join(lines)


def _options(these: list[Declared]) -> Iterator[str]:
    yield from ("| setting | option | what it does | takes | default |", "|---|---|---|---|---|")
    for each in these:
        flag = each.option.flag or f"--{each.name.replace('_', '-')}"
        takes = "true or false" if each.kind is bool else _range(each) if _has_range(each) else "a path or a word"
        unit = "; the option in GB" if each.option.per != 1 else ""
        yield f"| `{each.name}` | `{flag}` | {each.option.help} | {takes}{unit} | {_default(each.default)} |"
    yield ""


def _has_range(each: Declared) -> bool:
    return bool(each.option.choices) or each.kind in (int, float)


def _range(each: Declared) -> str:
    return re.sub(r"from (\S+) to any finite one", r"of at least \1", each.range)


def _documented(owner: type, known: set[str]) -> Iterator[str]:
    """The fields that the class's docstring explains, each as `name: what it does`."""
    told = _explained(owner.__doc__ or "")
    yield from ("| setting | what it does | default |", "|---|---|---|")
    for each in fields(owner):
        if each.name not in known:
            yield f"| `{each.name}` | {told.get(each.name, '')} | {_default(each.default)} |"
    yield ""


def _explained(docstring: str) -> dict[str, str]:
    """The paragraphs of a docstring that begin with names: `a, b: what they do`."""
    found: dict[str, str] = {}
    for names, words in re.findall(r"^    ((?:\w+, )*\w+): ((?:.|\n {6,})+)", docstring, re.MULTILINE):
        sentence = " ".join(words.split()).replace("``", "`").replace("|", "\\|")
        found |= dict.fromkeys(names.split(", "), sentence[:1].upper() + sentence[1:])
    return found


def _default(value: Any) -> str:
    if value is None or repr(value).startswith("<"):
        return ""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else f"`{value}`"
