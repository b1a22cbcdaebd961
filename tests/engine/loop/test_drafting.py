"""Drafts are made in rounds for all sequences that may have some; who has not been read yet is read between steps."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from engine.door import Guesses, Open, ask, some_wrong, streams_of
from tiny import Folder

from splitinfer import Flight
from splitinfer.core.speculation.speculation import Draft

SEVERAL = [ask(9 + i, prompt=i, temperature=0.7 * (i % 2), max_tokens=20) for i in range(3)]


class Reading(Guesses):
    """Reads each prompt in so many parts. ``rounds``: how many sequences had a draft in each."""

    def __init__(self, parts: int, *args: Any) -> None:
        super().__init__(*args)
        self._parts, self._unread = parts, dict[int, int]()
        self.rounds, self.forgotten = list[int](), set[int]()

    def prepare(self, seq: Any) -> bool:
        time.sleep(0.001)  # so that idle moments are too short for all of it
        left = self._unread.setdefault(seq.seq_id, self._parts)
        self._unread[seq.seq_id] = max(0, left - 1)
        return left > 0

    def draft_together(self, seqs: Sequence[Any], counts: Sequence[int]) -> Iterator[list[Draft | None]]:
        assert not any(self._unread.get(seq.seq_id, self._parts) for seq in seqs), "it was not read to its end"
        for found in super().draft_together(seqs, counts):
            self.rounds.append(sum(draft is not None for draft in found))
            yield found

    def forget(self, seq_id: int) -> None:
        self.forgotten.add(seq_id)


def right(token: int, _place: int) -> int:
    return token


def wrong(token: int, _place: int) -> int:
    return (token + 1) % 100


@pytest.mark.parametrize(
    ("parts", "flight", "guess", "options"),
    [
        (0, Flight(4), right, {"micro_batches": 1}),
        (8, Flight(2), some_wrong, {"micro_batches": 1}),
        (2, Flight(2, 9, 2), wrong, {"micro_batches": 2}),  # a block is void while the one behind it is drafted
        pytest.param(3, Flight(2, 3, 3), some_wrong, {"micro_batches": 3}, marks=pytest.mark.nightly),
        pytest.param(1, None, some_wrong, {}, marks=pytest.mark.nightly),
    ],
)
def test_rounds(
    parts: int,
    flight: Flight | None,
    guess: Callable[[int, int], int],
    options: dict[str, Any],
    pipeline: Open,
    tiny_folder: Folder,
) -> None:
    made = Reading(parts, streams_of(tiny_folder("llama"), SEVERAL), guess)
    with pipeline("llama", [2, 2], drafter=lambda: made, flight=flight, **options) as there:
        outputs = there.outputs(*SEVERAL)
        alone = there.outputs(SEVERAL[0])[0]
        assert there.stats["speculation"]["sent"] > 0
    assert len(made.forgotten) == 4, "whoever has ended"
    assert max(made.rounds) > 1 or options.get("micro_batches") != 1
    tried, accepted = (sum(getattr(each, name) for each in [*outputs, alone]) for name in
                       ("num_tried_drafts", "num_right_drafts"))  # fmt: skip
    assert accepted > (0.8 * tried if guess is right else -1)
    assert guess is right or accepted < tried
    assert guess is not wrong or accepted == 0
