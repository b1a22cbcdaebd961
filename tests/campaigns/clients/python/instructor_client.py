"""`instructor`, which wants structured output: by a tool that must be called, and by a schema."""

import instructor
import openai
from probe import ASKED, CITIES, KEY, MODEL, URL, ability, run, same
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)


class Weather(BaseModel):
    """The weather."""

    city: CITIES


def _ask(mode: instructor.Mode) -> None:
    found = instructor.from_openai(client, mode=mode).chat.completions.create(
        model=MODEL, messages=ASKED, response_model=Weather, max_retries=0
    )
    same(isinstance(found, Weather), True)


@ability
def tools() -> None:
    _ask(instructor.Mode.TOOLS)


@ability
def json_schema() -> None:
    _ask(instructor.Mode.JSON_SCHEMA)


if __name__ == "__main__":
    run("instructor")
