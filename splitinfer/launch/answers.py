"""What is asked of a machine and what it answers, as values and as JSON. Pure.

Both ends have the same version of this file, or nothing but ``versions`` is read: the other end says its versions
before it does anything. All texts are bounded, and what is no answer is said to be none.
"""

import json
import re
from dataclasses import dataclass, replace
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
_Version = re.compile(r"splitinfer (\S+), protocol ([0-9]{1,9}), mlx (\S+), mlx-lm (\S+)")


class Do(StrEnum):
    """What a machine is asked to do."""

    LOOK = "look"
    START = "start"
    STOP = "stop"


class How(StrEnum):
    """What started a worker."""

    UP = "up"
    SERVICE = "service"
    HAND = "hand"


class Why(StrEnum):
    """Why a machine did not do what it was asked."""

    TAKEN = "taken"  # another program listens on the port
    OTHER_USER = "other user"  # ... a worker of another user; detail: whose
    LOOPBACK = "loopback"  # a worker that no other machine reaches
    INSECURE = "insecure"  # a worker without keys
    OLD = "old"  # a worker of another version, which `up` did not start
    ENDED = "ended"  # it was started and has ended; detail: the end of its log
    ERROR = "error"  # detail: a sentence


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


@dataclass(frozen=True, slots=True)
class Theirs:
    """A worker of another user."""

    user: _Text
    port: _Port


_Workers = Annotated[tuple[Found, ...], pydantic.Field(max_length=_MOST_WORKERS)]


@dataclass(frozen=True, slots=True)
class Seen:
    """A machine with the same version. free, total: bytes of memory. program: the words of its command."""

    versions: Versions
    program: Annotated[tuple[_Text, ...], pydantic.Field(max_length=8)]
    user: _Text
    machine: _Text
    system: _Text
    free: _Count
    total: _Count
    workers: _Workers = ()
    theirs: Annotated[tuple[Theirs, ...], pydantic.Field(max_length=_MOST_WORKERS)] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """A worker that waits for a coordinator, and admits the machine that asked. ``is_new``: it was started now."""

    key: _Key
    worker: Found
    is_new: bool
    log: _Text
    free: _Count


@dataclass(frozen=True, slots=True)
class Stopped:
    """The workers that were stopped, and those that still run."""

    stopped: _Workers
    left: _Workers


@dataclass(frozen=True, slots=True)
class Refusal:
    """Nothing was started or stopped."""

    why: Why
    detail: _Text = ""


@dataclass(frozen=True, slots=True)
class OtherVersion:
    """splitinfer is there in another version. ``None``: one so old, or so new, that it cannot say which."""

    versions: Versions | None
    program: _Text


@dataclass(frozen=True, slots=True)
class NotInstalled:
    """splitinfer was not found."""


@dataclass(frozen=True, slots=True)
class Broken:
    """splitinfer is there and does not run; ``detail``: the last that it said."""

    program: _Text
    detail: _Text


Answer = Seen | Started | Stopped | Refusal
Heard = Answer | OtherVersion | NotInstalled | Broken

_REQUEST = pydantic.TypeAdapter(Request)
_KINDS: dict[str, pydantic.TypeAdapter[Any]] = {
    each.__name__: pydantic.TypeAdapter(each) for each in (Seen, Started, Stopped, Refusal)
}


def decode_request(text: str) -> Request:
    """The request in a text. Raises ValueError: it is none."""
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


def encode_versions(versions: Versions) -> str:
    """The line of one that is asked by another version."""
    return json.dumps({"kind": "versions", "answer": pydantic.TypeAdapter(Versions).dump_python(versions)})


def understand(output: str, complaints: str, mark: str) -> Heard | None:
    """What a machine has answered; ``None``: nothing of it is an answer.

    ``output``, ``complaints``: what the script wrote to standard output and standard error.
    """
    lines = [line.removeprefix(mark).strip() for line in output.splitlines() if line.startswith(mark + " ")]
    for line in lines:
        if (answer := _answer(line)) is not None:
            return answer
    for line, after in zip(lines, [*lines[1:], ""], strict=False):
        if (other := _other_version(line, after)) is not None:
            return other
    for line in lines:
        if line.startswith("failed "):
            return Broken(plain(line.split(" ", 2)[-1]), plain(_last(complaints)))
    return NotInstalled() if "none" in lines else None


def _answer(line: str) -> Answer | None:
    try:
        read = json.loads(line)
        answer: Answer = _KINDS[read["kind"]].validate_json(json.dumps(read["answer"]), strict=True)
    except (ValueError, KeyError, TypeError):
        return None
    return answer


def _other_version(line: str, after: str) -> OtherVersion | None:
    """What one line, and the one after it, say of a program that did nothing because it is of another version."""
    if line.startswith("failed 2 "):
        match = _Version.search(after) if after.startswith("version ") else None
        found = None if match is None else Versions(int(match[2]), match[1], match[3], match[4])
        return OtherVersion(found and _plain_versions(found), plain(line.split(" ", 2)[-1]))
    try:
        read = json.loads(line)
        if read["kind"] != "versions":
            return None
        return OtherVersion(_plain_versions(pydantic.TypeAdapter(Versions).validate_python(read["answer"])), "")
    except (ValueError, KeyError, TypeError):
        return None


def _plain_versions(versions: Versions) -> Versions:
    return replace(versions, splitinfer=plain(versions.splitinfer, 40), mlx=plain(versions.mlx, 40),
                   mlx_lm=plain(versions.mlx_lm, 40))  # fmt: skip


def plain(text: str, most: int = 300) -> str:
    """A stranger's text as it may be printed: one line, printable, not longer than ``most`` characters.

    >>> plain("a\\x1b[31mb\\nc")
    'a [31mb c'
    """
    clean = " ".join("".join(each if each.isprintable() else " " for each in text[: most * 4]).split())
    return clean if len(clean) <= most else clean[: most - 3] + "..."


def _last(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
