"""What all routes share: the engine, who may ask, and the answers under way."""

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from splitinfer.llm import LLM
from splitinfer.server.gate import Gate
from splitinfer.server.health import layout_summary
from splitinfer.server.keys import ApiKey
from splitinfer.server.problem import Problem
from splitinfer.server.rates import Rates
from splitinfer.server.reading import Answer
from splitinfer.server.sessions import Sessions
from splitinfer.text.conversations import Conversations

MAX_RUNNING = 1024  # requests at a time, waiting ones included


@dataclass(slots=True)
class Service:
    """One server. All methods are called on its event loop; ``is_draining`` may be set by any thread.

    model: the name under which the model is offered.
    logs_prompts: whether what is asked is written to the log.
    """

    llm: LLM
    model: str
    gate: Gate = field(default_factory=Gate)
    max_running: int = MAX_RUNNING
    sessions: Sessions = field(default_factory=Sessions)
    rates: Rates = field(default_factory=Rates)
    started: int = field(default_factory=lambda: int(time.time()))
    is_draining: bool = False
    logs_prompts: bool = False
    conversations: Conversations = field(default_factory=Conversations)
    _answers: dict[str, tuple[ApiKey, Answer]] = field(default_factory=dict)  # by request id
    _num_running: int = 0

    @property
    def num_running(self) -> int:
        """Requests under way."""
        return self._num_running

    @contextmanager
    def admitted(self, key: ApiKey) -> Iterator[None]:
        """Count a request while it is carried out.

        Raises:
            Problem: 429 or 503, with the time after which to try again.
        """
        if self.is_draining:
            raise Problem(503, "the server was told to end, and takes no new request", retry_after=10.0)
        if self._num_running >= self.max_running:
            raise Problem(
                429,
                f"{self._num_running} requests are under way, and no more may be",
                code="queue_full",
                retry_after=1.0,
            )
        self.rates.begin(key, time.monotonic())
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
            self.rates.end(key)

    def register(self, request_id: str, key: ApiKey, answer: Answer) -> None:
        """An answer is under way, and may be cancelled by its id."""
        self._answers[request_id] = (key, answer)

    def forget(self, request_id: str) -> None:
        """An answer is over."""
        if (found := self._answers.pop(request_id, None)) is not None:
            found[1].abort()  # does nothing to one that has ended

    def cancel(self, request_id: str, key: ApiKey) -> bool:
        """End one of the key's own answers; false if it has none under way with this id."""
        found = self._answers.get(request_id)
        if found is None or found[0].name != key.name:
            return False
        found[1].abort()
        return True

    def describe_model(self) -> dict[str, Any]:
        """The model as ``/v1/models`` lists it."""
        return {
            "id": self.model,
            "object": "model",
            "created": self.started,
            "owned_by": "splitinfer",
            "context_length": self.llm.context_length,
            "max_model_len": self.llm.context_length,
            "layout": layout_summary(self.llm.layout),
        }


def new_request_id() -> str:
    """An id that nobody can guess."""
    return f"req_{secrets.token_hex(12)}"
