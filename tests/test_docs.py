"""The documentation points to things that exist: pages, anchors, modules, commands and options.

A page or module that is renamed, a heading that is reworded or an option that is removed breaks what points to it
without any error. These tests read the pages as text and ask the file system and the command line's parser. They run
the page of the library, which is one program.
"""

import ast
import doctest
import importlib
import json
import re
import shlex
import tomllib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from gpu_figures.__main__ import app as on_gpu

from splitinfer import SamplingParams, Settings, config
from splitinfer.cli import app
from splitinfer.errors import SplitinferError

ROOT = Path(__file__).parent.parent
FRONT = ROOT / "README.md"
CONTENTS = ROOT / "docs" / "README.md"
FOLDERS = ("docs", "findings", "layouts", "scripts", "splitinfer", "transports")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
CURRENT = [page for page in PAGES if page.name != "CHANGELOG.md"]  # a changelog names what is gone
OF_SCRIPTS = {"--fix", "--write", "--all", "--drafter-minutes", "--links", "--ssh"}

FENCE = re.compile(r"^ *(```+|~~~+).*?^ *\1 *$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^()\s>]+)>?[^()]*\)")
CALL = re.compile(r"(?:\$ )?(?:time )?(?:\.venv/bin/)?(?:splitinfer +|scripts/(?=bench))([a-z].*)", re.DOTALL)
MEMBER = re.compile(r"`([A-Z]\w+)\.(\w+)[`(]")
HEADING = re.compile(r"^#{1,6} +(.+?) *#* *$", re.MULTILINE)


def wrong(pages: Iterable[Path], faults: Callable[[Path], Collection[str]]) -> dict[str, Collection[str]]:
    return {str(page.relative_to(ROOT)): found for page in pages if (found := faults(page))}


def code_in_lines(page: Path) -> list[str]:
    return CODE.findall(FENCE.sub("", page.read_text()))


# ----- links and anchors -------------------------------------------------------------------------------


def links(text: str) -> list[str]:
    return LINK.findall(CODE.sub("", FENCE.sub("", text)))


def anchors(text: str) -> set[str]:
    found: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", text)):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        numbered = (slug if n == 0 else f"{slug}-{n}" for n in range(1000))
        found.add(next(name for name in numbered if name not in found))
    return found


def broken(page: Path) -> list[str]:
    return [target for target in links(page.read_text()) if not _leads_somewhere(page, target)]


def _leads_somewhere(page: Path, target: str) -> bool:
    if re.match(r"[a-z][a-z0-9+.-]*:", target):
        return True
    path, _, anchor = target.partition("#")
    there = page.parent / path if path else page
    if not there.exists():
        return False
    return not anchor or (there.suffix == ".md" and anchor in anchors(there.read_text()))


def unfinished(page: Path) -> list[str]:
    """Marks of two versions that were to be merged."""
    return re.findall(r"^(<{7} |={7}$|>{7} )", page.read_text(), re.MULTILINE)


def test_every_page_of_docs_is_in_the_table_of_contents():
    listed = {(CONTENTS.parent / target).resolve() for target in links(CONTENTS.read_text())}
    assert {page for page in PAGES if page.is_relative_to(CONTENTS.parent)} - {CONTENTS} - listed == set()


# ----- modules -----------------------------------------------------------------------------------------


HERE = r"(?:docs|layouts|scripts|splitinfer|tests|transports)/[\w./-]*\w"


def missing_files(page: Path) -> set[str]:
    """Files and folders that ``page`` names and that exist neither from the root, ``splitinfer/`` nor its folder."""
    lines = [line.strip() for block in FENCE.finditer(page.read_text()) for line in block[0].splitlines()]
    named = {name for code in code_in_lines(page) for name in re.findall(rf"[\w./-]+\.py\b|^{HERE}", code)}
    named |= {line.split()[0] for line in lines if line.startswith("scripts/") and "<" not in line}
    folders = (ROOT, ROOT / "splitinfer", page.parent)
    return {name for name in named if not any((folder / name).exists() for folder in folders)}


def missing_names(page: Path) -> set[str]:
    """``Class.name`` in code of ``page`` where no class of the product of that name has such a member."""
    return {f"{each}.{name}" for each, name in set(MEMBER.findall(page.read_text())) if name not in members()[each]}


@cache
def product() -> list[ast.Module]:
    """The modules that are installed."""
    return [
        ast.parse(path.read_text()) for room in ("splitinfer", "transports") for path in (ROOT / room).rglob("*.py")
    ]


