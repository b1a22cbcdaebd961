"""How much each key may ask: requests at a time, and a minute. Pure: the caller has the clock.

The rate is a token bucket: a key that may make 5 requests a minute may make 5 at once, and then one each 12 s. A
refusal says when the next request would be taken, and costs nothing.
"""

from dataclasses import dataclass, field

from splitinfer.server.keys import ApiKey
from splitinfer.server.problem import Problem


@dataclass(slots=True)
class _Account:
    running: int = 0
    tokens: float | None = None  # requests that may be made at once; None: none was made yet
    at: float = 0.0  # seconds, when ``tokens`` was right


@dataclass(slots=True)
class Rates:
    """The accounts of all keys. ``begin`` for each request, and ``end`` when it is over, however that was."""

    _accounts: dict[str, _Account] = field(default_factory=dict)  # by the key's name

    def begin(self, key: ApiKey, now: float, num_answers: int = 1) -> None:
        """Count a request that begins. ``now``: seconds of any steady clock. ``num_answers``: that it asks for, all at
        once; each takes a place.

        Raises:
            Problem: 429, as the key has too many under way or asks too often; 400, as it may never have so many.
        """
        account = self._accounts.setdefault(key.name, _Account())
        if key.concurrent is not None:
            _check_places(key, account.running, num_answers, key.concurrent)
        self._take_token(account, key, now)
        account.running += num_answers

    def end(self, key: ApiKey, num_answers: int = 1) -> None:
        """A request that had begun is over."""
        self._accounts[key.name].running -= num_answers

    def take_back(self, key: ApiKey, num_answers: int = 1) -> None:
        """A request that has just begun is not carried out, and costs nothing."""
        account = self._accounts[key.name]
        account.running -= num_answers
        if account.tokens is not None:
            account.tokens += 1.0

    def _take_token(self, account: _Account, key: ApiKey, now: float) -> None:
        if key.requests_per_minute is None:
            return
        each, most = 60.0 / key.requests_per_minute, max(1.0, key.requests_per_minute)
        held = most if account.tokens is None else min(most, account.tokens + (now - account.at) / each)
        account.tokens, account.at = held, now
        wait = (1.0 - held) * each
        if wait > 0:
            raise Problem(
                429,
                f"key {key.name!r} may make {key.requests_per_minute:g} a minute; the next one in {wait:.0f} s",
                code="rate_limit_exceeded",
                retry_after=wait,
            )
        account.tokens = held - 1.0


def _check_places(key: ApiKey, running: int, wanted: int, most: int) -> None:
    if wanted > most:
        raise Problem(400, f"{wanted} answers are asked for at once, and key {key.name!r} may have {most}")
    if running + wanted > most:
        raise Problem(
            429,
            f"key {key.name!r} has {running} answers under way, and may have {most}",
            code="concurrency_exceeded",
            retry_after=1.0,
        )
