"""`POST /infill`, as in llama.cpp's server, for editors: fills a gap in a file. It is a completion with a suffix in
other words (llama.cpp, tools/server, "POST /infill"). Fields that bound its time and the form of its lines are ignored:
nothing here does that."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from splitinfer.server.answer import Piece, Usage, Writer
from splitinfer.server.ask import Ask
from splitinfer.server.fields import Fields
from splitinfer.server.openai.generating import Generating, Limit
from splitinfer.server.refused import INFILL
from splitinfer.server.stream import event
from splitinfer.text.answer import TextPart
from splitinfer.text.fill import Gap

_STOPS = {"stop": "eos", "length": "limit", "abort": "limit"}


class _File(Fields):
    filename: str = ""
    text: str


class InfillRequest(Generating):
    """``prompt``: the beginning of the answer. ``input_extra``: other files."""

    refused = INFILL
    input_prefix: str
    input_suffix: str
    prompt: str = ""
    input_extra: list[_File] = Field(default_factory=list, max_length=1024, fail_fast=True)
    n_predict: Limit = None

    def asks(self) -> tuple[Ask]:
        files = tuple((one.filename, one.text) for one in self.input_extra)
        gap = Gap(self.input_prefix, self.input_suffix, self.prompt, files)
        return (Ask(gap, self.sampling() | self.form(None, "grammar"), self.n_predict),)


@dataclass(frozen=True, slots=True)
class InfillWriter(Writer):
    model: str

    def written(self, piece: Piece) -> bytes:
        text = _text([piece])
        return event({"content": text, "stop": False}) if text else b""

    def end(self, last: Piece, usage: Usage) -> bytes:
        if last.finish_reason == "error":
            return event(last.problem.openai())
        return event(self._ended("", last, usage))

    def document(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        return self._ended(_text(pieces), pieces[-1], usage)

    def _ended(self, content: str, last: Piece, usage: Usage) -> dict[str, Any]:
        counts = {"tokens_predicted": usage.generated, "tokens_evaluated": usage.prompt, "tokens_cached": usage.cached}
        why = "word" if last.stop is not None else _STOPS[last.finish_reason or "stop"]
        ended = {"stop_type": why, "stopping_word": last.stop or "", "truncated": False}
        return {"content": content, "stop": True, "model": self.model, **counts, **ended}


def _text(pieces: Sequence[Piece]) -> str:
    return "".join(part.text for piece in pieces for part in piece.parts if isinstance(part, TextPart))
