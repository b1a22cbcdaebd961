"""What the clients' scripts share: each ability is a function that fails if the client does not get what it should.

A script is run by `clients.py` with the server's address in ``CLIENT_URL`` and the key in ``CLIENT_KEY``. It prints
a line of JSON: for each ability ``null`` or why it failed.
"""

import asyncio
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel

URL = os.environ.get("CLIENT_URL", "http://127.0.0.1:8080")
KEY = os.environ.get("CLIENT_KEY", "none")
MODEL = os.environ.get("CLIENT_MODEL", "scripted")

QUESTION = "What is the weather in Oslo?"
ASKED: list[Any] = [{"role": "user", "content": QUESTION}]
TALE = "There was a king who had three daughters, and the youngest told the best tales of all."
ANSWER = "It is sunny in Oslo, as the tool says."
THOUGHT = "The user asks for something that the tool can do."
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "Tells the weather.", "parameters": SCHEMA}


class Weather(BaseModel):
    city: Literal["Oslo", "Bergen"]


_abilities: list[Callable[[], Any]] = []


def ability(function: Callable[[], Any]) -> Callable[[], Any]:
    """Something that the client shall be able to do here; its name is what is printed."""
    _abilities.append(function)
    return function


def same(found: object, expected: object) -> None:
    if found != expected:
        raise AssertionError(f"{found!r:.300} is not {expected!r:.300}")


def get_weather(city: str) -> str:
    """Tells the weather."""
    same(city, "Oslo")
    return "sunny"


def refused(kind: type[BaseException], naming: str, call: Callable[[], Any]) -> Any:
    """The error that a call ends with; it must be of that kind and name what is wrong."""
    try:
        call()
    except kind as error:
        if naming not in str(error):
            raise AssertionError(f"{error!s:.300} does not name {naming}") from error
        return error
    raise AssertionError(f"{naming} was taken")


def run() -> None:
    found: dict[str, str | None] = {}
    only = sys.argv[1:]
    with asyncio.Runner() as runner:  # clients keep connections that belong to one event loop
        for function in _abilities:
            if only and function.__name__ not in only:
                continue
            try:
                runner.run(function()) if inspect.iscoroutinefunction(function) else function()
                found[function.__name__] = None
            except BaseException as error:  # noqa: BLE001 - whatever a client raises is the finding
                found[function.__name__] = f"{type(error).__name__}: {error}"[:600]
                if only:
                    traceback.print_exc()
    sys.stdout.write(json.dumps(found) + "\n")
