"""The form of an answer: the fields of OpenAI, vLLM and llama.cpp that ask for one."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator

from splitinfer.core.grammar import GBNF_RULE, MAX_GRAMMAR, Grammar
from splitinfer.server.fields import EMPTY, Fields, Kinds, Name, not_a
from splitinfer.server.problem import Problem, invalid
from splitinfer.server.refused import STRUCTURED


class PlainFormat(Fields):
    type: Literal["text"]


class JsonFormat(Fields):
    """Any JSON object; of a schema, if there is one, as llama.cpp's server has it."""

    type: Literal["json_object"]
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class NamedSchema(Fields):
    """A schema, which is enforced. Responses repeat it with its name."""

    name: Name | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class SchemaFormat(Fields):
    type: Literal["json_schema"]
    json_schema: NamedSchema


Format = PlainFormat | JsonFormat | SchemaFormat | NamedSchema
TextFormat = Annotated[PlainFormat | JsonFormat | SchemaFormat, Kinds("type")]


def grammar_of(schema: Any, param: str) -> Grammar:
    """Return the grammar of JSON that a schema admits. ``None`` admits any object.

    Raises:
        Problem: 400, the schema is not valid.
    """
    try:
        return Grammar.json(schema)
    except ValueError as error:
        raise invalid(param, f"{param}: {error}") from error


# -- as vLLM and llama.cpp have it ------------------------------------------------------------------


def _asked(given: Any) -> Any:
    return None if given in EMPTY else given


def _schema(given: Any) -> Any:
    if given not in EMPTY and not isinstance(given, dict | str):
        raise not_a("an object or text", given)
    return _asked(given)


Schema = Annotated[dict[str, Any] | str | None, PlainValidator(_schema)]
Text = Annotated[str | None, BeforeValidator(_asked)]
Texts = Annotated[list[str] | None, BeforeValidator(_asked)]


class StructuredOutputs(Fields):
    """vLLM's field for a form; exactly one of its fields is set."""

    refused = STRUCTURED
    json_: Schema = Field(None, alias="json")
    regex: Text = None
    choice: Texts = None
    grammar: Text = None
    json_object: bool = False


class Formed(Fields):
    """The form of an answer under other servers' names: vLLM's current and old ones, llama.cpp's and SGLang's.
    ``grammar``, ``ebnf``: in Lark or GBNF."""

    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema = None
    guided_regex: Text = None
    guided_choice: Texts = None
    guided_grammar: Text = None
    json_schema: Schema = None
    grammar: Text = None
    regex: Text = None
    ebnf: Text = None

    def form(self, own: Format | None, param: str) -> dict[str, Any]:
        """Return the fields of ``SamplingParams`` for the form. ``own``: the API's own field ``param``.

        Raises:
            Problem: 400, there are several forms, or one is not valid.
        """
        own = own.json_schema if isinstance(own, SchemaFormat) else own
        found = {"grammar": grammar_of(own.schema_, param)} if isinstance(own, JsonFormat | NamedSchema) else {}
        other = self.structured_outputs or StructuredOutputs.model_validate({})
        asked: list[tuple[str, Callable[[Any], Grammar], Any]] = [
            ("structured_outputs.json", Grammar.json, other.json_),
            ("structured_outputs.regex", Grammar.regex, other.regex),
            ("structured_outputs.choice", Grammar.choice, other.choice),
            ("structured_outputs.grammar", _written, other.grammar),
            ("structured_outputs.json_object", lambda _: Grammar.json(), other.json_object or None),
            ("guided_json", Grammar.json, self.guided_json),
            ("guided_regex", Grammar.regex, self.guided_regex),
            ("guided_choice", Grammar.choice, self.guided_choice),
            ("guided_grammar", _written, self.guided_grammar),
            ("json_schema", Grammar.json, self.json_schema),
            ("grammar", _written, self.grammar),
            ("regex", Grammar.regex, self.regex),
            ("ebnf", _written, self.ebnf),
        ]
        given = [one for one in asked if one[2] is not None]
        names = [*([param] if found else []), *(name for name, _, _ in given)]
        if len(names) > 1:
            raise Problem(400, f"an answer has one form; give one of {', '.join(names)}", param=names[-1])
        for name, make, value in given:
            try:
                return {"grammar": make(value)}
            except ValueError as error:
                raise invalid(name, f"{name}: {error}") from error
        return found


def _written(text: str) -> Grammar:
    return Grammar.gbnf(text) if GBNF_RULE.search(text, 0, MAX_GRAMMAR) else Grammar.lark(text)
