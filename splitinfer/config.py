"""Finds, reads and validates layout files.

    name or path ──find──▶ file ──YAML──▶ mapping ──shape──▶ Layout

The shape (the keys and their types) is a pydantic model; its errors become one sentence that names the file, the
stage and, for a misspelt key, the nearest known one. ``splitinfer.core.layout`` checks how the values fit together
(names, addresses, layer ranges) when the ``Layout`` is made. All errors are ``LayoutError``. Messages about the file's
shape count stages as in the file, from 1.
"""

import difflib
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

import pydantic
import yaml

from splitinfer.core import layout as core
from splitinfer.core.codecs import NONE
from splitinfer.core.kv.format import EXACT
from splitinfer.core.link_transport import JACCL, RING, TCP, LinkTransport
from splitinfer.core.serving_options import SERVING_OPTIONS, ServingOptions
from splitinfer.errors import LayoutError

SUFFIX = ".yaml"
HERE = Path("layouts")


class Layout(core.Layout):
    """A layout that can be made from a mapping with the keys of a layout file."""

    __slots__ = ()

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any], name: str = core.UNNAMED) -> Self:
        """Make the layout that ``mapping`` describes; ``name`` is for messages. Raises LayoutError."""
        shape = _shape(mapping, name)
        stages = core.lay_out(
            (
                stage.name,
                stage.layers,
                stage.address,
                {
                    "key": stage.key,
                    "codec": stage.codec,
                    "link_transport": LinkTransport(stage.transport, stage.backend, stage.device),
                    "across": tuple(stage.across),
                    "sums": stage.sums,
                    "sums_device": stage.sums_device,
                    "experts_gb": stage.experts_gb,
                },
            )
            for stage in shape.stages
        )
        return cls(
            stages, model=shape.model, draft=shape.draft, dtype=shape.dtype, name=name, kv_format=shape.kv_format,
            float32_head=shape.float32_head, serving=_serving_options(shape, name),
        )  # fmt: skip


def find_layout(path_or_name: str) -> Layout:
    """Read a layout from a file, or by its name from ./layouts or the installed layouts.

    The suffix .yaml may be left out.

    Raises:
        LayoutError: there is no such layout, or it cannot be used.
    """
    folders = [Path(), HERE, _installed_folder()] if _is_bare(path_or_name) else [Path()]
    for folder in folders:
        for candidate in (folder / path_or_name, folder / (path_or_name + SUFFIX)):
            if candidate.is_file():
                return read_layout(candidate)
    raise LayoutError(_not_found(path_or_name))


def read_layout(path: Path) -> Layout:
    """Read the layout in the file ``path``; the file's name becomes its name. Raises LayoutError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise LayoutError(f"layout {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise LayoutError(f"layout {path} is not UTF-8 text (byte {error.start})") from error
    return Layout.from_dict(_parse_yaml(text, path.name), path.name)


# ----- finding ----------------------------------------------------------------------------------------


def _is_bare(path_or_name: str) -> bool:
    """Return whether this is a name without a folder, which may name a known layout."""
    return bool(path_or_name) and Path(path_or_name).name == path_or_name


def _installed_folder() -> Path:
    """Return the folder of the package's own layouts: inside the package in a wheel, beside it in a clone."""
    package = Path(__file__).parent
    in_wheel = package / "_layouts"
    return in_wheel if in_wheel.is_dir() else package.parent / "layouts"


def _not_found(path_or_name: str) -> str:
    if not _is_bare(path_or_name):
        return f"there is no layout file {path_or_name!r}"
    known = sorted({file.stem for folder in (HERE, _installed_folder()) for file in folder.glob("*" + SUFFIX)})
    return f"there is no layout {path_or_name!r}, neither as a file nor by name; known by name: {', '.join(known)}"


# ----- YAML -------------------------------------------------------------------------------------------


