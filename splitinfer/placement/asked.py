"""What a layout is for: the aim, what has to fit, and what is left free."""

from dataclasses import dataclass
from enum import StrEnum

from splitinfer.core.kv.budget import KV_SHARE
from splitinfer.machine.profile import Profiles

LONG_PROMPT = 4096  # tokens; the prompt whose time to the first token is told
_GPU_BUDGET, _CPU_BUDGET = 512, 128  # tokens in a step (``llm.setup``)


class Aim(StrEnum):
    """What a cut may be best for.

    CHAT: one reader: the seconds of a turn, from a prompt until the answer's last token.
    THROUGHPUT: the tokens per second of many streams together.
    CONTEXT: the longest context of one sequence; of those within 1 %, the quickest turn.
    """

    CHAT = "chat"
    THROUGHPUT = "throughput"
    CONTEXT = "context"


@dataclass(frozen=True, slots=True)
class Asked:
    """What a plan has to meet.

    context: tokens of a sequence, prompt and answer, that have to fit.
    streams: sequences of that length that have to fit for ``THROUGHPUT``; one for the others.
    prompt, answer: tokens of a turn of a chat.
    acceptance: the share of drafts that are right; ``None``: no drafts.
    token_budget: tokens in a step, at most; ``None``: as a coordinator has it.
    uses_all: whether every machine has to get layers.
    spare_bytes: left free on each machine, beside what a stage needs.
    kv_share: the share of what is free beside the weights that KV may take; a coordinator takes half by default.
    simulated: cuts that are simulated for each aim, the best by formula.

    Raises:
        ValueError: a number is out of its range.
    """

    context: int = 8192
    streams: int = 8
    prompt: int = 1024
    answer: int = 512
    acceptance: float | None = None
    token_budget: int | None = None
    uses_all: bool = False
    spare_bytes: int = 0
    kv_share: float = KV_SHARE
    simulated: int = 20

    def __post_init__(self) -> None:
        for name in ("context", "streams", "prompt", "simulated"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, but is {getattr(self, name)}")
        if self.answer < 2:
            raise ValueError(f"an answer has two tokens or more, not {self.answer}")
        if not 0 < self.kv_share <= 1:
            raise ValueError(f"KV takes a share of the memory from 0 to 1, not {self.kv_share}")
        if self.acceptance is not None and not 0 <= self.acceptance <= 1:
            raise ValueError(f"the share of drafts that are right is from 0 to 1, not {self.acceptance}")
        if self.spare_bytes < 0 or (self.token_budget is not None and self.token_budget < 1):
            raise ValueError("what is left free is not negative, and a step has at least one token")

    def sequences(self, aim: Aim) -> int:
        """The sequences of ``context`` tokens that have to fit."""
        return self.streams if aim is Aim.THROUGHPUT else 1

    def budget(self, profiles: Profiles) -> int:
        """Tokens in a step, at most."""
        on_gpu = any(machine.launches_ahead for machine in profiles.machines)
        return self.token_budget or (_GPU_BUDGET if on_gpu else _CPU_BUDGET)
