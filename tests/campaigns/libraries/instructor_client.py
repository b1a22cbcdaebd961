"""`instructor`: an answer as a pydantic model, in each of its modes."""

import instructor
from openai import OpenAI
from probe import ASKED, KEY, MODEL, URL, Weather, ability, run, same


def _answer(mode: instructor.Mode) -> None:
    client = instructor.from_openai(OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0), mode=mode)
    said = client.chat.completions.create(model=MODEL, messages=ASKED, response_model=Weather, max_retries=0)
    same(type(said), Weather)


@ability
def json_schema() -> None:
    _answer(instructor.Mode.JSON_SCHEMA)


@ability
def tools() -> None:
    _answer(instructor.Mode.TOOLS)


@ability
def strict_tools() -> None:
    _answer(instructor.Mode.TOOLS_STRICT)


run()
