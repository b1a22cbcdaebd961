"""The dials of serving, as a client reads and turns them. Pure.

    GET    each dial with its value, what is in force, its range and its meaning
    PATCH  {"prefill_share": 0.3, "policy": null}: these are changed, all or none; null restores the default

There is one for each option that ``core.serving_options`` declares. The engine's own checks come behind these, for
bounds that are of several dials together.
"""

from collections.abc import Mapping
from typing import Any

from splitinfer.core.serving_options import SERVING_OPTIONS, Declared, ServingOptions
from splitinfer.server.problem import Problem


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
    return {name: _checked(SERVING_OPTIONS[name], value) for name, value in body.items()}


def _dial(each: Declared, value: Any, in_force: Any) -> dict[str, Any]:
    """``value``: as it was set; ``None``: the default is in force."""
    option = each.option
    bounds = {"choices": list(option.choices)} if option.choices else {"least": option.least, "most": option.most}
    kind = "choice" if option.choices else "whole" if each.kind is int else "number"
    named = {"name": each.name, "meaning": option.help, "value": value, "in_force": in_force}
    return {**named, "kind": kind, "unit": option.unit, **bounds}


def _checked(each: Declared, value: Any) -> Any:
    try:
        return each.checked(value)
    except ValueError as error:
        raise Problem(400, str(error), param=each.name) from error
