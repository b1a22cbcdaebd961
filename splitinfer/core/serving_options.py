"""The dials of serving as people turn them: in a layout, on the command line, in ``Settings``, while it runs.

One set of names everywhere. ``None`` leaves a dial to whoever is asked next: the command line and ``Settings`` go
before the layout, the layout before the default.
"""

import math
from dataclasses import dataclass, fields
from typing import Any

from splitinfer.core.scheduler.policy import PolicyConfig, PolicyName

MAX_RUNNING = 32


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """Raises ``ValueError`` for a value out of its range, named with the range.

    policy: who goes first, prompts or answers under way: stall_free (the default), prefill_first, watermark,
        decode_first (``core.scheduler.policy``).
    token_budget: tokens in one step; prompts are read in chunks of what answers under way leave of it. By default 512
        where a stage computes on a GPU, else 128.
    itl_slo_ms: milliseconds that two tokens of an answer should lie apart at most; chunks of prompts are then as large
        as what steps were measured to cost allows, within the token budget.
    prefill_share: of what answers leave of a step, the share that prompts get: 1 reads prompts soonest, less keeps
        answers steadier.
    max_running: requests that share the stages at a time, if their KV fits; 32 by default.
    max_partial_prefills: prompts that are read side by side: 1 by default; with more, short ones pass long ones.
    max_decode_gap_ms: milliseconds for which prefill_first and watermark may keep answers waiting.
    kv_high, kv_low: shares of the KV memory at which watermark turns to answers, and back to prompts; 0.9 and 0.7.
    min_dwell: steps that watermark goes one way, at least; 16.
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
        self.policy_config  # noqa: B018 - refuses what is out of its range

    @property
    def policy_config(self) -> PolicyConfig:
        """What the scheduler goes by."""
        said: dict[str, Any] = {
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
            said["policy"] = PolicyName(self.policy)
        return PolicyConfig(**{name: value for name, value in said.items() if value is not None})

    def as_dict(self) -> dict[str, Any]:
        """Those that are turned."""
        turned = {each.name: getattr(self, each.name) for each in fields(ServingOptions)}
        return {name: value for name, value in turned.items() if value is not None}

    def over(self, other: "ServingOptions") -> "ServingOptions":
        """These, and ``other``'s where these say nothing."""
        return ServingOptions(**{**other.as_dict(), **self.as_dict()})
