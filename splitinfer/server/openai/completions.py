"""`POST /v1/completions`: a request as one `Ask` for each prompt, whose text or tokens are continued as they are."""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema

from splitinfer.core.sequence import MAX_LOGPROBS
from splitinfer.server.ask import MAX_CHOICES, Ask, Prompt
from splitinfer.server.fields import Count, Refused, not_a, wrong
from splitinfer.server.openai.chat import Shape, shape_of
from splitinfer.server.openai.generating import Choices, Generating, OfMlxLm, StreamOptions
from splitinfer.server.problem import Problem, unsupported

MAX_ANSWERS = 128  # of one request: prompts by choices
DEFAULT_TOKENS = 16  # OpenAI's API reference, "Create completion": max_tokens


def _prompts(given: Any) -> list[Prompt]:
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list):
        raise not_a("text or a list", given)
    if not given:
        raise wrong(" must have at least one text or token id")
    if all(_is_id(one) for one in given):
        return [tuple(given)]
    return [_prompt(i, one) for i, one in enumerate(given)]


def _prompt(i: int, given: Any) -> Prompt:
    """One of several prompts."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list) or not all(_is_id(one) for one in given):
        raise not_a("text or a list of token ids", given, inside=f"[{i}]")
    return tuple(given)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_Prompts = Annotated[
    list[Prompt], PlainValidator(_prompts), WithJsonSchema({"type": ["string", "array"], "items": {"type": "integer"}})
]
_OFF = -1
_Logprobs = Annotated[
    int,
    Field(ge=_OFF, le=MAX_LOGPROBS),
    BeforeValidator(lambda given: (0 if given else _OFF) if isinstance(given, bool) else given),
]


class CompletionRequest(Generating, OfMlxLm):
    """A request for completions."""

    prompt: _Prompts = Field(
        description=f"Text, token ids, or a list of either; at most {MAX_ANSWERS} answers, all choices together"
    )
    max_tokens: Count | None = Field(None, description=f"Token limit of an answer; {DEFAULT_TOKENS} if not given")
    max_completion_tokens: Count | None = Field(None, description="Takes precedence over max_tokens")
    n: Choices = Field(1, description="Number of answers for each prompt")
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = Field(None, description="Must equal n")
    stream_options: StreamOptions | None = Field(None, description="Only with stream")
    logprobs: _Logprobs | None = Field(
        None,
        description="Log probabilities of each token and of this many of the most likely ones; `true` is 0, "
        "`false` and -1 are off. Offsets are those in the answer's own text",
    )
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        None, description="With logprobs: also returns this many of the most likely tokens"
    )
    echo: bool = Field(False, description="Each answer begins with its prompt; not with logprobs")
    suffix: Annotated[Any, Refused("a model cannot be made to end at a given text", ([], {}, ""))] = None
    add_special_tokens: Annotated[Any, Refused("the tokenizer always adds its own", (True,))] = None


@dataclass(frozen=True, slots=True)
class Completions:
    """A request. ``asks``: one for each prompt, all alike in everything else. ``echo``: each choice's text begins with
    its prompt."""

    asks: tuple[Ask, ...]
    shape: Shape
    echo: bool = False


def completions_of(request: CompletionRequest, model: str = "") -> Completions:
    """What a request asks, and in what shape. ``model``: the name in the answer where the request has none.

    Raises:
        Problem: 400, fields contradict each other.
    """
    prompts, number, num_top = request.prompt, request.n, _num_top(request)
    if len(prompts) * number > MAX_ANSWERS:
        raise Problem(400, f"{len(prompts)} prompts by {number} choices are over {MAX_ANSWERS} answers", param="prompt")
    if request.best_of not in (None, number):
        raise unsupported("best_of", "answers are not ranked, so that it can be n only", request.best_of)
    if request.echo and num_top is not None:
        raise unsupported("echo", "the log probabilities of a prompt are not computed; leave out logprobs")
    shape = shape_of(request, request.stream_options, num_top, model)
    sampling = request.sampling() | ({} if num_top is None else {"logprobs": num_top})
    most = request.max_completion_tokens or request.max_tokens or DEFAULT_TOKENS
    return Completions(tuple(Ask(prompt, sampling, most, number) for prompt in prompts), shape, request.echo)


def _num_top(request: CompletionRequest) -> int | None:
    wanted, top = request.logprobs, request.top_logprobs or 0
    if wanted is not None and wanted > _OFF:
        return max(wanted, top)
    if top:
        raise Problem(400, "top_logprobs needs logprobs", param="top_logprobs")
    return None
