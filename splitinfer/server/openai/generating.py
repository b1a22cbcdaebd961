"""Fields that OpenAI's requests for an answer have in common, and what they ask of the engine."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainValidator, WithJsonSchema

from splitinfer.core.grammar import Grammar
from splitinfer.core.sampling_checks import MAX_BIASED
from splitinfer.core.sampling_params import REPETITION_CONTEXT
from splitinfer.server.ask import MAX_CHOICES, MAX_TOOLS
from splitinfer.server.fields import (
    EMPTY,
    MOST_NAME,
    CountOrNone,
    Fields,
    Ignored,
    Kinds,
    Name,
    Refused,
    Second,
    Several,
    TokenId,
    not_a,
    not_supported,
    wrong,
)
from splitinfer.server.problem import Problem, invalid

MAX_STOPS = 16  # OpenAI's own limit is 4
_MOST_DIGITS = 19  # of a token id; Python reads no more than 4,300 at once
# of OpenAI's API ("Create a model response", metadata)
_MOST_METADATA, _MOST_KEY, _MOST_VALUE = 16, 64, 512

ByKeys = Annotated[Any, Ignored("requests are identified by their keys", MOST_NAME)]
CACHED = "the cache finds the beginning of a prompt by its tokens"
Cached = Annotated[Any, Ignored(CACHED)]
CacheKey = Annotated[Any, Ignored(CACHED, MOST_NAME)]
CacheRoom = Annotated[Any, Ignored("the cache keeps as much as it has room for")]
OneTier = Annotated[
    Any, Ignored("there is one tier, and the answer says so; priority is the header X-Splitinfer-Priority")
]
NOT_FORCED = "there are auto, none, required, and functions by their names"
NO_STORE = "nothing is stored here"
NOT_HIDDEN = "Ignored: events are as long as what they hold"
FOR_TEMPLATE = "Passed to the model's template"


class PlainFormat(Fields):
    """Any text"""

    type: Literal["text"]


class JsonFormat(Fields):
    """Any JSON object"""

    type: Literal["json_object"]


HELD = "The JSON schema that the answer has; one that cannot be enforced is refused"


class NamedSchema(Fields):
    """A schema by name"""

    name: Name | None = None
    description: Annotated[Any, Ignored("the schema itself is enforced")] = None
    schema_: dict[str, Any] = Field(alias="schema", description=HELD)
    strict: Annotated[Any, Ignored("every schema is enforced")] = None


class SchemaFormat(Fields):
    """JSON of a schema"""

    type: Literal["json_schema"]
    json_schema: NamedSchema


TextFormat = Annotated[PlainFormat | JsonFormat | SchemaFormat, Kinds("type")]


def grammar_of(schema: Any, param: str) -> Grammar:
    """The form of JSON that a schema admits; ``None``: of any object.

    Raises:
        Problem: 400, it is not a schema.
    """
    try:
        return Grammar.json(schema)
    except ValueError as error:
        raise invalid(param, f"{param}: {error}") from error


def form_of(asked: PlainFormat | JsonFormat | SchemaFormat | None) -> dict[str, Any]:
    """The fields of ``SamplingParams`` that a format asks for.

    Raises:
        Problem: 400, its schema is not one.
    """
    match asked:
        case SchemaFormat():
            return {"grammar": grammar_of(asked.json_schema.schema_, "response_format")}
        case JsonFormat():
            return {"grammar": Grammar.json()}
    return {}


def small_metadata(value: Any) -> Any:
    """What a client notes on its request, within the bounds of OpenAI's API.

    Raises:
        PydanticCustomError: it is larger.
    """
    if isinstance(value, dict):
        if len(value) > _MOST_METADATA:
            raise wrong(f" may have {_MOST_METADATA} entries, not {len(value):,}")
        for key, each in value.items():
            if len(key) > _MOST_KEY:
                raise wrong(f" may have names of {_MOST_KEY} characters, not {len(key):,}")
            if isinstance(each, str) and len(each) > _MOST_VALUE:
                raise wrong(f" may have {_MOST_VALUE} characters, not {len(each):,}", inside=f".{key}")
    if isinstance(value, str) and len(value) > _MOST_VALUE:
        raise wrong(f" may have {_MOST_VALUE} characters, not {len(value):,}")
    return value


def _biases(given: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(given, dict):
        raise not_a("an object", given)
    if len(given) > MAX_BIASED:
        raise wrong(f" may have {MAX_BIASED:,} token ids, not {len(given):,}")
    for token, bias in given.items():
        if not token.isascii() or not token.isdigit() or len(token) > _MOST_DIGITS:
            raise not_a("an object whose keys are token ids", token)
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise not_a("a number", bias, inside=f".{token}")
    return tuple((int(token), bias) for token, bias in given.items())


def _of_the_template(given: dict[str, Any]) -> dict[str, Any]:
    for name in ("messages", "tools", "tokenize", "add_generation_prompt", "chat_template"):
        if name in given:
            raise not_supported("it is set by the request itself", inside=f".{name}")
    return given


_Biases = Annotated[
    tuple[tuple[int, float], ...],
    PlainValidator(_biases),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}, "maxProperties": MAX_BIASED}),
]
Stops = Annotated[str | Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)], Second(list)]
TemplateOptions = Annotated[dict[str, Any], AfterValidator(_of_the_template)]
Entries = Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)]
Choices = Annotated[int, Field(ge=1, le=MAX_CHOICES)]
_NO_IDS, _STAYS = "answers have no token ids", "the model stays loaded"
_NO_SEARCH, _NO_TEXT = "there is no beam search", "special tokens are not text"


class Generating(Fields):
    """Fields of all requests for an answer, with those of other servers that many clients know."""

    model: Name | None = Field(None, description="Any name, because there is only one model")
    temperature: float | None = Field(None, description="Randomness of sampling; 0 always takes the most likely token")
    top_p: float | None = Field(None, description="Samples from the most likely tokens with this total probability")
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = Field(
        None, description="Samples from this many of the most likely tokens; 0 and -1 are off"
    )
    min_p: float | None = Field(None, description="Minimum probability of a token, relative to the most likely one")
    repetition_penalty: float | None = Field(
        None, description=f"Makes the last {REPETITION_CONTEXT} tokens less likely; 0 and 1 are off"
    )
    presence_penalty: float | None = Field(None, description="Makes tokens that are already in the answer less likely")
    frequency_penalty: float | None = Field(None, description="The same, times how often they are in the answer")
    logit_bias: _Biases | None = Field(None, description="Values to add to the logits of tokens")
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = Field(
        None, description="The same seed gives the same answer"
    )
    stop: Stops | None = Field(None, description="Texts that end the answer")
    stop_token_ids: Several[TokenId] | None = Field(None, description="Tokens that end the answer")
    ignore_eos: bool | None = Field(None, description="The answer continues after the model's end token")
    stream: bool = Field(False, description="Sends the answer in parts as it is generated")
    user: ByKeys = None
    cache_prompt: Cached = None
    min_tokens: CountOrNone | None = Field(None, description="The answer does not end before it has so many tokens")
    thinking_budget: CountOrNone | None = Field(None, description="Most tokens of reasoning; then the answer begins")
    length_penalty: Annotated[Any, Refused(_NO_SEARCH, (1, 1.0))] = None
    use_beam_search: Annotated[Any, Refused(_NO_SEARCH, (False,))] = None
    skip_special_tokens: Annotated[Any, Refused(_NO_TEXT, (True,))] = None
    spaces_between_special_tokens: Annotated[Any, Refused(_NO_TEXT, (True,))] = None
    include_stop_str_in_output: Annotated[Any, Refused("an answer ends before the text that stops it", (False,))] = None
    priority: Annotated[Any, Refused("it is the header X-Splitinfer-Priority", (0,))] = None
    bad_words: Annotated[Any, Refused("logit_bias keeps tokens away", ([],))] = None
    return_token_ids: Annotated[Any, Refused(_NO_IDS, (False,))] = None
    return_tokens_as_token_ids: Annotated[Any, Refused(_NO_IDS, (False,))] = None
    ttl: Annotated[Any, Ignored(_STAYS)] = None
    keep_alive: Annotated[Any, Ignored(_STAYS)] = None

    def sampling(self) -> dict[str, Any]:
        names = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "logit_bias", "ignore_eos"]
        names += ["min_tokens", "thinking_budget"]
        found = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.repetition_penalty is not None:
            found["repetition_penalty"] = self.repetition_penalty or 1.0
        if self.top_k is not None:
            found["top_k"] = max(0, self.top_k)
        if self.seed is not None:
            found["seed"] = self.seed % 2**64
        if self.stop is not None:
            found["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.stop_token_ids is not None:
            found["stop_token_ids"] = tuple(self.stop_token_ids)
        return found


_LAST_TOKENS = f"penalties look at the last {REPETITION_CONTEXT} tokens, or at the whole answer"


class OfMlxLm(Fields):
    """Fields of mlx-lm's server."""

    repetition_context_size: Annotated[Any, Refused(_LAST_TOKENS, (REPETITION_CONTEXT,))] = None
    presence_context_size: Annotated[Any, Refused(_LAST_TOKENS, (REPETITION_CONTEXT,))] = None
    frequency_context_size: Annotated[Any, Refused(_LAST_TOKENS, (REPETITION_CONTEXT,))] = None
    xtc_probability: Annotated[Any, Refused("XTC sampling is not implemented", (0, 0.0))] = None
    xtc_threshold: Annotated[Any, Ignored("it does nothing without xtc_probability")] = None
    adapters: Annotated[Any, Refused("there is one model, without adapters")] = None
    draft_model: Annotated[Any, Ignored("the layout chooses the drafts, and they change no answer", MOST_NAME)] = None
    num_draft_tokens: Annotated[Any, Ignored("the layout chooses the drafts, and they change no answer")] = None
    role_mapping: Annotated[Any, Refused("the model's template has its own words for roles", ({},))] = None


