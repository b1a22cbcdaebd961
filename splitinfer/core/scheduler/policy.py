"""When prompts are read and when answers continue: the trade between the first token and a steady stream.

Each answer under way (a decode) needs one token of a step; prompts take any number. Whichever goes first makes the
other wait. A policy decides for each step whether its group's decodes go, how much of the room prompts may take, and
whether waiting requests may be admitted.

    policy          decodes go                   prompts get                        effect on latency
    stall_free      always                       the rest, times prefill_share      ITL bounded by one step a stage
    prefill_first   when no prompt can be read   the whole step                     least TTFT; ITL as long as prompts
    watermark       like prefill_first until memory is full to kv_high, then        many sequences decode at once
                    like decode_first down to kv_low
    decode_first    always                       the rest; no request is admitted   least ITL; TTFT as long as answers
                                                 while sequences decode

``stall_free`` is Sarathi-Serve's schedule (Agrawal et al., arXiv 2403.02310), ``decode_first`` FasterTransformer's
request-level batching, ``prefill_first`` vLLM's original schedule. If a policy keeps a decode waiting for
``max_decode_gap``, the decode goes anyway.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

LEAST_SHARE = 0.01  # of a step's room; with less, a prompt might never be read


class PolicyName(StrEnum):
    """The policies' public names."""

    STALL_FREE = "stall_free"
    PREFILL_FIRST = "prefill_first"
    WATERMARK = "watermark"
    DECODE_FIRST = "decode_first"


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """The policy and its options; each policy uses some. ``core.serving_options`` declares and bounds them.

    prefill_share: the share of the room left by decodes that prompts get while sequences decode.
    itl_slo: the most seconds between two tokens of an answer; ``None``: only the token budget bounds steps.
    max_partial_prefills: prompts that are read side by side.
    max_decode_gap: seconds for which a policy may keep a decode waiting; ``None``: no bound.
    kv_high, kv_low: shares of the KV memory at which ``watermark`` begins to drain, and to fill again.
    min_dwell: the least steps for which ``watermark`` fills or drains.

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


class PolicyDecision(NamedTuple):
    """The rules for one step.

    decodes_go: whether it contains its group's decodes.
    share: the share of its room that prompts may take.
    admits: whether waiting requests may be admitted.
    """

    decodes_go: bool
    share: float
    admits: bool


_EVERYTHING = PolicyDecision(decodes_go=True, share=1.0, admits=True)  # if no decode could be delayed
_PROMPTS = PolicyDecision(decodes_go=False, share=1.0, admits=True)


@dataclass(slots=True)
class Policy:
    """Decides what steps may do. ``decide`` changes nothing; ``scheduled`` updates the state of ``watermark``.

    ``watermark`` either *drains* the memory or fills it. It switches at ``kv_high`` and ``kv_low``, and stays for at
    least ``min_dwell`` steps; otherwise it would switch at every step near a mark. While no sequence decodes, it cannot
    drain.
    """

    config: PolicyConfig
    drains: bool = False
    _steps: int = 0  # since it switched

    def decide(self, num_decoding: int, waited: float = 0.0) -> PolicyDecision:
        """Return what a group's next step may do while ``num_decoding`` sequences decode in all groups. ``waited``: the
        longest time, in seconds, that a member of the group has waited for a token."""
        config = self.config
        if not num_decoding:
            return _EVERYTHING
        if self.drains or config.policy is PolicyName.DECODE_FIRST:
            return PolicyDecision(decodes_go=True, share=config.prefill_share, admits=False)
        is_overdue = config.max_decode_gap is not None and waited >= config.max_decode_gap
        if is_overdue or config.policy is PolicyName.STALL_FREE:
            return PolicyDecision(decodes_go=True, share=config.prefill_share, admits=True)
        return _PROMPTS

    def scheduled(self, num_decoding: int, kv_share: float) -> None:
        """Note that a step with slices was planned. ``kv_share``: the share of KV memory that running sequences use on
        the fullest stage."""
        config = self.config
        if config.policy is not PolicyName.WATERMARK:
            return
        self._steps += 1
        drains = self.drains and num_decoding > 0
        if num_decoding and self._steps >= config.min_dwell:
            drains = kv_share > config.kv_low if self.drains else kv_share >= config.kv_high
        if drains != self.drains:
            self.drains, self._steps = drains, 0


_LONG, _SHORT_CHUNK = 32 * 1024, 128  # tokens


def longest_chunk(start: int, token_budget: int) -> int:
    """Return the most prompt tokens that a step may read after ``start`` tokens.

    Metal attends to all keys in one command, and macOS ends a process if the GPU takes seconds for one command: seen
    from 65k keys on, with chunks of 2,048 (mlx, issue 3302). So beyond 32k tokens chunks shorten as the keys grow.

    >>> [longest_chunk(start, 512) for start in (0, 32_768, 65_536, 1_000_000)], longest_chunk(10**6, 16)
    ([512, 512, 256, 128], 16)
    """
    return min(token_budget, max(_SHORT_CHUNK, token_budget * _LONG // max(start, _LONG)))
