"""The common state of all routes: the engine, the access rules, the answers under way; and a route that refuses other
methods."""

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Send
from starlette.types import Scope as ServerScope

from splitinfer.errors import QueueFull
from splitinfer.llm import LLM
from splitinfer.server.answer import Answer
from splitinfer.server.ask import in_force
from splitinfer.server.gate import Gate, Sessions
from splitinfer.server.health import Offer
from splitinfer.server.keys import ApiKey, Rates, Scope
from splitinfer.server.meters.http import HttpMeters
from splitinfer.server.problem import Problem, ending
from splitinfer.server.reading import Reader

_COUNTING = 64  # further requests, which only count tokens or are being tokenized
_LEAST_TIMES = 16  # different times, for clients that are turned away


@dataclass(slots=True)
class Service:
    """One server. All methods run on its event loop; any thread may set ``is_draining``.

    model: the name under which the model is offered.
    max_running: requests at a time, waiting ones included; ``None``: somewhat more than the engine runs and queues, so
        that the engine's own queue is full first.
    logs_prompts: whether to write prompts to the log.
    offers: the models that clients may name, this one first.
    loaded: the services of all models in memory.
    """

    llm: LLM
    model: str
    gate: Gate = field(default_factory=Gate)
    max_running: int | None = None
    sessions: Sessions = field(default_factory=Sessions)
    rates: Rates = field(default_factory=Rates)
    started: int = field(default_factory=lambda: int(time.time()))
    is_draining: bool = False
    num_running: int = 0  # requests under way
    logs_prompts: bool = False
    meters: HttpMeters = field(default_factory=HttpMeters)
    offers: Callable[[], list[Offer]] = list
    loaded: "Callable[[], list[Service]]" = list
    reader: Reader = field(init=False)
    _answers: dict[tuple[str, str], list[Answer]] = field(default_factory=dict)  # by names of keys and request ids
    _num_turned_away: int = 0  # since the engine took a request

    def __post_init__(self) -> None:
        self.reader = Reader(self.llm)
        if self.offers is list:
            self.offers = lambda: [self.offer()]
        if self.loaded is list:
            self.loaded = lambda: [self]

    def beside(self, llm: LLM, model: str) -> "Service":
        """Return the service of another model of the same server. Both share callers and counts of responses."""
        return replace(self, llm=llm, model=model, num_running=0, meters=HttpMeters(self.meters.responses))

    @property
    def fingerprint(self) -> str:
        """Identifies the computation: with the same fingerprint, the same seed gives the same answer. Each cut of a
        model has its own."""
        return f"fp_{self.llm.fingerprint}"

    def token_text(self, token: int) -> bytes:
        """Return the bytes of one token, which may be part of a character. Return no bytes without a tokenizer."""
        return self.llm.tokenizer.token_bytes(token) if self.llm.has_tokenizer else b""

    def caller(self, request: Request, scope: Scope = Scope.USE) -> ApiKey:
        """Return the key of the request's sender.

        Raises:
            Problem: as ``Gate.caller``.
        """
        return self.gate.caller(request.state.facts, self.sessions, scope)

    @contextmanager
    def admitted(self, key: ApiKey, num_answers: int = 1) -> Iterator[None]:
        """Count a request while it is carried out. If the engine's queue is full (``QueueFull``), the request costs its
        key nothing. ``num_answers``: the answers that it requests at once.

        Raises:
            Problem: 429 or 503, with the time after which to try again.
        """
        if self.is_draining:
            raise ending()
        # First: the limits of other keys are no concern of a key over its own.
        self.rates.begin(key, time.monotonic(), num_answers)
        try:
            if self.num_running >= self._most:
                raise QueueFull(f"{self.num_running:,} requests are under way, and no more may be")
            self.num_running += 1
            try:
                yield
            finally:
                self.num_running -= 1
        except QueueFull as error:
            self.rates.give_back(key)
            raise self._turned_away(f"{error}") from error
        finally:
            self.rates.end(key, num_answers)

    @property
    def _most(self) -> int:
        if self.max_running is not None:
            return self.max_running
        return self.llm.max_running + self.llm.settings.max_waiting + _COUNTING

    def _turned_away(self, why: str) -> Problem:
        """Return the problem for a request without room, with the time until there may be room. Each request gets a
        later time than the one before, up to the number of requests that run together. Then the times begin again, so
        that one client that asks without end does not delay all others."""
        nth = 1 + self._num_turned_away % max(_LEAST_TIMES, self.llm.max_running)
        self._num_turned_away += 1
        self.meters.turned_away += 1
        return Problem(429, why, code="queue_full", retry_after=self.llm.seconds_until_room(nth))

    def took_one(self) -> None:
        self._num_turned_away = 0

    @contextmanager
    def cancellable(self, request_id: str, key: ApiKey, answer: Answer) -> Iterator[None]:
        """Let the key cancel a request by its id while it is under way, and abort the request at the end if it has not
        ended. Several requests may have one id: if a client tries again, its second request may begin before the server
        notices that the first one was left."""
        under_way = self._answers.setdefault((key.name, request_id), [])
        under_way.append(answer)
        try:
            yield
        finally:
            under_way[:] = [other for other in under_way if other is not answer]
            if not under_way:
                self._answers.pop((key.name, request_id), None)
            answer.abort()  # does nothing to one that has ended

    def count(self, answer: Answer) -> None:
        """Count an answer that is over."""
        for numbers in answer.tokens_by_prompt:
            self.meters.answered(numbers)

    def cancel(self, request_id: str, key: ApiKey) -> bool:
        """End all requests of the key with this id. Return False if there was nothing to end."""
        found = self._answers.get((key.name, request_id), ())
        for answer in found:
            answer.cancel()
        return bool(found)

    def offer(self, rests_until: float | None = None) -> Offer:
        llm = self.llm
        thinks = {"enable_thinking": llm.tokenizer.thinks_by_default if llm.has_tokenizer else None}
        defaults = in_force(llm.recommended_sampling) | thinks
        return Offer(self.model, str(llm.layout.model), llm.context_length, llm.layout, rests_until, defaults)


def new_request_id() -> str:
    """Return an id that nobody can guess."""
    return f"req_{secrets.token_hex(12)}"


class ApiRoute(Route):
    async def handle(self, scope: ServerScope, receive: Receive, send: Send) -> None:
        """Carry out a request, whose ``scope["state"]`` gets the ``route``: its pattern.

        Raises:
            Problem: 405, the method is another.
        """
        if self.methods and scope["method"] not in self.methods:
            takes = tuple(sorted(self.methods))
            sentence = f"{scope['path']:.80} takes {' and '.join(takes)}, not {scope['method']:.20}"
            raise Problem(405, sentence, allow=takes)
        scope.setdefault("state", {})["route"] = self.path
        await self.app(scope, receive, send)