_APART = ("auto", "deepseek")
_NO_SAMPLER = "this way of sampling is not implemented"
_Unused = Annotated[Any, Ignored("it does nothing without a field that is refused")]


class OfLlamaCpp(Fields):
    """Fields of llama.cpp's server, which many programs send at the values that ask for nothing."""

    typical_p: Annotated[Any, Refused(_NO_SAMPLER, (1, 1.0))] = None
    tfs_z: Annotated[Any, Refused(_NO_SAMPLER, (1, 1.0))] = None
    top_n_sigma: Annotated[Any, Refused(_NO_SAMPLER, (-1, -1.0))] = None
    mirostat: Annotated[Any, Refused(_NO_SAMPLER, (0, False))] = None
    mirostat_tau: _Unused = None
    mirostat_eta: _Unused = None
    dynatemp_range: Annotated[Any, Refused(_NO_SAMPLER, (0, 0.0))] = None
    dynatemp_exponent: _Unused = None
    dry_multiplier: Annotated[Any, Refused(_NO_SAMPLER, (0, 0.0))] = None
    dry_base: _Unused = None
    dry_allowed_length: _Unused = None
    dry_penalty_last_n: _Unused = None
    dry_sequence_breakers: _Unused = None
    repeat_penalty: Annotated[Any, Refused("its name is repetition_penalty here", (1, 1.0))] = None
    repeat_last_n: _Unused = None
    n_predict: Annotated[Any, Refused("its name is max_tokens here", (-1,))] = None
    n_keep: Annotated[Any, Refused("a prompt that is too long is refused", (0,))] = None
    n_probs: Annotated[Any, Refused("its name is logprobs here", (0,))] = None
    min_keep: Annotated[Any, Refused(_NO_SAMPLER, (0,))] = None
    id_slot: Annotated[Any, Ignored("there are no slots")] = None
    samplers: Annotated[Any, Refused("the order of the samplers is fixed", EMPTY)] = None
    return_tokens: Annotated[Any, Refused(_NO_IDS, (False,))] = None
    timings_per_token: Annotated[Any, Refused("chunks have no timings", (False,))] = None
    return_progress: Annotated[Any, Refused("chunks have no progress", (False,))] = None
    post_sampling_probs: Annotated[Any, Refused("log probabilities are those before filters", (False,))] = None
    response_fields: Annotated[Any, Refused("answers have all their fields", ([],))] = None
    grammar: Annotated[Any, Refused("forms are JSON, by response_format", ("",))] = None
    n_discard: Annotated[Any, Refused("a prompt that is too long is refused", (0,))] = None
    n_indent: Annotated[Any, Refused(_NO_SAMPLER, (0,))] = None
    t_max_predict_ms: Annotated[Any, Refused("it is the header X-Splitinfer-Timeout", (0, -1))] = None
    lora: Annotated[Any, Refused("there is one model, without adapters", ([],))] = None
    image_data: Annotated[Any, Refused("pictures are parts of messages", ([],))] = None
    reasoning_format: Annotated[Any, Refused("reasoning is returned apart from the text", _APART)] = None
    reasoning_in_content: Annotated[Any, Refused("reasoning is returned apart from the text", (False,))] = None
    reasoning_budget: Annotated[Any, Refused("its name is thinking_budget here", (-1,))] = None
    thinking_forced_open: Annotated[Any, Refused("the model's template begins its reasoning", (False,))] = None
    parse_tool_calls: Annotated[Any, Refused("calls are always read", (True,))] = None


