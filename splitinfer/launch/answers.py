"""What is asked of a machine and what it answers, as values and as JSON. Pure.

Both ends have the same version of this file, or nothing but ``versions`` is read: the other end says its versions
before it does anything. All texts are bounded, and what cannot be read is not an answer.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

import pydantic

from splitinfer.wire.messages import Versions

_MOST_TEXT = 4096  # characters of one text of an answer
_MOST_WORKERS = 256

_Text = Annotated[str, pydantic.Field(max_length=_MOST_TEXT)]
_Key = Annotated[str, pydantic.Field(pattern=r"^[0-9a-f]{64}$")]
_Port = Annotated[int, pydantic.Field(ge=1, le=65535)]
_Count = Annotated[int, pydantic.Field(ge=0, lt=2**63)]


class Do(StrEnum):
    """What a machine is asked to do."""

    LOOK = "look"
    START = "start"
    STOP = "stop"


class How(StrEnum):
    """What started a worker."""

    UP = "by `up`"
    SERVICE = "as a service"
    HAND = "by hand"


@dataclass(frozen=True, slots=True)
class Request:
    """``key``: the public key of the machine that asks, ``by``: its name. ``port``, ``name``: the worker's."""

    do: Do
    versions: Versions
    key: _Key
    by: _Text
    port: _Port
    name: _Text

    def encode(self) -> str:
        return _REQUEST.dump_json(self).decode()


@dataclass(frozen=True, slots=True)
class Found:
    """A worker that runs as the user who was logged in as.

    by: who had it started, by `up`. is_own: whether that is the machine that asks. memory: bytes that its process
    holds; on macOS without what its GPU holds. seconds: since it was started. peers: addresses that are connected.
    """

    port: _Port
    pid: _Count
    how: How
    by: _Text = ""
    is_own: bool = False
    memory: _Count = 0
    seconds: Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)] = 0.0
    peers: Annotated[tuple[_Text, ...], pydantic.Field(max_length=_MOST_WORKERS)] = ()


_Workers = Annotated[tuple[Found, ...], pydantic.Field(max_length=_MOST_WORKERS)]


@dataclass(frozen=True, slots=True)
class Seen:
    """A machine with the same version. free, total: bytes of memory. program: the words of its command. theirs: which
    ports workers of other users have, and whose they are."""

    versions: Versions
    program: Annotated[tuple[_Text, ...], pydantic.Field(max_length=8)]
    free: _Count
    total: _Count
    workers: _Workers = ()
    theirs: Annotated[dict[_Port, _Text], pydantic.Field(max_length=_MOST_WORKERS)] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Started:
    """A worker that waits for a coordinator, and admits the machine that asked. ``is_new``: it was started now."""

    key: _Key
    worker: Found
    is_new: bool
    log: _Text


@dataclass(frozen=True, slots=True)
class Stopped:
    """The workers that were stopped, and those that still run."""

    stopped: _Workers
    left: _Workers


@dataclass(frozen=True, slots=True)
class Refusal:
    """Nothing was started or stopped; ``text`` says why. ``other_port``: it ends with the advice to take another."""

    text: _Text
    other_port: bool = False


@dataclass(frozen=True, slots=True)
class OtherVersion:
    """splitinfer is there in another version."""

    versions: Versions


Answer = Seen | Started | Stopped | Refusal | OtherVersion

_REQUEST = pydantic.TypeAdapter(Request)
_KINDS: dict[str, pydantic.TypeAdapter[Any]] = {
    each.__name__: pydantic.TypeAdapter(each) for each in (Seen, Started, Stopped, Refusal, OtherVersion)
}


def decode_request(text: str) -> Request:
    """The request in a text. Raises ValueError: there is none."""
    request: Request = _REQUEST.validate_json(text)
    return request


def asked_versions(text: str) -> Versions | None:
    """The versions of who sent a request, also where the rest of it is of another version; ``None``: it has none."""
    try:
        return pydantic.TypeAdapter(Versions).validate_python(json.loads(text)["versions"])
    except (ValueError, KeyError, TypeError):
        return None


def encode(answer: Answer) -> str:
    """The answer as one line."""
    kind = type(answer).__name__
    return json.dumps({"kind": kind, "answer": _KINDS[kind].dump_python(answer, mode="json")})


def marked(output: str, mark: str) -> list[str]:
    """The lines of what a machine has written that begin with the mark, without it."""
    return [line.removeprefix(mark).strip() for line in output.splitlines() if line.startswith(mark + " ")]


def understand(output: str, mark: str) -> Answer | None:
    """What a machine has answered on standard output; ``None``: nothing of it is an answer."""
    answers = list(_answers(marked(output, mark)))
    # One of the same version may stand behind one of another.
    return next((each for each in answers if not isinstance(each, OtherVersion)), next(iter(answers), None))


def _answers(lines: Iterable[str]) -> Iterator[Answer]:
    for line in lines:
        try:
            read = json.loads(line)
            yield _KINDS[read["kind"]].validate_json(json.dumps(read["answer"]), strict=True)
        except (ValueError, KeyError, TypeError):
            continue


def plain(text: str, most: int = 300) -> str:
    """A stranger's text as it may be printed: one line, printable, not longer than ``most`` characters.

    >>> plain("a\\x1b[31mb\\nc")
    'a [31mb c'
    """
    clean = " ".join("".join(each if each.isprintable() else " " for each in text[: most * 4]).split())
    return clean if len(clean) <= most else clean[: most - 3] + "..."


def last_line(text: str) -> str:
    """The last line of a text that is not empty."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")
