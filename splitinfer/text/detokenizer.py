"""Token ids to text, one token at a time, with any tokenizer.

A token's text is not a function of the token alone: a character may be spread over several tokens, and many decoders
drop the space in front of the first word. So a token is decoded in a window, which is bounded:

    ids     ...... already text ....., [ context ][ pending ]
    text                               ~~~~~~~~~~~          returned before; decoded again so that the
                                                            decoder sees that this is not the beginning
                                                  ~~~~~~~~~ new: decode(context + pending) after the context's text

A decoder shows bytes that are not (yet) a character as U+FFFD, so U+FFFD at the end is held back. It may also be final.
UTF-8 has at most 4 bytes, so in a byte-level vocabulary 4 tokens prove it. With byte fallback (<0xE2>...) a run of byte
tokens is decoded as a whole, and a *complete* U+FFFD beside an unfinished character looks like one unfinished run:
hence the bound is the tokens of 4 characters (``MAX_PENDING``); after that all but the last U+FFFD is returned.

Guarantee: the pieces and the flush, joined, are the text that ``decode`` gives for all ids at once, for every sequence
of a byte-level vocabulary, and for every one that spells text in any vocabulary whose decoder is local (with at most 4
characters U+FFFD in a row if it needs byte fallback). Elsewhere ``decode`` itself takes back what was complete.
"""

from collections.abc import Callable, Collection, Sequence

REPLACEMENT = "\ufffd"
MAX_BYTES = 4  # of a character in UTF-8, hence also the most tokens that a character is spread over
MAX_PENDING = 4 * MAX_BYTES


class Detokenizer:
    """Decodes one sequence as it grows. ``decode`` maps ids to text; ids in ``skipped`` have none. ``behind``: the ids
    with which it goes on, if it is no beginning."""

    def __init__(
        self, decode: Callable[[list[int]], str], skipped: Collection[int] = (), behind: Sequence[int] = ()
    ) -> None:
        self._decode = decode
        self._skipped = skipped
        self._context = [token_id for token_id in behind if token_id not in skipped]
        self._context_text = decode(self._context) if self._context else ""
        self._pending: list[int] = []
        self._num_returned = 0  # characters of the pending text that were returned already

    def add(self, token_id: int) -> str:
        """Take the next token; return the text that is now certain and not yet returned (often ``""``)."""
        if token_id in self._skipped:
            return ""
        self._pending.append(token_id)
        text = self._pending_text()
        if not text.endswith(REPLACEMENT):
            piece = text[self._num_returned :]
            self._advance(text)
            return piece
        if len(self._pending) < MAX_PENDING:
            return self._return_up_to(text, len(text.rstrip(REPLACEMENT)))
        piece = self._return_up_to(text, len(text) - 1)
        self._shorten()
        return piece

    def flush(self, *, is_cut: bool = False) -> str:
        """Return the text still held back, incomplete characters as U+FFFD, when the sequence has ended. ``is_cut``: it
        was to go on, so its text ends before a character that is incomplete."""
        piece = self._pending_text()[self._num_returned :]
        return piece.rstrip(REPLACEMENT) if is_cut else piece

    def _pending_text(self) -> str:
        whole = self._decode(self._context + self._pending)
        if whole.startswith(self._context_text):
            return whole[len(self._context_text) :]
        # A run of byte tokens that began in the context is broken as a whole (for now): leave the context out.
        return self._decode(self._pending)

    def _return_up_to(self, text: str, end: int) -> str:
        piece = text[self._num_returned : end]
        self._num_returned = max(self._num_returned, end)
        return piece

    def _advance(self, text: str) -> None:
        """Make the pending tokens, whose text has been returned, the context of what follows."""
        if not self._context_text:
            self._context += self._pending  # the decoder saw only a beginning so far: keep all of it
        elif text:  # tokens without text make no context: behind them the decoder would see a beginning again
            self._context = self._pending
        # Decoded again, because ``text`` may begin with a space that the decoder drops at the beginning.
        self._context_text = self._decode(self._context)
        self._pending = []
        self._num_returned = 0

    def _shorten(self) -> None:
        """Bound the window: only the last U+FFFD is unfinished, and it began in the last ``MAX_BYTES - 1`` tokens."""
        self._pending = self._pending[1 - MAX_BYTES :]
        self._num_returned = max(0, len(self._pending_text()) - 1)
