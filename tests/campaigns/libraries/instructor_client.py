"""`instructor`: an answer as a pydantic model, in each of its modes."""

import instructor
from openai import OpenAI
from probe import ASKED, KEY, MODEL, URL, Weather, ability, run, same


@ability
def forms() -> None:
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT):
        client = instructor.from_openai(OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0), mode=mode)
        said = client.chat.completions.create(model=MODEL, messages=ASKED, response_model=Weather, max_retries=0)
        same((mode, type(said)), (mode, Weather))


run()
