"""The answer of `splitinfer worker --detach`, `--stop` and `--show` with `--json`: a value and one line of JSON. Pure.

If the ends' versions differ, only ``versions`` is read. All texts are bounded.
"""

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import pydantic

from splitinfer.common.plain_text import plain
from splitinfer.wire.messages import Versions

_MOST_TEXT = 4096  # characters of one text of an answer
_MOST_WORKERS = 256

_Text = Annotated[str, pydantic.Field(max_length=_MOST_TEXT)]
_Key = Annotated[str, pydantic.Field(pattern=r"^[0-9a-f]{64}$")]
_Port = Annotated[int, pydantic.Field(ge=1, le=65535)]
_Count = Annotated[int, pydantic.Field(ge=0, lt=2**63)]


class How(StrEnum):
    """How a worker was started."""

    UP = "by `up`"
    DETACHED = "by `worker --detach`"
    SERVICE = "as a service"
    HAND = "by hand"


@dataclass(frozen=True, slots=True)
class FoundWorker:
    """A running worker of the logged-in user.

    by, key: name and public key of the machine whose `up` started it, if one did. memory: bytes of its process, on
    macOS without the bytes of its GPU. seconds: since its start. peers: the addresses connected to it.
    """

    port: _Port
    pid: _Count
    how: How
    by: _Text = ""
    key: _Key | None = None
    log: _Text = ""
    memory: _Count = 0
    seconds: Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)] = 0.0
    peers: Annotated[tuple[_Text, ...], pydantic.Field(max_length=_MOST_WORKERS)] = ()

    def started(self, own: str | None = None) -> str:
        """Return in words how it was started. ``own``: the public key of the machine that asks."""
        return self.how.value + (f" of {plain(self.by, 60)}" if self.by and self.key != own else "")


_Workers = Annotated[tuple[FoundWorker, ...], pydantic.Field(max_length=_MOST_WORKERS)]


@dataclass(frozen=True, slots=True)
class WorkersAnswer:
    """The workers of a machine after the request was carried out.

    key: public key of its workers, if they have one. free, total: bytes of memory. is_new: the requested worker was
    started now. stopped: the stopped workers.
    """

    versions: Versions
    key: _Key | None
    free: _Count
    total: _Count
    workers: _Workers = ()
    is_new: bool = False
    stopped: _Workers = ()


_ANSWER, _VERSIONS = pydantic.TypeAdapter(WorkersAnswer), pydantic.TypeAdapter(Versions)


class OtherVersion(Exception):
    """The answer comes from another version of splitinfer."""

    def __init__(self, versions: Versions) -> None:
        super().__init__(versions)
        self.versions = versions


def encode(answer: WorkersAnswer) -> str:
    """Return the answer as one line."""
    return _ANSWER.dump_json(answer).decode()


def understand(output: str, own: Versions) -> WorkersAnswer:
    """Return a machine's answer: the last line that begins like one, because a shell's own files may print, too.

    Raises:
        OtherVersion: the machine has another version than ``own``.
        ValueError: there is no answer.
    """
    line = next((each for each in reversed(output.splitlines()) if each.startswith("{")), "")
    versions = _VERSIONS.validate_python(json.loads(line).get("versions"))
    if versions != own:
        raise OtherVersion(versions)
    return _ANSWER.validate_json(line, strict=True)


def lines(answer: WorkersAnswer) -> list[str]:
    """Return an answer as lines for people at that machine."""
    stopped = [f"the worker at port {each.port} is stopped" for each in answer.stopped]
    running = [f"a worker waits at port {each.port}, started {each.started()}" for each in answer.workers]
    return [*stopped, *running] or ["no worker runs"]


def last_line(text: str) -> str:
    """Return the last line of a text that is not empty."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")
