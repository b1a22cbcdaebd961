"""The options of serving, as set in a layout, on the command line, in ``Settings``, or while it runs.

The names are the same everywhere. ``None`` leaves an option to the next source: the command line and ``Settings`` come
before the layout, the layout before the default.
"""

import math
from dataclasses import dataclass, fields
from typing import Any

from splitinfer.core.scheduler.policy import PolicyConfig, PolicyName

MAX_RUNNING = 32


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """How requests share the stages; ``None`` where an option is not set.

    policy: whether prompts or answers under way go first: stall_free (the default), prefill_first, watermark,
        decode_first (``core.scheduler.policy``).
    token_budget: tokens in one step; prompts are read in chunks of what answers under way leave of it. By default 512
        where a stage computes on a GPU, else 128.
    itl_slo_ms: milliseconds between two tokens of an answer, at most; chunks of prompts are then as large as the
        measured cost of steps allows, within the token budget.
    prefill_share: share of what answers leave of a step that prompts get: 1 reads prompts soonest, less keeps
        answers steadier.
    max_running: requests that share the stages at a time, if their KV fits; 32 by default.
    max_partial_prefills: prompts that are read side by side; 1 by default. With more, short ones overtake long ones.
    max_decode_gap_ms: milliseconds for which prefill_first and watermark may keep answers waiting.
    kv_high, kv_low: shares of the KV memory at which watermark changes to answers, and back to prompts; by default 0.9
        and 0.7.
    min_dwell: steps between two such changes, at least; 16 by default.

    Raises:
        ValueError: a value out of its range, named with the range.
    """

    policy: str | None = None
    token_budget: int | None = None
    itl_slo_ms: float | None = None
    prefill_share: float | None = None
    max_running: int | None = None
    max_partial_prefills: int | None = None
    max_decode_gap_ms: float | None = None
    kv_high: float | None = None
    kv_low: float | None = None
    min_dwell: int | None = None

    def __post_init__(self) -> None:
        for name in ("itl_slo_ms", "max_decode_gap_ms"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be milliseconds over 0, not {value}")
        for name in ("token_budget", "max_running"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self.policy_config  # noqa: B018 - raises for a value out of its range

    @property
    def policy_config(self) -> PolicyConfig:
        """These options as the scheduler takes them, in seconds, with defaults."""
        options: dict[str, Any] = {
            "policy": self.policy,
            "prefill_share": self.prefill_share,
            "itl_slo": None if self.itl_slo_ms is None else self.itl_slo_ms / 1000,
            "max_partial_prefills": self.max_partial_prefills,
            "max_decode_gap": None if self.max_decode_gap_ms is None else self.max_decode_gap_ms / 1000,
            "kv_high": self.kv_high,
            "kv_low": self.kv_low,
            "min_dwell": self.min_dwell,
        }
        if self.policy is not None and self.policy in tuple(PolicyName):
            options["policy"] = PolicyName(self.policy)
        return PolicyConfig(**{name: value for name, value in options.items() if value is not None})

    def as_dict(self) -> dict[str, Any]:
        """The options that are set."""
        values = {each.name: getattr(self, each.name) for each in fields(ServingOptions)}
        return {name: value for name, value in values.items() if value is not None}

    def over(self, other: "ServingOptions") -> "ServingOptions":
        """These options, and those of ``other`` where these are not set."""
        return ServingOptions(**{**other.as_dict(), **self.as_dict()})