@cache
def members() -> Mapping[str, set[str]]:
    """By the name of a class: the methods and the fields of classes of that name."""
    found = defaultdict[str, set[str]](set)
    for tree in product():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found[node.name] |= {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
                found[node.name] |= {
                    str(getattr(one.target, "id", "")) for one in node.body if isinstance(one, ast.AnnAssign)
                }
    return found


# ----- commands and options ----------------------------------------------------------------------------

COMMAND_LINE = typer.main.get_command(app)
UsageError = typer.BadParameter.__base__  # typer does not export it


def commands(text: str) -> Iterator[str]:
    """The calls of `splitinfer` in a page, from blocks of code and from code in a line."""
    blocks = [line for block in FENCE.finditer(text) for line in block[0].splitlines()]
    for line in [*blocks, *CODE.findall(FENCE.sub("", text))]:
        match = CALL.match(line.strip())
        if match:
            yield match[1]


def refusal(command: str) -> str | None:
    """Why the command line would not take ``command``; ``None`` if it would. Nothing is run."""
    words = shlex.split(re.sub(r"[\[\]]| > \S+", "", command), comments=True)
    at = COMMAND_LINE
    try:
        while hasattr(at, "commands"):
            if words[:1] and words[0] not in at.commands:
                return f"no command {words[0]!r}"
            if not words:
                return None
            at, words = at.commands[words[0]], words[1:]
        at.make_context("splitinfer", words)
    except UsageError as error:
        return str(error)
    return None


def known_options() -> set[str]:
    """Every option of every command, and of ``scripts/on_gpu``."""
    todo, found = [COMMAND_LINE, typer.main.get_command(on_gpu)], {"--help"}
    while todo:
        command = todo.pop()
        todo += getattr(command, "commands", {}).values()
        found |= {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return found


def refused(page: Path) -> dict[str, str]:
    found = {command: refusal(command) for command in commands(page.read_text())}
    return {command: why for command, why in found.items() if why is not None}


def test_commands_can_be_parsed():
    assert wrong([page for page in CURRENT if page.name != "commands.md"], refused) == {}
    assert sum(1 for _ in commands(FRONT.read_text())) >= 5, "commands are found"


def unknown_options(page: Path) -> set[str]:
    named = {code.split()[0].partition("=")[0] for code in code_in_lines(page) if code.startswith("--")}
    return named - known_options() - OF_SCRIPTS


# ----- blocks of code ----------------------------------------------------------------------------------

BLOCK = re.compile(r"^( *)```(json|toml|yaml|python)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
KEY = "5c0e4b3f9d1a72668f0b2c9d7e41a35f" * 2


def read_block(kind: str, text: str) -> None:
    """Read a block as what reads it would. A part of a layout, which begins with an indented stage, is not a layout."""
    if kind == "python":
        ast.parse(text)
    elif kind == "json":
        json.loads(text)
    elif kind == "toml":
        tomllib.loads(text)
    else:
        shape = yaml.safe_load(text.replace("…", KEY))
        if isinstance(shape, dict) and "stages" in shape:
            config.Layout.from_dict(shape)


def unreadable(page: Path) -> dict[str, str]:
    found = {}
    for indent, kind, text in BLOCK.findall(page.read_text()):
        try:
            read_block(kind, re.sub(rf"^{indent}", "", text, flags=re.MULTILINE))
        except (ValueError, SyntaxError, yaml.YAMLError, SplitinferError) as error:
            found[text] = str(error)
    return found


@pytest.mark.parametrize(
    ("faults", "pages"),
    [
        (broken, PAGES),
        (unfinished, PAGES),
        (missing_files, CURRENT),
        (missing_names, sorted((ROOT / "docs" / "change").glob("*.md"))),
        (unknown_options, CURRENT),
        (unreadable, PAGES),
    ],
)
def test_of_no_page(faults: Callable[[Path], Collection[str]], pages: list[Path]):
    assert wrong(pages, faults) == {}


# ----- pages that are programs, and tables of names ----------------------------------------------------


def test_the_library_s_page_runs_and_every_key_of_its_statistics_is_explained():
    text = (ROOT / "docs" / "use" / "library.md").read_text()
    program = "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    before_the_end = program.replace("\nllm.close()", "\nstats = llm.stats()\nllm.close()")
    names: dict[str, Any] = {}
    exec(compile(before_the_end, "docs/use/library.md", "exec"), names)
    assert names["answer"].num_cached_tokens > 0
    explained = set(re.findall(r"`\.?(?:stages\[i\]\.)?(\w+)`", (ROOT / "docs" / "operate" / "metrics.md").read_text()))
    stats = names["stats"]
    assert {*stats, *stats["stages"][0]} - explained - {"stages", "speculation"} == set()


def test_the_keys_of_layouts_are_those_of_the_code():
    table = (ROOT / "layouts" / "README.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == {
        *config._LayoutShape.model_fields,
        *config._StageShape.model_fields,
    }
    assert [name for name in config._ServingShape.model_fields if f"`{name}`" not in table] == []


def every_command(command: Any, path: str = "splitinfer") -> Iterator[str]:
    if not hasattr(command, "commands"):
        yield path
        return
    for name, inner in command.commands.items():
        if not inner.hidden:
            yield from every_command(inner, f"{path} {name}")


def test_the_commands_are_those_of_the_program():
    page = (ROOT / "docs/reference/commands.md").read_text()
    assert re.findall(r"^\| `([\w ]+)` \|", page, re.MULTILINE) == [*every_command(COMMAND_LINE)]


def test_the_settings_and_their_defaults_are_those_of_the_code():
    page = (ROOT / "docs/reference/settings.md").read_text()
    told = dict(re.findall(r"^\| `(\w+)` \|.*\| ([^|]*) ?\|$", page, re.MULTILINE))
    known = {each.name: each.default for owner in (Settings, SamplingParams) for each in fields(owner)}
    assert set(told) == set(known)
    plain = {name: value for name, value in known.items() if value is not None and value is not MISSING}
    assert {name: told[name].strip().strip("`").replace(",", "") for name in plain} == {
        name: str(value) for name, value in plain.items()
    }


def texts_of(module: ast.Module) -> Iterator[str]:
    """The texts of a module, with a sign for what is filled in."""
    for node in ast.walk(module):
        match node:
            case ast.JoinedStr(values=parts):
                yield "".join(str(one.value) if isinstance(one, ast.Constant) else "…" for one in parts)
            case ast.Constant(value=str(text)):
                yield text


def test_the_messages_are_those_of_the_code():
    said = "\0".join(text for module in product() for text in texts_of(module))
    messages = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/reference/errors.md").read_text(), re.MULTILINE)
    assert [message for message in messages if message not in said] == []


WITH_EXAMPLES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted([*ROOT.glob("splitinfer/**/*.py"), *ROOT.glob("scripts/comparing/*.py")])
    if ">>> " in path.read_text("utf-8")
]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_in_docstrings_are_true(name: str):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
