"""Answers under way: who ended them decides what their clients are told."""

import asyncio
from collections.abc import AsyncGenerator
from typing import cast

import pytest

from splitinfer.engine.coordinator.requests import StreamEvent
from splitinfer.llm.async_request import AsyncRequest
from splitinfer.server.answer import ChoiceReader, Piece, PlainText
from splitinfer.server.reading import Answer


class Asked:
    """A request with the events that are given, which counts how often it is aborted."""

    def __init__(self, *events: StreamEvent) -> None:
        self.events, self.num_aborts = events, 0

    async def __aiter__(self) -> AsyncGenerator[StreamEvent, None]:
        for event in self.events:
            yield event

    def abort(self) -> None:
        self.num_aborts += 1


def event(text: str, reason: str | None = None, error: str | None = None) -> StreamEvent:
    return StreamEvent((1,), text, 0.0, reason, error=error)


def pieces_of(*requests: Asked, cancels: bool = False) -> list[Piece]:
    readers = [ChoiceReader(i, PlainText()) for i in range(len(requests))]
    answer = Answer([cast(AsyncRequest, each) for each in requests], readers, len(requests))

    async def read() -> list[Piece]:
        if cancels:
            answer.cancel()
        return [piece async for piece in answer.pieces()]

    return asyncio.run(read())


@pytest.mark.parametrize("num_choices", [1, 2])
def test_what_the_server_cuts_short_has_failed_and_what_the_client_ends_has_not(num_choices: int):
    cut = [Asked(event("a"), event("", "abort")) for _ in range(num_choices)]
    last = [piece for piece in pieces_of(*cut) if piece.finish_reason is not None]
    assert {piece.finish_reason for piece in last} == {"error"}
    assert all(piece.error and "told to end" in piece.error for piece in last)
    last = [piece for piece in pieces_of(*cut, cancels=True) if piece.finish_reason is not None]
    assert [(piece.finish_reason, piece.error) for piece in last] == [("abort", None)] * num_choices


def test_other_ends_are_told_as_they_are():
    for reason, error in (("stop", None), ("length", None), ("error", "lost"), ("abort", "its time was over")):
        asked = Asked(event("a", reason, error))
        (piece,) = pieces_of(asked)
        assert (piece.finish_reason, piece.error) == (reason, error)
        assert asked.num_aborts == 1, "whatever the end, nothing goes on behind it"
