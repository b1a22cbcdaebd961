"""What a client wants, whichever API it speaks: a prompt, how its answer is chosen, and what of it is shown."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from splitinfer.core.sampling_defaults import Recommended
from splitinfer.core.sequence import SamplingParams
from splitinfer.server.problem import Problem

MAX_CHOICES = 16  # answers to one prompt
MAX_MESSAGES, MAX_TOOLS = 4096, 1024  # of a conversation


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation for the model's template. ``tools``: those that may be called, as in OpenAI's API. ``options``:
    further values for the template. ``opens_answer``: it is written up to where the next answer begins."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    opens_answer: bool = True


Prompt = Chat | str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. ``sampling``: the fields of ``SamplingParams`` that the client gave. ``max_tokens``: ``None`` is as
    many as the context has room for. ``one_call``: the answer ends with its first call of a tool."""

    prompt: Prompt
    sampling: Mapping[str, Any]
    max_tokens: int | None = None
    num_choices: int = 1
    one_call: bool = False

    def params(self, defaults: Recommended, room: int, choice: int = 0) -> SamplingParams:
        """The sampling parameters of one choice. ``room``: tokens that the context has left for the answer.

        Choices of one request with a seed have seeds of their own, the first the one that was given.

        Raises:
            Problem: 400, a value is out of its range.
        """
        most = room if self.max_tokens is None else min(self.max_tokens, room)
        values = {"temperature": 1.0, **defaults.values, **self.sampling, "max_tokens": max(1, most)}
        if (seed := values.get("seed")) is not None and isinstance(seed, int):
            values["seed"] = (seed + choice) % 2**64
        try:
            return SamplingParams(**values)
        except (TypeError, ValueError) as error:
            raise Problem(400, f"{error}", param=_field_in(f"{error}", values)) from error


def _field_in(sentence: str, values: Mapping[str, Any]) -> str | None:
    """The field that an error's sentence begins with."""
    return next((name for name in values if sentence.startswith(name)), None)
