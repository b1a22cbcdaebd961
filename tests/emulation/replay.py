"""A drafter for measurements: it knows the model's answers, and is wrong at a given rate.

So acceptance is an option, and everything else is real: each draft token takes real computing on the coordinator's
processor, a given share of a step of the whole model.
"""

import time
from collections.abc import Iterator, Sequence
from functools import cache

import mlx.core as mx

from splitinfer.core import sequence as core
from splitinfer.core.rng import position_key
from splitinfer.core.speculation.speculation import Draft
from splitinfer.engine.device.device import Device, Ticket, round_of
from splitinfer.machine.selection import emulated_machine

_SIDE = 512  # of the square weights that are multiplied: 1 MB, as a layer of a small model has
_TRIED, _TRIES = 50, 8  # products that are timed, and how often; the shortest time counts
_FIFTY = 50


@cache
def _ranks(seed: int, fifty: int) -> list[int]:
    """Of fifty places of an answer, the order in which they become wrong with more and more errors."""
    keys = [position_key(seed, fifty * _FIFTY + place) for place in range(_FIFTY)]
    order = sorted(keys)
    return [order.index(key) for key in keys]


class Replay:
    """Draft tokens for the prompts whose answers it knows, none for others.

    ``error``: the probability that a draft token is wrong. The same share of every fifty positions are, so that short
    answers have the right acceptance, too. ``seconds``: the time of a draft token,
    spent on matrix products that took as long when they were timed.
    """

    name = "replay"

    def __init__(self, vocab_size: int) -> None:
        self.error, self.seconds = 0.0, 0.0
        self._vocab_size = vocab_size
        self._answers: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._errors: dict[tuple[int, ...], float] = {}
        self._weights: mx.array | None = None
        self._per_product = 0.0
        self._device: Device | None = None

    def know(self, prompt: Sequence[int], answer: Sequence[int], error: float | None = None) -> None:
        """Store the model's answer to a prompt, and how often its drafts are wrong, if not as all others'."""
        self._answers[tuple(prompt)] = tuple(answer)
        self._errors.pop(tuple(prompt), None)
        if error is not None:
            self._errors[tuple(prompt)] = error

    def use_device(self, device: Device) -> None:
        """Compute on a device from now on."""
        self._device = device

    def prepare(self, _seq: core.Sequence) -> bool:
        """Nothing has to be computed first."""
        return False

    def draft_together(self, seqs: Sequence[core.Sequence], counts: Sequence[int]) -> Iterator[list[Draft | None]]:
        """See ``Drafter``: the next tokens of known answers, each computed for, some replaced by wrong ones. A round
        takes as long as one draft: a small model reads its weights once for all rows. Where the device computes
        meanwhile, the next round is launched before a round is waited for, as a draft model's."""
        left = [self._rest(seq, count) for seq, count in zip(seqs, counts, strict=True)]

        def wanted(number: int) -> list[bool]:
            return [number < min(count, len(rest)) for count, rest in zip(counts, left, strict=True)]

        under_way = self._begin(sum(wanted(0)))
        for number in range(max(counts, default=0)):
            following = self._begin(sum(wanted(number + 1)))
            if not any(now := wanted(number)):
                return
            seconds = self._finish(under_way)
            each, under_way = None if seconds is None else seconds / sum(now), following
            yield [Draft(rest[number], seconds=each) if on else None for on, rest in zip(now, left, strict=True)]

    def _rest(self, seq: core.Sequence, count: int) -> list[int]:
        """Up to ``count`` drafts for what is left of the known answer, some replaced by wrong ones."""
        prompt = tuple(seq.tokens[: seq.num_prompt_tokens])
        answer, error = self._answers.get(prompt, ()), self._errors.get(prompt, self.error)
        first = seq.num_streamed - seq.num_prompt_tokens
        seed = sum(prompt) if prompt in self._errors else 0

        def is_wrong(place: int) -> bool:
            return _ranks(seed, place // _FIFTY)[place % _FIFTY] < round(error * _FIFTY)

        places = range(first, min(first + count, len(answer)))
        return [(answer[place] + is_wrong(place)) % self._vocab_size for place in places]

    def forget(self, _seq_id: int) -> None:
        """Nothing is stored for a request."""

    def _begin(self, sequences: int) -> Ticket | None:
        """Launch a round on an emulated accelerator, where it takes a round's seconds."""
        if not sequences or self._device is None or emulated_machine() is None:
            return None
        return self._device.launch((mx.zeros((1,)),), (), round_of(sequences), time.monotonic())

    def _finish(self, under_way: Ticket | None) -> float | None:
        """Wait for a round, and return its seconds; elsewhere compute products of ``seconds``."""
        if under_way is not None and self._device is not None:
            span = self._device.wait(under_way)
            return span.ended - span.started
        if self._weights is None:
            self._weights = mx.random.normal((_SIDE, _SIDE), key=mx.random.key(0))
            self._per_product = min(self._products(_TRIED) for _ in range(_TRIES)) / _TRIED
        self._products(max(1, round(self.seconds / self._per_product)))
        return None

    def _products(self, count: int) -> float:
        """Compute products, and return their seconds."""
        assert self._weights is not None
        began, x = time.perf_counter(), mx.ones((1, _SIDE))
        for _ in range(count):
            x = mx.tanh(x @ self._weights)
        mx.eval(x)
        return time.perf_counter() - began
