"""The dials of serving. Every client may read them; a key with the scope `admin` may turn them.

    GET    each dial with its value, the value in force, its range and its meaning; and the model
    PATCH  {"prefill_share": 0.3, "policy": null}: changes these, all or none; null restores the default

And the cut of the layers, by the costs of the pipeline's own steps (``llm.rebalance``):

    GET   ?for=throughput          the cut in force, the best cut for an aim, how many times as good it is, and why
    POST  {"for": "throughput"}    the same; loads the best cut if that is worth it, while requests wait
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from splitinfer.core.serving_options import SERVING_OPTIONS, Declared, ServingOptions
from splitinfer.errors import ConfigError, RequestError, SplitinferError
from splitinfer.llm import LLM
from splitinfer.placement.asked import Aim
from splitinfer.server.body import read_json
from splitinfer.server.keys import ApiKey, Scope
from splitinfer.server.problem import Problem
from splitinfer.server.service import ApiRoute, Service
from splitinfer.server.stream import Document


def dials_document(options: ServingOptions, token_budget: int, max_running: int, *, may_change: bool) -> dict[str, Any]:
    """Return the dials as a client gets them. ``token_budget``, ``max_running``: in force."""
    given, policy = options.as_dict(), options.policy_config
    in_force = {**given, "token_budget": token_budget, "max_running": max_running}
    dials = [
        _dial(each, given.get(name), in_force.get(name, getattr(policy, name, None)))
        for name, each in SERVING_OPTIONS.items()
    ]
    return {"dials": dials, "may_change": may_change}


def changes_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes that a body asks for.

    Raises:
        Problem: 400, there is no such dial, or it cannot have the value.
    """
    unknown = next((name for name in body if name not in SERVING_OPTIONS), None)
    if unknown is not None:
        known = ", ".join(SERVING_OPTIONS)
        raise Problem(400, f"there is no dial {unknown!r:.60}; there are {known}", param=f"{unknown:.60}")
    changes = {}
    for name, value in body.items():
        try:
            changes[name] = SERVING_OPTIONS[name].checked(value)
        except ValueError as error:
            raise Problem(400, str(error), param=name) from error
    return changes


def _dial(each: Declared, value: Any, in_force: Any) -> dict[str, Any]:
    """Return a dial as the API shows it. ``value``: the value that was set; ``None`` if the default is in force."""
    option = each.option
    bounds = {"choices": list(option.choices)} if option.choices else {"least": option.least, "most": option.most}
    kind = "choice" if option.choices else "whole" if each.kind is int else "number"
    named = {"name": each.name, "meaning": option.help, "value": value, "in_force": in_force}
    return {**named, "kind": kind, "unit": option.unit, **bounds}


log = logging.getLogger(__name__)

_MOST_BYTES = 1 << 16


def dial_routes(service: Service) -> list[ApiRoute]:
    llm = service.llm

    def document(key: ApiKey) -> Response:
        may_change = key.may(Scope.ADMIN)
        found = dials_document(llm.serving_options, llm.token_budget, llm.max_running, may_change=may_change)
        return Document({"model": service.model, **found})

    async def dials(request: Request) -> Response:
        scope = Scope.ADMIN if request.method == "PATCH" else Scope.USE
        key = service.caller(request, scope)
        if request.method == "PATCH":
            changes = await read_json(request, changes_of, _MOST_BYTES)
            try:
                llm.tune(**changes)
            except ConfigError as error:
                raise Problem(400, str(error)) from error
            log.info("%s has changed the dials of %s: %s", key.name, service.model, changes)
        return document(key)

    return [ApiRoute("/v1/splitinfer/dials", dials, methods=["GET", "PATCH"])]


# -- the cut ---------------------------------------------------------------------------------------


def aim_of(asked: Mapping[str, Any]) -> Aim:
    """Return what the cut shall be best for.

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
    """Return the document that compares the cut in force with the best one.

    Args:
        loads: load the best cut if that is worth it; or, if the cut that was loaded last is slower than the one before
            it, load that one.

    Raises:
        Problem: 409, the machines are not measured yet, no cut fits, or the best cut cannot be loaded.
    """
    try:
        advised, brought = llm.layout.cut, llm.outcome(acts=loads)
        if (before := llm.layout.cut) != advised:  # no step of it has been computed, so nothing more is known
            return {"for": aim.value, "cut": before, "best": before, "gain": 1.0, "text": brought, "paused": None}
        found = llm.plan(aim)
        paused = llm.follow(found, aim) if loads and found.is_worth_it else None
    except RequestError as error:
        raise Problem(409, str(error)) from error
    except SplitinferError as error:
        raise Problem(409, f"the cut in force is still {llm.layout.cut}: {error}") from error
    best = {"cut": before, "best": found.layout.cut, "gain": found.gain}
    text = found.text if brought is None else f"{brought} {found.text}"
    return {"for": aim.value, **best, "text": text, "paused": paused}


def plan_routes(service: Service) -> list[ApiRoute]:
    async def plan(request: Request) -> Response:
        loads = request.method == "POST"
        key = service.caller(request, Scope.ADMIN if loads else Scope.USE)
        aim = await read_json(request, aim_of, _MOST_BYTES) if loads else aim_of(request.query_params)
        with service.admitted(key):
            document = await asyncio.to_thread(compared, service.llm, aim, loads=loads)
        if document["paused"] is not None:
            log.info("%s has had %s loaded; requests waited %.1f s", key.name, document["best"], document["paused"])
        return Document(document)

    return [ApiRoute("/v1/splitinfer/plan", plan, methods=["GET", "POST"])]
