"""The cut in force beside the best one: whoever may ask compares, and who has the scope `admin` has it loaded.

    GET   ?for=throughput          the cut in force, the best one for an aim, how many times as good it would be, why
    POST  {"for": "throughput"}    the same; the best one is loaded where that is worth it, and requests wait meanwhile

Comparing is arithmetic, by what the pipeline's own steps have cost (``llm.rebalance``).
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from splitinfer.errors import RequestError, SplitinferError
from splitinfer.llm import LLM
from splitinfer.placement.asked import Aim
from splitinfer.server.body import read_json
from splitinfer.server.keys import Scope
from splitinfer.server.problem import Problem
from splitinfer.server.service import ApiRoute, Service

log = logging.getLogger(__name__)

_MOST_BYTES = 1 << 10


def aim_of(asked: Mapping[str, Any]) -> Aim:
    """What the cut shall be best for.

    Raises:
        Problem: 400, there is no such aim.
    """
    aims = ", ".join(Aim)
    if unknown := [name for name in asked if name != "for"]:
        raise Problem(400, f"there is no field {unknown[0]!r:.60}; there is 'for', with one of {aims}")
    aim = asked.get("for", Aim.CHAT.value)
    if aim not in tuple(Aim):
        raise Problem(400, f"for must be one of {aims}, not {aim!r:.60}", param="for")
    return Aim(aim)


def compared(llm: LLM, aim: Aim, *, loads: bool) -> dict[str, Any]:
    """The document. ``loads``: have the best cut loaded, where that is worth it.

    Raises:
        Problem: 409, nothing is known of the machines yet, no cut fits, or the best one cannot be loaded.
    """
    try:
        before, found = llm.layout.cut, llm.plan(aim)
        paused = llm.recut(found.layout) if loads and found.is_worth_it else None
    except RequestError as error:
        raise Problem(409, str(error)) from error
    except SplitinferError as error:
        raise Problem(409, f"the cut in force is still {llm.layout.cut}: {error}") from error
    best = {"cut": before, "best": found.layout.cut, "gain": found.gain, "text": found.text}
    return {"for": aim.value, **best, "paused": paused}


def plan_routes(service: Service) -> list[ApiRoute]:
    async def plan(request: Request) -> Response:
        loads = request.method == "POST"
        key = service.caller(request, Scope.ADMIN if loads else Scope.USE)
        aim = await read_json(request, aim_of, _MOST_BYTES) if loads else aim_of(request.query_params)
        with service.admitted(key):
            document = await asyncio.to_thread(compared, service.llm, aim, loads=loads)
        if document["paused"] is not None:
            log.info("%s has had %s loaded; requests waited %.1f s", key.name, document["best"], document["paused"])
        return JSONResponse(document)

    return [ApiRoute("/v1/splitinfer/plan", plan, methods=["GET", "POST"])]
