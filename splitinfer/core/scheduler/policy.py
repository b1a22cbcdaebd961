"""When prompts are read and when answers go on: the trade between the first token and a steady stream.

Answers under way (decodes) need one token of a step each, prompts take any number, and what goes first makes the other
wait. A policy decides for each step whether the decodes of its group go, how much of the room prompts may take, and
whether waiting requests may be admitted.

    policy          decodes go                   prompts get                        effect on latency
    stall_free      always                       what is left, times prefill_share  ITL bounded by one step a stage
    prefill_first   when no prompt can be read   the whole step                     least TTFT; ITL as long as prompts
    watermark       like prefill_first until memory is full to kv_high, then        many sequences decode at once
                    like decode_first down to kv_low
    decode_first    always                       what is left, but none is admitted least ITL; TTFT as long as answers
                                                 while sequences decode

``stall_free`` is Sarathi-Serve's schedule (Agrawal et al., arXiv 2403.02310), ``decode_first`` FasterTransformer's
request-level batching, ``prefill_first`` vLLM's original schedule. A policy that keeps decodes waiting is overruled
when one has waited for ``max_decode_gap``.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

LEAST_SHARE = 0.01  # of a step's room; with less a prompt would never be read


class PolicyName(StrEnum):
    """The policies' public names."""

    STALL_FREE = "stall_free"
    PREFILL_FIRST = "prefill_first"
    WATERMARK = "watermark"
    DECODE_FIRST = "decode_first"


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """The policy and its options, of which each policy uses some. ``core.serving_options`` declares and bounds them.

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


@dataclass(slots=True)
class Policy:
    """Decides what steps may do. ``decide`` changes nothing; ``scheduled`` updates what ``watermark`` goes by.

    ``watermark`` *drains* the memory or fills it. It changes sides at ``kv_high`` and ``kv_low``, and stays for
    ``min_dwell`` steps at least; else it would change at every step near a mark. Where no sequence decodes, there is
    nothing to drain.
    """

    config: PolicyConfig
    drains: bool = False
    _steps: int = 0  # since it changed sides

    def decide(self, num_decoding: int, waited: float = 0.0) -> PolicyDecision:
        """Return what the next step of a group may do while ``num_decoding`` sequences decode in all groups.
        ``waited``: the longest time since the last token of one of the group's members, in seconds."""
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
        """Take note that a step with slices was planned, while running sequences use ``kv_share`` of the KV memory of
        the stage that is fullest."""
        config = self.config
        if config.policy is not PolicyName.WATERMARK:
            return
        self._steps += 1
        if not num_decoding:
            self._change_to(drains=False)
        elif self._steps >= config.min_dwell:
            self._change_to(drains=kv_share > config.kv_low if self.drains else kv_share >= config.kv_high)

    def _change_to(self, *, drains: bool) -> None:
        if drains != self.drains:
            self.drains, self._steps = drains, 0


_LONG, _SHORT_CHUNK = 32 * 1024, 128  # tokens


def longest_chunk(start: int, token_budget: int) -> int:
    """Return the tokens of a prompt that a step reads behind ``start`` tokens, at most.

    Metal attends to all keys in one command, and macOS ends a process whose GPU computes one command for seconds: seen
    from 65k keys on, with chunks of 2,048 (mlx, issue 3302). So behind 32k tokens chunks shorten as the keys grow.

    >>> [longest_chunk(start, 512) for start in (0, 32_768, 65_536, 1_000_000)], longest_chunk(10**6, 16)
    ([512, 512, 256, 128], 16)
    """
    return min(token_budget, max(_SHORT_CHUNK, token_budget * _LONG // max(start, _LONG)))
