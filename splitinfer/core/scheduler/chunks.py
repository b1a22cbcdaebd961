"""How many prompt tokens a step computes beside decodes.

A step has room for a bounded number of tokens, and decodes take theirs first. An objective for the time between tokens
bounds the rest by the cost of steps (``core.costs``). The steps of a round get equal shares, because a shorter step
after a long one would wait for it (``core.scheduler.microbatches``).
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from splitinfer.core.costs.model import CostModel, most_rows, quickest_size
from splitinfer.core.costs.shape import Shape
from splitinfer.core.scheduler.config import SchedulerConfig
from splitinfer.core.scheduler.microbatches import MicroBatches, even_share
from splitinfer.core.scheduler.policy import PolicyDecision
from splitinfer.core.sequence import Sequence

LEAST_CHUNK = 8  # prompt tokens in a step, whatever the options say; otherwise a prompt might never be read

PromptFrom = tuple[Sequence, int]  # with the position of the first token to compute


@dataclass(frozen=True, slots=True)
class Share:
    """The prompt ``tokens`` for this step, and how many further steps of the round (``to_come``) get as many."""

    tokens: int = 0
    to_come: int = 0


@dataclass(slots=True)
class ChunkSizes:
    """Decides the prompt tokens of each step. ``share``: the last step's; without one, the next step begins another
    round. ``num_in_row``: consecutive steps with prompts."""

    costs: CostModel
    batches: MicroBatches
    share: Share = Share()
    num_in_row: int = 0

    def note(self, share: Share, *, has_chunks: bool) -> None:
        """Note that a step with slices was planned."""
        self.share = share
        self.num_in_row = self.num_in_row + 1 if has_chunks else 0

    def room(
        self,
        config: SchedulerConfig,
        rules: PolicyDecision,
        going: Seq[Sequence],
        prompts: Seq[PromptFrom],
        num_decoding: int,
        *,
        begins: bool,
    ) -> tuple[int, Share]:
        """Return how many tokens of ``prompts`` a step may contain beside the decodes ``going``, and its share.
        ``begins``: whether one of the prompts was just admitted."""
        most = self._beside(config, rules, going, prompts[0][1], num_decoding)
        # The largest group determines how many tokens each step of the round has left.
        others = max(config.token_budget - self.batches.largest, config.min_chunk) if rules.decodes_go else most
        share = self._share(config, prompts, min(most, others), begins=begins)
        return min(most, max(share.tokens, config.min_chunk if len(self.batches) else 0)), share

    def _beside(
        self, config: SchedulerConfig, rules: PolicyDecision, going: Seq[Sequence], start: int, num_decoding: int
    ) -> int:
        """Return the room for prompt tokens beside the decodes. ``start``: the first prompt's next position."""
        rows = [seq.num_rows + len(seq.drafts.waiting) for seq in going]
        room = config.token_budget - sum(rows)
        objective = config.policy_config.itl_slo
        if rules.share < 1:
            room = min(room, max(int(rules.share * room), LEAST_CHUNK))
        if objective is None or not rules.decodes_go or not num_decoding:
            return room
        decodes = Shape()
        for seq, count in zip(going, rows, strict=True):
            decodes = decodes.plus(seq.num_scheduled, count)
        groups = config.num_groups
        if self.num_in_row < groups:
            # After short steps, decodes wait for one more long step than there are groups.
            objective *= groups / (groups + 1)
        return min(room, most_rows(self.costs, decodes, start, room, groups, objective))

    def _share(self, config: SchedulerConfig, prompts: Seq[PromptFrom], most: int, *, begins: bool) -> Share:
        """Return this step's share. It stays for a round, or for a prompt while no sequence decodes, so that the steps
        are equal. An admission begins a new share."""
        if self.share.to_come and not begins:
            return Share(self.share.tokens, self.share.to_come - 1)
        rounds, most = len(self.batches) > 0, max(most, 1)
        remaining = sum(len(seq.tokens) - start for seq, start in prompts)
        share = even_share(remaining, most, config.num_groups, rounds=rounds, least=config.min_chunk)
        if not rounds and not config.blocks.whole_blocks:
            share = quickest_size(self.costs, prompts[0][1], remaining, most, share)
        steps = config.num_groups if rounds else -(-remaining // max(share, 1))
        return Share(share, max(steps - 1, 0))
