"""The dials of serving, as a client reads and turns them. Pure.

    GET    each dial with its value, what is in force, its range and its meaning
    PATCH  {"prefill_share": 0.3, "policy": null}: these are changed, all or none; null restores the default

What they do is in ``core.scheduler.policy``; here is what may come from outside. The engine's own checks come behind
these, for bounds that are of several dials together.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from splitinfer.core.scheduler.policy import LEAST_SHARE, PolicyName
from splitinfer.core.serving_options import ServingOptions
from splitinfer.server.problem import Problem

_MOST = 1_000_000  # tokens in a step, requests: more than any machine has room for


@dataclass(frozen=True, slots=True)
class Dial:
    """A dial. ``choices``: of a word; none: it is a number, from ``least`` to ``most``, perhaps ``whole``. ``unit``: of
    the number. ``meaning``: what it does, in a sentence."""

    name: str
    meaning: str
    choices: tuple[str, ...] = ()
    least: float = 0.0
    most: float = math.inf
    whole: bool = False
    unit: str = ""

    def checked(self, value: Any) -> Any:
        """A value as the engine takes it; ``None``: the default.

        Raises:
            Problem: 400, with what it may be.
        """
        if value is None or (self.choices and value in self.choices):
            return value
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and not self.choices
        if not is_number or not self.least <= value <= self.most or (self.whole and value != int(value)):
            raise Problem(400, f"{self.name} must be {self.range}, not {value!r:.40}", param=self.name)
        return int(value) if self.whole else float(value)

    @property
    def range(self) -> str:
        """What it may be, as part of a sentence.

        >>> DIALS["prefill_share"].range, DIALS["max_running"].range
        ('a number from 0.01 to 1', 'a whole number from 1 to 1,000,000')
        """
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        kind = "a whole number" if self.whole else "a number"
        return f"{kind}{f' of {self.unit}' if self.unit else ''} from {self.least:,g} to {self.most:,.0f}"

    def as_dict(self, value: Any, in_force: Any) -> dict[str, Any]:
        """The dial as a client gets it. ``value``: as it was set; ``None``: the default is in force."""
        bounds = {"choices": list(self.choices)} if self.choices else {"least": self.least, "most": self.most}
        kind = "choice" if self.choices else "whole" if self.whole else "number"
        named = {"name": self.name, "meaning": self.meaning, "value": value, "in_force": in_force}
        return {**named, "kind": kind, "unit": self.unit, **bounds}


_HOUR = 3_600_000.0  # milliseconds
_ALL = (
    Dial(
        "policy",
        "Whether prompts or answers under way go first: stall_free lets answers go in every step, prefill_first reads "
        "prompts at once, watermark does either in turns by the memory for KV, decode_first lets nobody join.",
        choices=tuple(map(str, PolicyName)),
    ),
    Dial(
        "prefill_share",
        "Of what answers leave of a step, the part that prompts get: less makes answers steadier, and first tokens "
        "later.",
        least=LEAST_SHARE,
        most=1.0,
    ),
    Dial(
        "itl_slo_ms",
        "The most time between two tokens of an answer; prompts are read in pieces that keep it.",
        least=0.001,
        most=_HOUR,
        unit="milliseconds",
    ),
    Dial(
        "token_budget",
        "Tokens in a step: more reads prompts faster, and makes the longest gap of an answer longer.",
        least=1,
        most=_MOST,
        whole=True,
    ),
    Dial(
        "max_running",
        "Requests that share the stages: more throughput, longer gaps.",
        least=1,
        most=_MOST,
        whole=True,
    ),
    Dial(
        "max_partial_prefills",
        "Prompts that are read side by side: short ones pass long ones, which take longer.",
        least=1,
        most=_MOST,
        whole=True,
    ),
    Dial(
        "max_decode_gap_ms",
        "How long prefill_first and watermark may keep an answer waiting.",
        least=0.001,
        most=_HOUR,
        unit="milliseconds",
    ),
    Dial("kv_high", "The share of the memory for KV at which watermark lets answers go first.", most=1.0),
    Dial("kv_low", "The share of the memory for KV at which watermark lets prompts go first again.", most=1.0),
    Dial(
        "min_dwell", "Steps between two such changes of watermark, at least.", least=1, most=_MOST, whole=True
    ),
)  # fmt: skip
DIALS: Mapping[str, Dial] = {dial.name: dial for dial in _ALL}
"""All dials, by name: those of ``ServingOptions``."""


def dials_document(options: ServingOptions, token_budget: int, max_running: int, *, may_change: bool) -> dict[str, Any]:
    """The dials as a client gets them. ``token_budget``, ``max_running``: in force."""
    given, policy = options.as_dict(), options.policy_config
    in_force = {
        "policy": str(policy.policy),
        "prefill_share": policy.prefill_share,
        "token_budget": token_budget,
        "max_running": max_running,
        "max_partial_prefills": policy.max_partial_prefills,
        "kv_high": policy.kv_high,
        "kv_low": policy.kv_low,
        "min_dwell": policy.min_dwell,
    }
    written = [dial.as_dict(given.get(name), in_force.get(name, given.get(name))) for name, dial in DIALS.items()]
    return {"dials": written, "may_change": may_change}


def changes_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The changes that a body asks for.

    Raises:
        Problem: 400, there is no such dial, or it cannot have the value.
    """
    unknown = next((name for name in body if name not in DIALS), None)
    if unknown is not None:
        raise Problem(400, f"there is no dial {unknown!r:.60}; there are {', '.join(DIALS)}", param=f"{unknown:.60}")
    return {name: DIALS[name].checked(value) for name, value in body.items()}
