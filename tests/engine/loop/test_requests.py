"""What a reader sees of a request: text over token borders, stop strings, ends, times."""

import pytest

from splitinfer.core.plan import SampledToken
from splitinfer.core.sequence import FinishReason, SamplingParams, Sequence
from splitinfer.engine.loop.requests import RequestOutput, RequestState, StreamEvent, TokenLogprobs

END = 99  # has no text


class Letters:
    """Token n is the n-th of some pieces; a piece before ``|`` is certain only with the next token."""

    def __init__(self, *pieces: str) -> None:
        self._pieces = pieces
        self._kept = ""
        self.added: list[int] = []

    def add(self, token_id: int) -> str:
        self.added.append(token_id)
        certain, _, kept = self._pieces[token_id].partition("|")
        text, self._kept = self._kept + certain, kept
        return text

    def flush(self, *, is_cut: bool) -> str:
        text, self._kept = self._kept, ""
        return text.strip("%") if is_cut else text  # a percent sign: half a character


class Reader:
    """A request and everything its reader has got. ``now``: seconds, which pass when told to."""

    def __init__(self, *pieces: str, stop: tuple[str, ...] = ()) -> None:
        self.now = 100.0
        self.letters = Letters(*pieces)
        sequence = Sequence(3, [1, 2], SamplingParams(stop=stop), 0, frozenset({END}))
        self.state = RequestState(sequence, self.letters if pieces else None, lambda: self.now)
        self.output = RequestOutput(2)
        self.events: list[StreamEvent] = []

    def take(self, token_id: int, reason: FinishReason | None = None, **logprobs: object) -> FinishReason | None:
        self.now += 0.5
        came, reason = self.state.take(SampledToken(token_id, **logprobs), reason)  # type: ignore[arg-type]
        self.state.tell(came)
        self._read()
        return reason

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        self.now += 0.5
        self.state.end(reason, error)
        self._read()

    def _read(self) -> None:
        event = self.state.get()
        assert self.state.is_empty
        self.events.append(event)
        self.output.add(event)
        # What the events say and what the output says is always the same.
        assert self.output.text == "".join(e.text for e in self.events)
        assert self.output.token_ids == [t for e in self.events for t in e.token_ids]
        assert len(self.output.token_times) == len(self.output.token_ids)
        assert self.output.token_times == sorted(self.output.token_times)
        assert all(e.finish_reason is None for e in self.events[:-1]), "something came after the end"


LENGTH, STOP, ABORT = FinishReason.LENGTH, FinishReason.STOP, FinishReason.ABORT


@pytest.mark.parametrize(
    ("pieces", "end", "texts", "reason"),
    [
        (("He", "llo"), LENGTH, ["He", "llo"], LENGTH),
        (("a|é", "b", "c|d"), LENGTH, ["a", "éb", "cd"], LENGTH),  # half a character waits
        (("a", "b|%"), LENGTH, ["a", "b"], LENGTH),  # and is not shown where the answer is cut
        (("a", "b|%"), STOP, ["a", "b%"], STOP),
        (("one S", "TO", "P two"), None, ["one ", "", ""], STOP),  # a stop string over the borders of tokens
        (("a S", "x STOP y"), None, ["a ", "Sx "], STOP),  # text in front of the stop comes with it
        (("one ST", "O"), LENGTH, ["one ", "STO"], LENGTH),  # it did not become one
        (("one ST", "O"), STOP, ["one ", "STO"], STOP),
        (("one ST", "O|P"), LENGTH, ["one ", ""], STOP),  # only the end makes it certain
        (("one ST", "O|P"), ABORT, ["one ", ""], STOP),
        (("a STOP",), LENGTH, ["a "], STOP),  # which is the reason even where the length is reached, too
    ],
)
def test_tokens_become_text_and_times(
    pieces: tuple[str, ...], end: FinishReason | None, texts: list[str], reason: FinishReason
):
    reader = Reader(*pieces, stop=("STOP",))
    reasons = [reader.take(token, end if token == len(pieces) - 1 else None) for token in range(len(pieces))]
    assert reasons == [None] * (len(pieces) - 1) + [reason]
    assert [event.text for event in reader.events] == texts
    assert reader.output.finish_reason == reason.value
    assert reader.output.token_ids == list(range(len(pieces))), "the token that ended it is a token"
    assert reader.output.token_times == [0.5 * (i + 1) for i in range(len(pieces))]


def test_an_end_token_is_counted_and_not_shown():
    reader = Reader("a", "b|é")
    reader.take(0)
    reader.take(1)
    assert reader.take(END, FinishReason.STOP) is FinishReason.STOP
    assert reader.letters.added == [0, 1], "an end token has no text"
    assert (reader.output.text, reader.output.token_ids) == ("abé", [0, 1, END])


def test_an_abort_shows_what_was_held_back():
    reader = Reader("one ST|O%", stop=("STOP",))
    reader.take(0)
    assert reader.output.text == "one "
    reader.end(FinishReason.ABORT)
    assert reader.output.text == "one STO"
    assert reader.events[-1] == StreamEvent((), "STO", 1.0, "abort")
    assert reader.output.token_times == [0.5], "an end without a token has no token time"


def test_an_end_before_the_first_token_and_one_with_an_error():
    reader = Reader("a")
    reader.end(FinishReason.ERROR, "worker mini is gone")
    assert reader.events == [StreamEvent((), "", 0.5, "error", error="worker mini is gone")]
    assert (reader.output.finish_reason, reader.output.error) == ("error", "worker mini is gone")
    assert reader.output.token_ids == []


@pytest.mark.parametrize("stop", [(), ("STOP",)])
def test_tokens_that_cannot_be_decoded_end_their_request(stop: tuple[str, ...]):
    """On the engine's thread, where stop strings are looked for, or on the reader's."""
    reader = Reader("a", stop=stop)
    reader.take(0)
    reason = reader.take(7)  # the tokenizer has no such token
    assert reason is (FinishReason.ERROR if stop else None)
    assert (reader.output.text, reader.output.token_ids) == ("a", [0, 7])
    assert (reader.output.finish_reason, reader.output.error) == (
        "error", "the tokenizer cannot decode the answer (IndexError: tuple index out of range)",
    )  # fmt: skip


def test_without_a_tokenizer_there_are_only_tokens():
    reader = Reader()
    reader.take(70_000)
    assert reader.take(END, FinishReason.STOP) is FinishReason.STOP
    reader.output.add(StreamEvent((), "", 1.0))
    assert (reader.output.text, reader.output.token_ids) == ("", [70_000, END])
    assert reader.output.finish_reason == "stop", "an event without a reason takes none away"


def test_logprobs_are_passed_on_where_there_are_any():
    reader = Reader("a", "b")
    reader.take(0, logprob=-0.5, top=((0, -0.5), (1, -2.0)))
    reader.take(1, logprob=-1.0)
    first, second = TokenLogprobs(0, -0.5, ((0, -0.5), (1, -2.0))), TokenLogprobs(1, -1.0)
    assert [event.logprobs for event in reader.events] == [(first,), (second,)]
    assert reader.output.logprobs == [first, second]