class _StrictLoader(yaml.SafeLoader):
    """The safe loader, which also refuses duplicate keys (plain YAML takes the last one)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # a list or mapping as key: the safe loader refuses it
            if key.value in seen:
                problem = f"the key {key.value!r} is written twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _parse_yaml(text: str, name: str) -> Any:
    try:
        content = yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        problem = error.problem
        if isinstance(error, yaml.parser.ParserError | yaml.scanner.ScannerError):
            problem = (
                "this cannot be read: keys of one level begin in the same column, each stage begins with '- ', "
                f"and tabs are not allowed ({problem})"
            )
        raise LayoutError(f"layout {name}{line}: {problem}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an invalid date or number, such as 2026-13-01
        raise LayoutError(f"layout {name} is not YAML: {str(error).splitlines()[0]}") from error
    if content is None:
        raise LayoutError(f"layout {name} is empty; it needs at least the key 'stages'")
    return content


# ----- shape ------------------------------------------------------------------------------------------


_Text = Annotated[str, pydantic.Field(strict=True, min_length=1)]
_Count = Annotated[int, pydantic.Field(strict=True)]  # strict: neither "40" nor 40.0 nor true is a number of layers
_Number = Annotated[float, pydantic.Field(strict=True)]
_KINDS: Mapping[type, Any] = {str: _Text, int: _Count, float: _Number}


class _Shape(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")


class _StageShape(_Shape):
    name: _Text
    layers: _Count
    address: _Text | None = None
    key: _Text | None = None
    codec: _Text = NONE
    transport: _Text = TCP
    backend: _Text = JACCL
    device: _Text | None = None
    across: list[_Text] = []
    sums: _Text = RING
    sums_device: _Text | None = None
    experts_gb: _Number | None = None


_serving_keys: dict[str, Any] = {name: (_KINDS[each.kind] | None, None) for name, each in SERVING_OPTIONS.items()}
_ServingShape = pydantic.create_model("_ServingShape", __base__=_Shape, **_serving_keys)


class _LayoutShape(_Shape):
    stages: list[_StageShape]
    model: _Text | None = None
    draft: _Text | None = None
    dtype: _Text = "auto"
    serving: _ServingShape | None = None  # type: ignore[valid-type] # it is made above
    kv_format: _Text = EXACT
    float32_head: pydantic.StrictBool = False


_UNKNOWN_KEY = {"extra_forbidden", "invalid_key"}
_EXPECTED = {
    "string_type": "text",
    "string_too_short": "text of at least one character",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list of stages",
    "model_type": "a mapping with its keys and their values",
}


def _shape(mapping: Mapping[str, Any], name: str) -> _LayoutShape:
    if not isinstance(mapping, Mapping):
        raise LayoutError(f"layout {name} must be a mapping with the key 'stages', but is {_described(mapping)}")
    try:
        return _LayoutShape.model_validate(dict(mapping))
    except pydantic.ValidationError as error:
        # A misspelt key is also a missing one; the misspelling is more helpful, so it is reported first.
        problems = sorted(error.errors(), key=lambda problem: problem["type"] not in _UNKNOWN_KEY)
        raise LayoutError(_sentence(problems[0]["type"], problems[0]["loc"], problems[0]["input"], name)) from error


def _sentence(kind: str, location: tuple[int | str, ...], value: object, name: str) -> str:
    """Return one of pydantic's errors as a sentence; ``location`` is ``(key,)``, ``("stages", index[, key])`` or
    ``("serving", key)``."""
    in_stage, in_serving = location[0] == "stages" and len(location) > 1, location[0] == "serving" and len(location) > 1
    where = f"stage {int(location[1]) + 1} of layout {name}" if in_stage else f"layout {name}"
    if in_stage and len(location) == 2:
        keys = "name, layers and (for a worker) address and key"
        return f"{where} must be a mapping with the keys {keys}, but is {_described(value)}"
    where = f"'serving' of {where}" if in_serving else where
    key = location[2] if in_stage else location[-1]
    if kind in _UNKNOWN_KEY:
        shape: type[pydantic.BaseModel] = _LayoutShape
        if len(location) > 1:
            shape = _StageShape if in_stage else _ServingShape
        return f"unknown key {key!r} in {where}; {_hint(str(key), shape)}"
    if kind == "missing":
        return f"{where} lacks the key {key!r}"
    expected = "a list of addresses" if key == "across" else _EXPECTED.get(kind, "of another kind")
    return f"{key!r} in {where} must be {expected}, but is {_described(value)}"


def _serving_options(shape: _LayoutShape, name: str) -> ServingOptions:
    try:
        return ServingOptions(**({} if shape.serving is None else dict(shape.serving)))
    except ValueError as error:
        raise LayoutError(f"'serving' of layout {name}: {error}") from error


def _hint(key: str, shape: type[pydantic.BaseModel]) -> str:
    known = list(shape.model_fields)
    nearest = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {nearest[0]!r}?" if nearest else f"known keys: {', '.join(known)}"


def _described(value: object) -> str:
    match value:
        case None:
            return "nothing"
        case Mapping():
            return "a mapping"
        case list() | tuple():
            return "a list"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