class StreamOptions(Fields):
    """Options of a stream"""

    include_usage: bool = Field(False, description="The last chunk contains the usage")
    continuous_usage_stats: bool = Field(False, description="With include_usage: every chunk contains the usage so far")
    include_obfuscation: bool = Field(False, description=NOT_HIDDEN)


def check_stream_options(options: Fields | None, *, streams: bool) -> None:
    """Refuse options of a stream where there is none.

    Raises:
        Problem: 400.
    """
    if options is not None and options.model_fields_set and not streams:
        raise Problem(400, "stream_options is for streams only", param="stream_options")


def template_options(
    kwargs: Mapping[str, Any] | None, *, thinks: bool | None, verbosity: str | None, effort: str | None
) -> dict[str, Any]:
    """What the template is told beside the conversation: the client's own values, and how much to reason and to say."""
    options = dict(kwargs or {})
    if thinks is not None:
        options["enable_thinking"] = thinks
    if verbosity is not None:
        options["verbosity"] = verbosity
    if effort is None:
        return options
    return {"enable_thinking": effort != "none", **options, "reasoning_effort": effort}


def allowed(
    name: str,
    entries: list[dict[str, Any]],
    known: list[str],
    named: Callable[[dict[str, Any]], Any] = lambda one: one,
) -> frozenset[str]:
    """The names of the tools that a choice allows. ``named``: the object with the name in one of its entries.

    Raises:
        Problem: 400, there is no tool of a name.
    """
    found, there = set[str](), frozenset(known)
    for i, one in enumerate(entries):
        inside = named(one)
        own = inside.get("name") if isinstance(inside, dict) else None
        if not isinstance(own, str) or own not in there:
            where = f"{name}.tools[{i}].name"
            sentence = f"{where} must be the name of one of the tools, not {own!r:.60}"
            raise Problem(400, sentence, param=where, code="invalid_value")
        found.add(own)
    return frozenset(found)


def forced(told: tuple[Mapping[str, Any], ...], name: str | None, *, must: bool) -> tuple[Mapping[str, Any], ...]:
    """The functions one of which the model must call; none where it need not. ``told``: those that it is told of.
    ``name``: of the one that it must call; ``must``: it must call any.

    Raises:
        Problem: 400, there are none.
    """
    if name is not None:
        return tuple(tool for tool in told if tool["function"]["name"] == name)
    if must and not told:
        raise invalid("tool_choice", "tool_choice requires a call, but there are no tools")
    return told if must else ()
