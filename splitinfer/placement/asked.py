"""The purpose of a layout: its aim, the sequences that must fit, and the memory to leave free."""

from dataclasses import dataclass
from enum import StrEnum

from splitinfer.core.kv.budget import KV_SHARE
from splitinfer.core.serving_options import usual_token_budget
from splitinfer.machine.profile import Profiles

LONG_PROMPT = 4096  # tokens of the prompt for the time to the first token


class Aim(StrEnum):
    """The goal of a cut.

    CHAT: one reader: the seconds of a turn, from a prompt until the answer's last token.
    THROUGHPUT: the tokens per second of many streams together.
    CONTEXT: the longest context of one sequence; of those within 1 %, the quickest turn.
    """

    CHAT = "chat"
    THROUGHPUT = "throughput"
    CONTEXT = "context"


@dataclass(frozen=True, slots=True)
class Asked:
    """The requirements of a plan.

    context: tokens of a sequence, prompt and answer, that must fit.
    streams: sequences of that length that must fit for ``THROUGHPUT``; one for the other aims.
    prompt, answer: tokens of a turn of a chat.
    acceptance: the share of drafts that are right; None: no drafts.
    token_budget: the most tokens in a step; None: a coordinator's default.
    uses_all: whether every machine must get layers.
    spare_bytes: bytes to leave free on each machine.
    kv_share: the share of the bytes free beside the weights that KV may take; a coordinator takes half by default.
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

    def sequences(self, aim: Aim) -> int:
        """Return the number of sequences of ``context`` tokens that must fit."""
        return self.streams if aim is Aim.THROUGHPUT else 1

    def budget(self, profiles: Profiles) -> int:
        on_gpu = any(machine.launches_ahead for machine in profiles.machines)
        return self.token_budget or usual_token_budget(on_gpu=on_gpu)
