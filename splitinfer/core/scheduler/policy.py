"""When prompts are read and when answers go on: the trade between the first token and a steady stream.

A step has room for so many tokens. Answers under way (decodes) need one each, prompts take any number, and whoever goes
first makes the other wait. A policy says, for each step: do the decodes of its group go, how much of the room may
prompts take, may new requests begin?

    policy          decodes go                   prompts get                        what it does to the numbers
    stall_free      always                       what is left, times prefill_share  ITL bounded by one step a stage
    prefill_first   when no prompt can be read   the whole step                     least TTFT; ITL as long as prompts
    watermark       the one until memory is full to kv_high, then the other down to kv_low    many decode at once
    decode_first    always                       what is left, but nobody joins     least ITL; TTFT as long as answers
                                                 while somebody decodes

``stall_free`` is Sarathi-Serve's schedule (Agrawal et al., arXiv 2403.02310), ``decode_first`` FasterTransformer's
request-level batching, ``prefill_first`` what vLLM began with. ``prefill_share`` is the one dial between the first two
of these: at 1 prompts take all that a step has left, near 0 they trickle.

A policy that keeps decodes waiting is overruled when one has waited for ``max_decode_gap``.

Pure, and told everything: no policy looks at a clock or at the scheduler.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

LEAST_SHARE = 0.01  # of a step's room: less, and a prompt would never be read


class PolicyName(StrEnum):
    """The values are the public words."""

    STALL_FREE = "stall_free"
    PREFILL_FIRST = "prefill_first"
    WATERMARK = "watermark"
    DECODE_FIRST = "decode_first"


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """The dials of all policies; each reads those that mean something to it.

    ``prefill_share`` of the room that decodes leave in a step, for prompts, while somebody decodes; ``itl_slo``:
    seconds that two tokens of an answer may lie apart (``None``: steps are bounded by their tokens alone);
    ``max_partial_prefills`` prompts that are read side by side; ``max_decode_gap``: seconds for which a policy may keep
    a decode waiting; ``kv_high``, ``kv_low``: shares of the KV memory at which ``watermark`` changes sides, not before
    ``min_dwell`` steps on one.

    Raises:
        ValueError: a value out of its range, named with the range.
    """

    policy: PolicyName = PolicyName.STALL_FREE
    prefill_share: float = 1.0
    itl_slo: float | None = None
    max_partial_prefills: int = 1
    max_decode_gap: float | None = None
    kv_high: float = 0.9
    kv_low: float = 0.7
    min_dwell: int = 16

    def __post_init__(self) -> None:
        if self.policy not in tuple(PolicyName):
            raise ValueError(f"policy {self.policy!r} is none of {', '.join(PolicyName)}")
        if not LEAST_SHARE <= self.prefill_share <= 1:
            raise ValueError(f"prefill_share must be from {LEAST_SHARE} to 1, not {self.prefill_share}")
        for name in ("itl_slo", "max_decode_gap"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be seconds over 0, not {value}")
        for name in ("max_partial_prefills", "min_dwell"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 <= self.kv_low < self.kv_high <= 1:
            raise ValueError(f"kv_low and kv_high must be 0 <= low < high <= 1, not {self.kv_low} and {self.kv_high}")


@dataclass(frozen=True, slots=True)
class PolicyInput:
    """What a policy decides by, when the step of one group is planned.

    ``num_decoding``: sequences that decode, in all groups; ``kv_share``: of the KV memory, what running sequences have
    and were promised, on the stage that is fullest; ``waited``: seconds since the group's last token, 0 for an empty
    group.
    """

    num_decoding: int
    kv_share: float = 0.0
    waited: float = 0.0


class PolicyDecision(NamedTuple):
    """What a step may do. ``decodes_go``: its group's decodes are in it; ``share`` of the room for prompts; ``admits``:
    waiting requests may begin."""

    decodes_go: bool
    share: float
    admits: bool


_ALL_OF_IT = PolicyDecision(decodes_go=True, share=1.0, admits=True)  # nobody is there who could be kept waiting
_PROMPTS = PolicyDecision(decodes_go=False, share=1.0, admits=True)


class Policy(Protocol):
    """``order`` changes nothing; ``went`` learns that a step went out."""

    def decide(self, policy_input: PolicyInput) -> PolicyDecision:
        """What the next step may do."""
        ...

    def scheduled(self, policy_input: PolicyInput) -> None:
        """A step with slices was planned in this situation."""
        ...


@dataclass(slots=True)
class StallFree:
    """No decode is ever skipped for a prompt."""

    policy_config: PolicyConfig

    def decide(self, policy_input: PolicyInput) -> PolicyDecision:
        """Decodes, and prompts in what is left."""
        return PolicyDecision(True, self.policy_config.prefill_share, True) if policy_input.num_decoding else _ALL_OF_IT

    def scheduled(self, policy_input: PolicyInput) -> None:
        """Nothing to remember."""


@dataclass(slots=True)
class PrefillFirst:
    """Prompts have the stages to themselves as long as there are any."""

    policy_config: PolicyConfig

    def decide(self, policy_input: PolicyInput) -> PolicyDecision:
        """Prompts, unless a decode has waited too long."""
        if not policy_input.num_decoding:
            return _ALL_OF_IT
        return _steady(self.policy_config) if _is_overdue(self.policy_config, policy_input) else _PROMPTS

    def scheduled(self, policy_input: PolicyInput) -> None:
        """Nothing to remember."""


@dataclass(slots=True)
class DecodeFirst:
    """Whoever begins together is read and answered together; nobody joins them."""

    policy_config: PolicyConfig

    def decide(self, policy_input: PolicyInput) -> PolicyDecision:
        """Decodes, and what is left of the prompts that were let in with them."""
        if not policy_input.num_decoding:
            return _ALL_OF_IT
        return PolicyDecision(decodes_go=True, share=self.policy_config.prefill_share, admits=False)

    def scheduled(self, policy_input: PolicyInput) -> None:
        """Nothing to remember."""


@dataclass(slots=True)
class Watermark:
    """Fills the memory with requests, then lets it drain: most steps of decoding have many rows.

    It turns at ``kv_high`` and ``kv_low``, and stays for ``min_dwell`` steps at least, or a step at the edge would turn
    it each time. Where nobody decodes any more, there is nothing to drain.
    """

    policy_config: PolicyConfig
    drains: bool = False
    _steps: int = 0  # since it turned

    def decide(self, policy_input: PolicyInput) -> PolicyDecision:
        """Prompts while it fills, decodes while it drains."""
        if not policy_input.num_decoding:
            return _ALL_OF_IT
        if self.drains:
            return PolicyDecision(decodes_go=True, share=self.policy_config.prefill_share, admits=False)
        return _steady(self.policy_config) if _is_overdue(self.policy_config, policy_input) else _PROMPTS

    def scheduled(self, policy_input: PolicyInput) -> None:
        """Turn where the memory says so."""
        self._steps += 1
        if not policy_input.num_decoding:
            self._turn(drains=False)
        elif self._steps >= self.policy_config.min_dwell:
            share = policy_input.kv_share
            self._turn(drains=share > self.policy_config.kv_low if self.drains else share >= self.policy_config.kv_high)

    def _turn(self, *, drains: bool) -> None:
        if drains != self.drains:
            self.drains, self._steps = drains, 0


def _steady(policy_config: PolicyConfig) -> PolicyDecision:
    return PolicyDecision(decodes_go=True, share=policy_config.prefill_share, admits=True)


def _is_overdue(policy_config: PolicyConfig, policy_input: PolicyInput) -> bool:
    return policy_config.max_decode_gap is not None and policy_input.waited >= policy_config.max_decode_gap


def policy_of(policy_config: PolicyConfig) -> Policy:
    """The policy that the knobs name, at its beginning."""
    match policy_config.policy:
        case PolicyName.STALL_FREE:
            return StallFree(policy_config)
        case PolicyName.PREFILL_FIRST:
            return PrefillFirst(policy_config)
        case PolicyName.WATERMARK:
            return Watermark(policy_config)
        case PolicyName.DECODE_FIRST:
            return DecodeFirst(policy_config)
