"""`POST /v1/completions`: a request as one `Ask` for each prompt, whose text or tokens are continued as they are."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from splitinfer.core.sequence import MAX_LOGPROBS
from splitinfer.server import values
from splitinfer.server.ask import MAX_CHOICES, Ask, Prompt
from splitinfer.server.common_fields import BY_KEYS
from splitinfer.server.fields import HONOURED, Honoured, Refused, Treatment, honoured, is_empty, is_one_of
from splitinfer.server.openai.chat import (
    MAX_STOPS,
    MODEL,
    OF_OTHER_SERVERS,
    STREAM_OPTIONS,
    Shape,
    num_choices,
    sampling_of,
    shape_of,
)
from splitinfer.server.problem import Problem, unsupported

MAX_ANSWERS = 128  # of one request: prompts by choices
DEFAULT_TOKENS = 16  # OpenAI's API reference, "Create completion": max_tokens

FIELDS: Mapping[str, Treatment] = {
    "model": MODEL,
    "prompt": Honoured(f"text, token ids, or a list of either; {MAX_ANSWERS} answers at most, all choices together"),
    "max_tokens": Honoured(f"{DEFAULT_TOKENS} where it is not given, as in OpenAI's API"),
    "temperature": HONOURED,
    "top_p": HONOURED,
    "n": Honoured(f"at most {MAX_CHOICES} for each prompt"),
    "best_of": Honoured("no more than n"),
    "seed": HONOURED,
    "stop": Honoured(f"at most {MAX_STOPS}"),
    "stream": HONOURED,
    "stream_options": Honoured(inside=STREAM_OPTIONS),
    "logprobs": Honoured(f"at most {MAX_LOGPROBS}; offsets are those in the answer's own text"),
    "echo": Honoured("without logprobs"),
    "logit_bias": HONOURED,
    "presence_penalty": HONOURED,
    "frequency_penalty": HONOURED,
    "suffix": Refused("a model cannot be made to arrive at a text", is_empty),
    "user": BY_KEYS,
    **OF_OTHER_SERVERS,
    "add_special_tokens": Refused("the tokenizer adds those of its own", is_one_of(True)),
}


@dataclass(frozen=True, slots=True)
class Completions:
    """A request. ``asks``: one for each prompt, all alike in everything else. ``echo``: each choice's text begins with
    its prompt."""

    asks: tuple[Ask, ...]
    shape: Shape
    echo: bool = False


def completions_of(body: Mapping[str, Any], model: str = "") -> Completions:
    """What a request asks, and in what shape. ``model``: the name in the answer where the request has none.

    Raises:
        Problem: 400, in a sentence that names the field.
    """
    given = honoured(body, FIELDS)
    prompts, number = _prompts(given), num_choices(given)
    if len(prompts) * number > MAX_ANSWERS:
        raise Problem(400, f"{len(prompts)} prompts by {number} choices are over {MAX_ANSWERS} answers", param="prompt")
    if "best_of" in given and values.whole("best_of", given["best_of"], 1, MAX_CHOICES) != number:
        raise unsupported("best_of", "answers are not ranked, so that it can be n only", given["best_of"])
    shape, echo = shape_of(given, _num_top(given), model), values.flag("echo", given.get("echo", False))
    if echo and shape.num_top is not None:
        raise unsupported("echo", "the log probabilities of a prompt are not computed; leave out logprobs")
    sampling = sampling_of(given) | ({} if shape.num_top is None else {"logprobs": shape.num_top})
    most = values.whole("max_tokens", given.get("max_tokens", DEFAULT_TOKENS), 1, values.MOST_TOKENS)
    return Completions(tuple(Ask(prompt, sampling, most, number) for prompt in prompts), shape, echo)


def _prompts(given: Mapping[str, Any]) -> list[Prompt]:
    if "prompt" not in given:
        raise Problem(400, "prompt must be given", param="prompt")
    prompt = given["prompt"]
    if isinstance(prompt, str):
        return [prompt]
    entries = values.listing("prompt", prompt)
    if not entries:
        raise Problem(400, "prompt must have at least one text or token id", param="prompt")
    if all(_is_id(one) for one in entries):
        return [tuple(entries)]
    return [_prompt(f"prompt[{i}]", one) for i, one in enumerate(entries)]


def _prompt(name: str, given: Any) -> Prompt:
    """One of several prompts."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list) or not all(_is_id(one) for one in given):
        raise values.wrong(name, "text or a list of token ids", given)
    return tuple(given)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _num_top(given: Mapping[str, Any]) -> int | None:
    return values.whole("logprobs", given["logprobs"], 0, MAX_LOGPROBS) if "logprobs" in given else None
