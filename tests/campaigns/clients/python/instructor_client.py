"""`instructor`, which wants structured output: not there yet, so its errors must be clear."""

import instructor
import openai
from probe import ASKED, KEY, MODEL, URL, ability, refused, run
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)


class Weather(BaseModel):
    """The weather."""

    city: str


def _ask(mode: instructor.Mode) -> object:
    return instructor.from_openai(client, mode=mode).chat.completions.create(
        model=MODEL, messages=ASKED, response_model=Weather, max_retries=0
    )


@ability
def tools_are_refused_cleanly() -> None:
    refused(Exception, "tool_choice", lambda: _ask(instructor.Mode.TOOLS))


@ability
def json_is_refused_cleanly() -> None:
    refused(Exception, "response_format", lambda: _ask(instructor.Mode.JSON))


if __name__ == "__main__":
    run("instructor")
