"""When prompts are read and when answers go on: the trade between the first token and a steady stream.

A step has room for so many tokens. Answers under way (decodes) need one each, prompts take any number, and what goes
first makes the other wait. A policy decides for each step whether the decodes of its group go, how much of the room
prompts may take, and whether waiting requests may be admitted.

    policy          decodes go                   prompts get                        effect on latency
    stall_free      always                       what is left, times prefill_share  ITL bounded by one step a stage
    prefill_first   when no prompt can be read   the whole step                     least TTFT; ITL as long as prompts
    watermark       like prefill_first until memory is full to kv_high, then        many sequences decode at once
                    like decode_first down to kv_low
    decode_first    always                       what is left, but none is admitted least ITL; TTFT as long as answers
                                                 while sequences decode

``stall_free`` is Sarathi-Serve's schedule (Agrawal et al., arXiv 2403.02310), ``decode_first`` FasterTransformer's
request-level batching, ``prefill_first`` vLLM's original schedule. ``prefill_share`` blends the first two of these: at
1 prompts take all that a step has left, near 0 they are read slowly.

A policy that keeps decodes waiting is overruled when one has waited for ``max_decode_gap``.

Policies are pure: all that they need is in ``PolicyInput``; none reads a clock or the scheduler.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

LEAST_SHARE = 0.01  # of a step's room; with less a prompt would never be read


class PolicyName(StrEnum):
    """The policies' public names."""

    STALL_FREE = "stall_free"
    PREFILL_FIRST = "prefill_first"
    WATERMARK = "watermark"
    DECODE_FIRST = "decode_first"


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """The options of all policies; each policy uses some of them. ``core.serving_options`` declares and bounds them.

    prefill_share: share of the room that decodes leave in a step, which prompts get while sequences decode.
    itl_slo: seconds between two tokens of an answer, at most; ``None``: steps are bounded by their tokens alone.
    max_partial_prefills: prompts that are read side by side.
    max_decode_gap: seconds for which a policy may keep a decode waiting; ``None``: no bound.
    kv_high, kv_low: shares of the KV memory at which ``watermark`` begins to drain, and to fill again.
    min_dwell: steps that ``watermark`` fills or drains, at least.

    Raises:
        ValueError: kv_low is not below kv_high.
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
        if not 0 <= self.kv_low < self.kv_high <= 1:
            raise ValueError(f"kv_low and kv_high must be 0 <= low < high <= 1, not {self.kv_low} and {self.kv_high}")


@dataclass(frozen=True, slots=True)
class PolicyInput:
    """The situation in which the step of one group is planned.

    num_decoding: sequences that decode, in all groups.
    kv_share: share of the KV memory that running sequences use, on the stage that is fullest.
    waited: the longest time since the last token of one of the group's members, in seconds; 0 for an empty group.
    """

    num_decoding: int
    kv_share: float = 0.0
    waited: float = 0.0


class PolicyDecision(NamedTuple):
    """What a step may do.

    decodes_go: whether it contains its group's decodes.
    share: share of its room that prompts may take.
    admits: whether waiting requests may be admitted.
    """

    decodes_go: bool
    share: float
    admits: bool


_EVERYTHING = PolicyDecision(decodes_go=True, share=1.0, admits=True)  # where there is no decode to delay
_PROMPTS = PolicyDecision(decodes_go=False, share=1.0, admits=True)


class Policy(Protocol):
    """Decides what steps may do. ``decide`` changes nothing; ``scheduled`` updates a policy that has state."""

    def decide(self, policy_input: PolicyInput) -> PolicyDecision:
        """Return what the next step may do."""
        ...

    def scheduled(self, policy_input: PolicyInput) -> None:
        """Take note that a step with slices was planned in this situation."""
        ...


@dataclass(slots=True)
class StallFree:
    """No decode is ever skipped for a prompt."""

    policy_config: PolicyConfig

    def decide(self, policy_input: PolicyInput) -> PolicyDecision:
        """Decodes go, and prompts get the rest."""
        return _steady(self.policy_config) if policy_input.num_decoding else _EVERYTHING

    def scheduled(self, policy_input: PolicyInput) -> None:
        """This policy has no state."""


@dataclass(slots=True)
class PrefillFirst:
    """As long as there are prompts, the stages compute nothing else."""

    policy_config: PolicyConfig

    def decide(self, policy_input: PolicyInput) -> PolicyDecision:
        """Prompts go, unless a decode has waited too long."""
        if not policy_input.num_decoding:
            return _EVERYTHING
        return _steady(self.policy_config) if _is_overdue(self.policy_config, policy_input) else _PROMPTS

    def scheduled(self, policy_input: PolicyInput) -> None:
        """This policy has no state."""


@dataclass(slots=True)
class DecodeFirst:
    """Requests are admitted together and answered together; none joins them."""

    policy_config: PolicyConfig

    def decide(self, policy_input: PolicyInput) -> PolicyDecision:
        """Decodes go, and the prompts that were admitted with them get the rest."""
        if not policy_input.num_decoding:
            return _EVERYTHING
        return PolicyDecision(decodes_go=True, share=self.policy_config.prefill_share, admits=False)

    def scheduled(self, policy_input: PolicyInput) -> None:
        """This policy has no state."""


@dataclass(slots=True)
class Watermark:
    """Fills the memory with requests, then lets it drain, so that most decode steps have many rows.

    It changes sides at ``kv_high`` and ``kv_low``, and stays for ``min_dwell`` steps at least; else it would change at
    every step near a mark. Where no sequence decodes, there is nothing to drain.
    """

    policy_config: PolicyConfig
    drains: bool = False
    _steps: int = 0  # since it changed sides

    def decide(self, policy_input: PolicyInput) -> PolicyDecision:
        """Prompts go while it fills, decodes while it drains."""
        if not policy_input.num_decoding:
            return _EVERYTHING
        if self.drains:
            return PolicyDecision(decodes_go=True, share=self.policy_config.prefill_share, admits=False)
        return _steady(self.policy_config) if _is_overdue(self.policy_config, policy_input) else _PROMPTS

    def scheduled(self, policy_input: PolicyInput) -> None:
        """Change sides where the use of memory asks for it."""
        self._steps += 1
        if not policy_input.num_decoding:
            self._change_to(drains=False)
        elif self._steps >= self.policy_config.min_dwell:
            share, config = policy_input.kv_share, self.policy_config
            self._change_to(drains=share > config.kv_low if self.drains else share >= config.kv_high)

    def _change_to(self, *, drains: bool) -> None:
        if drains != self.drains:
            self.drains, self._steps = drains, 0


_LONG, _SHORT_CHUNK = 32 * 1024, 128  # tokens


def longest_chunk(start: int, token_budget: int) -> int:
    """Tokens of a prompt that a step reads behind ``start`` tokens, at most.

    Metal attends to all keys in one command, and macOS ends a process whose GPU computes one command for seconds: seen
    from 65k keys on, with chunks of 2,048 (mlx, issue 3302). So behind 32k tokens chunks shorten as the keys grow.

    >>> [longest_chunk(start, 512) for start in (0, 32_768, 65_536, 1_000_000)], longest_chunk(10**6, 16)
    ([512, 512, 256, 128], 16)
    """
    return min(token_budget, max(_SHORT_CHUNK, token_budget * _LONG // max(start, _LONG)))


def _steady(policy_config: PolicyConfig) -> PolicyDecision:
    return PolicyDecision(decodes_go=True, share=policy_config.prefill_share, admits=True)


def _is_overdue(policy_config: PolicyConfig, policy_input: PolicyInput) -> bool:
    return policy_config.max_decode_gap is not None and policy_input.waited >= policy_config.max_decode_gap


def policy_of(policy_config: PolicyConfig) -> Policy:
    """A new policy of the configured kind."""
    match policy_config.policy:
        case PolicyName.STALL_FREE:
            return StallFree(policy_config)
        case PolicyName.PREFILL_FIRST:
            return PrefillFirst(policy_config)
        case PolicyName.WATERMARK:
            return Watermark(policy_config)
        case PolicyName.DECODE_FIRST:
            return DecodeFirst(policy_config)
