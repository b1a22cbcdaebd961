"""Answers under way: who ended them decides what their clients are told, and what is known of them afterwards."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from splitinfer.engine.loop.requests import RequestOutput, StreamEvent
from splitinfer.server.answer import Answer, Choice, Piece
from splitinfer.text.conversations import TextCodec

CODEC = TextCodec(lambda text: [ord(letter) for letter in text], lambda ids: "".join(map(chr, ids)))
END = ord("$")


class Asked:
    """A request with the events that are given, which counts how often it is aborted."""

    prompt = (1, 2, 3)
    output = RequestOutput(3)

    def __init__(self, *events: StreamEvent) -> None:
        self.events, self.num_aborts = events, 0

    async def batches(self) -> AsyncGenerator[list[StreamEvent], None]:
        for event in self.events:
            yield [event]

    def abort(self) -> None:
        self.num_aborts += 1


def event(text: str, reason: str | None = None, error: str | None = None) -> StreamEvent:
    return StreamEvent((1,), text, 0.0, reason, error=error)


def pieces_of(*requests: Asked, cancels: bool = False, failure: str | None = None) -> list[Piece]:
    choices = [Choice(i, each) for i, each in enumerate(requests)]
    answer = Answer(len(requests), lambda: failure, choices)

    async def read() -> list[Piece]:
        if cancels:
            answer.cancel()
        return [piece async for batch in answer.batches() for piece in batch]

    return asyncio.run(read())


@pytest.mark.parametrize("num_choices", [1, 2])
def test_what_the_server_cuts_short_has_failed_and_what_the_client_ends_has_not(num_choices: int):
    cut = [Asked(event("a"), event("", "abort")) for _ in range(num_choices)]
    last = [piece for piece in pieces_of(*cut) if piece.finish_reason is not None]
    assert {piece.finish_reason for piece in last} == {"error"}
    assert all(piece.error and "shut down" in piece.error for piece in last)
    last = [piece for piece in pieces_of(*cut, cancels=True) if piece.finish_reason is not None]
    assert [(piece.finish_reason, piece.error) for piece in last] == [("abort", None)] * num_choices


def test_other_ends_are_told_as_they_are():
    for reason, error in (("stop", None), ("length", None), ("error", "lost"), ("abort", "it timed out")):
        asked = Asked(event("a", reason, error))
        (piece,) = pieces_of(asked)
        assert (piece.finish_reason, piece.error) == (reason, error)
        assert asked.num_aborts == 1, "whatever the end, nothing goes on behind it"


def test_the_end_of_the_pipeline_is_told_without_addresses(caplog: pytest.LogCaptureFixture):
    lost, own = "worker mini (10.0.0.2:5000) is gone", "12 tokens need 1 GB of KV on stage mini"
    for said, error, told in (
        ("stage mini was lost and did not come back", lost, "stage mini was lost and did not come back"),
        (None, own, own),
    ):
        for cancels in (False, True):
            (piece,) = pieces_of(Asked(event("a", "error", error)), cancels=cancels, failure=said)
            assert (piece.finish_reason, piece.error) == ("error", told)
    assert caplog.text.count(lost) == 2, "the log has the rest"
    assert own not in caplog.text
    (whole,) = pieces_of(Asked(event("a", "stop")), failure="the pipeline has failed")
    assert (whole.finish_reason, whole.error) == ("stop", None)
