"""`POST /infill`, as llama.cpp's server has it, for editors: fill a gap in a file. It is a completion with a suffix in
other words (llama.cpp, tools/server, "POST /infill"). Its requests bound their time and the form of their lines, which
nothing here does: such fields are ignored.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from splitinfer.server.answer import Answer, Piece
from splitinfer.server.ask import Ask
from splitinfer.server.asking import answered
from splitinfer.server.body import read_request
from splitinfer.server.fields import Fields
from splitinfer.server.openai.generating import Generating, Limit
from splitinfer.server.problem import Problem
from splitinfer.server.refused import INFILL
from splitinfer.server.service import ApiRoute, Service
from splitinfer.server.spans import Usage
from splitinfer.server.stream import EventStream, event
from splitinfer.text.answer import TextPart
from splitinfer.text.fill import Gap

_STOPS = {"stop": "eos", "length": "limit", "abort": "limit"}


class _File(Fields):
    filename: str = ""
    text: str


class InfillRequest(Generating):
    """``prompt``: what the answer begins with. ``input_extra``: other files."""

    refused = INFILL
    input_prefix: str
    input_suffix: str
    prompt: str = ""
    input_extra: list[_File] = Field(default_factory=list, max_length=1024, fail_fast=True)
    n_predict: Limit = None

    def ask(self) -> Ask:
        files = tuple((one.filename, one.text) for one in self.input_extra)
        gap = Gap(self.input_prefix, self.input_suffix, self.prompt, files)
        return Ask(gap, self.sampling() | self.form({}, "grammar"), self.n_predict)


@dataclass(frozen=True, slots=True)
class InfillWriter:
    model: str

    def document(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        """What is new, or all of it; the last piece says why it ended."""
        last, parts = pieces[-1], [part for piece in pieces for part in piece.parts]
        content = "".join(part.text for part in parts if isinstance(part, TextPart))
        if last.finish_reason is None:
            return {"content": content, "stop": False}
        counts = {"tokens_predicted": usage.generated, "tokens_evaluated": usage.prompt, "tokens_cached": usage.cached}
        why = "word" if last.stop is not None else _STOPS[last.finish_reason]
        ended = {"stop_type": why, "stopping_word": last.stop or "", "truncated": False}
        return {"content": content, "stop": True, "model": self.model, **counts, **ended}


def infill_routes(service: Service) -> list[ApiRoute]:
    async def infill(request: Request) -> Response | EventStream:
        key = service.caller(request)
        ask, streams = await read_request(request, InfillRequest, lambda one: (one.ask(), one.stream))
        events = _events if streams else None
        return await answered(service, request, key, [ask], lambda _: InfillWriter(service.model), events)

    return [ApiRoute("/infill", infill, methods=["POST"])]


async def _events(answer: Answer, writer: InfillWriter) -> AsyncGenerator[bytes, None]:
    async with aclosing(answer.batches()) as batches:
        async for batch in batches:
            if (last := batch[-1]).finish_reason == "error":
                yield event(Problem(last.status, last.error or "the pipeline has failed").openai())
                return
            yield event(writer.document(batch, answer.usage))
