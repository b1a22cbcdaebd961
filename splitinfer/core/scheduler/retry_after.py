"""When the full queue has room again: the time that a rejected client is told to wait.

A place becomes free when a running request ends. Nobody knows when. But if answers had m tokens on average so far, a
request ends with its next token with probability 1/m. So the requests that run together end at

    rate = sum of 1 / min(mean answer, tokens that it may still have)      per round of one token each

Such a round takes a cycle, which the cost model predicts (`core.costs`). The request that gets the place has a prompt
that must be read in the same steps:

    seconds a place = cycle / rate + mean prompt * seconds a prompt's token

The n-th rejected client is told the time of n places. If all were told the same time, all would come back at once, for
one place.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from splitinfer.core.costs.model import CostModel
from splitinfer.core.costs.shape import Shape
from splitinfer.core.scheduler.config import SchedulerConfig
from splitinfer.core.sequence import Sequence

LEAST, MOST = 1.0, 60.0  # seconds; the official clients of OpenAI's API wait at most two minutes


@dataclass(frozen=True, slots=True)
class UsualRequest:
    """The mean tokens of the requests so far: of an ``answer``, and of a ``prompt`` without its cached tokens. 0: no
    request has ended yet."""

    answer: float = 0.0
    prompt: float = 0.0


def seconds_until_room(
    running: Seq[Sequence], config: SchedulerConfig, costs: CostModel, usual: UsualRequest, nth: int = 1
) -> float:
    """Return the seconds until ``nth`` places are free, between ``LEAST`` and ``MOST``."""
    rate = sum(1.0 / _tokens_to_go(seq, config, usual) for seq in running)
    if not rate:
        return LEAST
    rows = -(-len(running) // config.num_groups)
    position = sum(len(seq.tokens) for seq in running) // len(running)
    cycle = costs.cycle(Shape(rows, rows * (position + 1)), min(config.num_groups, len(running)))
    reading = usual.prompt * costs.slowest(Shape().plus(0, config.token_budget)) / config.token_budget
    return min(max(LEAST, nth * (cycle / rate + reading)), MOST)


def _tokens_to_go(seq: Sequence, config: SchedulerConfig, usual: UsualRequest) -> float:
    """Return the expected tokens until a sequence ends."""
    most = max(1, config.longest(seq) - len(seq.tokens))
    return min(max(1.0, usual.answer), most) if usual.answer else most
