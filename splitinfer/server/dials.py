"""The dials of serving: whoever may ask reads them, and who has the scope `admin` turns them.

    GET    each dial with its value, what is in force, its range and its meaning
    PATCH  {"prefill_share": 0.3, "policy": null}: these are changed, all or none; null restores the default

There is one for each option that ``core.serving_options`` declares. The engine's own checks come behind these, for
bounds that are of several dials together.
"""

import logging
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from splitinfer.core.serving_options import SERVING_OPTIONS, Declared, ServingOptions
from splitinfer.errors import ConfigError
from splitinfer.server.body import read_json
from splitinfer.server.keys import ApiKey, Scope
from splitinfer.server.problem import Problem
from splitinfer.server.service import ApiRoute, Service


def dials_document(options: ServingOptions, token_budget: int, max_running: int, *, may_change: bool) -> dict[str, Any]:
    """The dials as a client gets them. ``token_budget``, ``max_running``: in force."""
    given, policy = options.as_dict(), options.policy_config
    in_force = {**given, "token_budget": token_budget, "max_running": max_running}
    dials = [
        _dial(each, given.get(name), in_force.get(name, getattr(policy, name, None)))
        for name, each in SERVING_OPTIONS.items()
    ]
    return {"dials": dials, "may_change": may_change}


def changes_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The changes that a body asks for.

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
    """``value``: as it was set; ``None``: the default is in force."""
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
        return JSONResponse(
            dials_document(llm.serving_options, llm.token_budget, llm.max_running, may_change=may_change)
        )

    async def dials(request: Request) -> Response:
        scope = Scope.ADMIN if request.method == "PATCH" else Scope.USE
        key = service.caller(request, scope)
        if request.method == "PATCH":
            changes = await read_json(request, changes_of, _MOST_BYTES)
            try:
                llm.tune(**changes)
            except ConfigError as error:
                raise Problem(400, str(error)) from error
            log.info("%s has changed the dials: %s", key.name, changes)
        return document(key)

    return [ApiRoute("/v1/splitinfer/dials", dials, methods=["GET", "PATCH"])]
