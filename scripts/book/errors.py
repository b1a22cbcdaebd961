"""Whether the messages of `reference/errors.md` are those of the code."""

import ast
import re
from pathlib import Path

_ROW = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)
_HOLE = "…"


def unknown(page: Path, package: Path) -> list[str]:
    """The messages of the page that are in no module of the package."""
    texts = "\0".join(text for module in package.rglob("*.py") for text in _texts(module))
    return [message for message in _ROW.findall(page.read_text(encoding="utf-8")) if message not in texts]


def _texts(module: Path) -> list[str]:
    """The texts of a module, with a sign for what is filled in."""
    found = []
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        match node:
            case ast.JoinedStr(values=parts):
                said = (str(one.value) if isinstance(one, ast.Constant) else _HOLE for one in parts)
                found.append("".join(said))
            case ast.Constant(value=str(text)):
                found.append(text)
    return found
