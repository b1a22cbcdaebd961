"""Token ids to text, one token at a time, with any tokenizer.

A token's text is not a function of the token alone: a character may be spread over several tokens, and
many decoders drop the space in front of the first word. So a token is decoded in a window:

    ids     ...... already text ....., [ context ][ pending ]
    text                               ~~~~~~~~~~~          given out before; only there so that the
                                                            decoder sees that this is not the beginning
                                                  ~~~~~~~~~ new: decode(context + pending) after the context's text

``context`` is the last group of tokens whose text was complete, ``pending`` what came since. The window is
bounded, so a token costs the same at position 10 and at 100,000.

Half a character. A decoder shows bytes that are not (yet) a character as U+FFFD. So U+FFFD at the end is
held back. It may also be meant: the model wrote that very character, or bytes that will never be one. UTF-8
has at most 4 bytes and a token at least one, so in a byte-level vocabulary 4 tokens would be proof enough.
Vocabularies with byte fallback (<0xE2>...) are worse: there a run of byte tokens is decoded as a whole, and
a *complete* U+FFFD beside an unfinished character looks like one unfinished run. Hence the bound is the
tokens of 4 characters (``MAX_PENDING``); after that all but the last U+FFFD is given out.

What is promised: the pieces and the flush, joined, are the text that ``decode`` gives for all ids at once
  - for every sequence of ids, in a byte-level vocabulary (its text is that of the bytes, left to right);
  - for every sequence that spells text, in any vocabulary whose decoder is local (it does not rewrite text
    that another token follows), with at most 4 characters U+FFFD in a row if it needs byte fallback.
Elsewhere (byte fallback tokens that spell no text) ``decode`` itself takes back characters that were whole;
here they stay, and only what came after is U+FFFD.
"""

from collections.abc import Callable, Collection

REPLACEMENT = "\ufffd"
MAX_BYTES = 4  # of a character in UTF-8, hence also the most tokens that one is spread over
MAX_PENDING = 4 * MAX_BYTES


class Detokenizer:
    """The text of one sequence as it grows. ``decode`` maps ids to text; ids in ``skipped`` have none."""

    def __init__(self, decode: Callable[[list[int]], str], skipped: Collection[int] = ()) -> None:
        self._decode = decode
        self._skipped = skipped
        self._clear()

    def add(self, token_id: int) -> str:
        """Take the next token; return the text that is now certain and not yet given out (often ``""``)."""
        if token_id in self._skipped:
            return ""
        self._pending.append(token_id)
        text = self._pending_text()
        if not text.endswith(REPLACEMENT):
            piece = text[self._num_given :]
            self._move_on(text)
            return piece
        if len(self._pending) < MAX_PENDING:
            return self._give(text, len(text.rstrip(REPLACEMENT)))
        piece = self._give(text, len(text) - 1)
        self._shorten()
        return piece

    def flush(self) -> str:
        """The text still held back, half characters as U+FFFD; then begin anew."""
        piece = self._pending_text()[self._num_given :]
        self._clear()
        return piece

    def _clear(self) -> None:
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []
        self._num_given = 0  # characters of the pending text that are out already

    def _pending_text(self) -> str:
        whole = self._decode(self._context + self._pending)
        if whole.startswith(self._context_text):
            return whole[len(self._context_text) :]
        # A run of byte tokens that began in the context is broken as a whole (for now): leave the context out.
        return self._decode(self._pending)

    def _give(self, text: str, end: int) -> str:
        piece = text[self._num_given : end]
        self._num_given = max(self._num_given, end)
        return piece

    def _move_on(self, text: str) -> None:
        """All pending text is out: it becomes the context of what follows."""
        if not self._context_text:
            self._context += self._pending  # the decoder saw only a beginning so far: keep all of it
        elif text:  # tokens without text make no context: behind them the decoder would see a beginning again
            self._context = self._pending
        # Decoded anew, for ``text`` may have a space in front that is dropped where it now is the beginning.
        self._context_text = self._decode(self._context)
        self._pending = []
        self._num_given = 0

    def _shorten(self) -> None:
        """Bound the window: only the last U+FFFD is open, and it began in the last ``MAX_BYTES - 1`` tokens."""
        self._pending = self._pending[1 - MAX_BYTES :]
        self._num_given = max(0, len(self._pending_text()) - 1)
