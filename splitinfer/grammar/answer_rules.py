"""The rules of one answer: its reasoning, its form, and where it may end. A function of the answer's tokens alone.

    answer    | reasoning ................. | closing words, </think> | text in the form of the grammar ...... | end
    mask      | all but end tokens          | only the next of them   | what the grammar admits                |
    forced    | -                           | all of them             | what the grammar leaves no choice of   |

Readers find the end of reasoning by its text. So before a form only the marker's own tokens write that text: in others
it would end the reasoning for a reader, and not here.

What must come next is *forced*: its mask has one token. A grammar forces bytes, and which tokens they become is decided
where they begin, for as far as they reach; else an answer could depend on whether drafts went out. So the run is kept
with every place that it passes.

A greedy answer takes the likeliest token at each place, which may begin an unlikely text: "bl" stands for "blue" and
"black" together. So where a form begins, or a text that is a value of JSON, and few texts may follow, these are
*alternatives*: each is scored as a whole, and the winner becomes a run. Where it is the beginning of another, the
answer ends behind it.

    behind  {"colour":"     alternatives  blue"}   black"}   green"}

The rules walk along the tokens that they are asked about, and go back where those differ from the ones before: drafts
are followed, and rolled back. Behind the answer's end anything may come, because nobody reads it. Behind a token that
cannot follow nothing may come but an end: a draft that leads there is dropped, and an answer that does has not kept its
form, so its request ends with an error (``refuses``).
"""

import re
import threading
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any

from splitinfer.core.grammar import Text, Texts, beginning_of
from splitinfer.grammar.vocabulary import Thinking, Vocabulary, union, without
from splitinfer.grammar.whole_words import may_grow, tokens_of, whole_words

_BEFORE = 4  # tokens of a form with which the next are split
_VALUE = re.compile(rb'(?:\A|:\s*)"\Z')  # behind which a text begins that is a value of JSON
_STRUCTURE = re.compile(rb'["{\[]')  # of JSON
_MOST, _LONGEST = 32, 32  # alternatives, and tokens of one; each takes a step
_FORKS = 4  # places in one where texts part; a number parts at every digit
_FEW = 64  # tokens that may come at such a place; behind one where more may come, a text is open


class _TooMany(Exception):
    """More texts may follow than are scored."""


class _Left(Enum):
    """Why the rules of a form say nothing more."""

    ENDED = "the answer has ended"
    REFUSED = "a token could not follow"


@dataclass(frozen=True, slots=True)
class _Place:
    """What holds behind a number of tokens.

    reasoned: tokens of reasoning so far; ``None``: it has ended, or there was none.
    matched: tokens that the grammar has taken.
    run: the tokens that must follow.
    left: why the tokens before are the last that the rules have followed, if so.
    """

    reasoned: int | None = None
    matched: int = 0
    run: tuple[int, ...] = ()
    left: _Left | None = None


@dataclass
class AnswerRules:
    """``core.grammar.TokenRules`` of one answer. ``matcher``: of its grammar, llguidance's ``LLMatcher`` at its
    beginning.

    thinks: whether the answer begins inside reasoning. may_think: whether it may begin by opening it. Both are false
    if the vocabulary does not say how reasoning is marked.
    budget: tokens of reasoning, at most; ``None``: any number.
    min_tokens: the answer does not end before it has so many. ends: the tokens that end it.
    """

    vocabulary: Vocabulary
    matcher: Any = None
    thinks: bool = False
    may_think: bool = False
    budget: int | None = None
    min_tokens: int = 0
    ends: frozenset[int] = frozenset()
    weighs: bool = False  # whether alternatives are scored
    failure: str | None = None
    _path: list[int] = field(default_factory=list)
    _places: list[_Place] = field(default_factory=list)
    _masks: dict[int, bytes] = field(default_factory=dict)  # of the form, behind so many tokens
    _weighed: dict[int, Texts] = field(default_factory=dict)  # the alternatives, behind so many tokens
    _decided: dict[int, Text] = field(default_factory=dict)  # those that were chosen
    _ended: set[int] = field(default_factory=set)  # numbers of tokens behind which a chosen one ends the answer
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        begin = _Place(reasoned=0 if self.thinks else None)
        self._places.append(replace(begin, run=self._run_at(begin)))

    # -- what the scheduler asks ---------------------------------------------------------------

    def jump_forward(self, answer: Seq[int], most: int) -> tuple[int, ...]:
        with self._lock:
            self._go_to(answer)
            found = list[int]()
            while run := self._places[-1].run[: most - len(found)]:
                found += run
                for token in run:
                    self._step(token)
            return tuple(found)

    def admitted(self, answer: Seq[int], drafts: Seq[int]) -> list[bool]:
        with self._lock:
            self._go_to(answer)
            found = list[bool]()
            for token in drafts:
                if not self._may_follow(token) or self._alternatives(len(self._path)):
                    break
                found.append(bool(self._places[-1].run))
                self._step(token)
            return found

    def alternatives(self, answer: Seq[int]) -> Texts:
        if not self.weighs:
            return ()
        with self._lock:
            self._go_along(answer)
            return self._alternatives(len(answer))

    def decide(self, answer: Seq[int], tokens: Text) -> None:
        with self._lock:
            self._go_to(answer)
            if any(beginning_of(tokens, other) for other in self._alternatives(len(answer))):
                self._ended.add(len(answer) + len(tokens))
            self._decided[len(answer)] = tokens
            self._places[-1] = replace(self._places[-1], run=tokens)

    def masks(self, answer: Seq[int], first: int) -> list[bytes | None]:
        with self._lock:
            found = []
            self._go_to(answer[:first])
            found.append(self._mask())
            for token in answer[first:]:
                self._step(token)
                found.append(self._mask())
            return found

    def refuses(self, answer: Seq[int]) -> bool:
        with self._lock:
            self._go_along(answer)
            return self._places[len(answer)].left is _Left.REFUSED

    # -- walking -------------------------------------------------------------------------------

    def _go_along(self, answer: Seq[int]) -> None:
        """Follow an answer, unless it was followed already. Its drafts need not be followed again."""
        if self._path[: len(answer)] != list(answer):
            self._go_to(answer)

    def _go_to(self, answer: Seq[int]) -> None:
        shared = min(len(self._path), len(answer))
        if self._path[:shared] != list(answer[:shared]):  # seldom: comparing whole lists is fast
            shared = next(i for i, (a, b) in enumerate(zip(self._path, answer, strict=False)) if a != b)
        self._back_to(shared)
        for token in answer[shared:]:
            self._step(token)

    def _back_to(self, length: int) -> None:
        matched = self._places[-1].matched
        del self._path[length:], self._places[length + 1 :]
        for noted in (self._masks, self._weighed):
            for behind in [each for each in noted if each > length]:
                del noted[behind]
        back = matched - self._places[-1].matched
        if back and not self.matcher.rollback(back):
            self._fail()

    def _step(self, token: int) -> None:
        before = self._places[-1]
        place = self._behind(before, token)
        self._path.append(token)
        if place.left is None and not place.run:
            place = replace(place, run=self._decided.get(len(self._path)) or self._run_at(place))
        self._places.append(place)

    def _behind(self, before: _Place, token: int) -> _Place:
        """Return the place after a token, with the rest of its run."""
        if before.left is not None:
            return before
        if before.run and before.run[0] != token:
            return replace(before, run=(), left=_Left.REFUSED)
        run = before.run[1:]
        if before.reasoned is not None:
            has_ended = self._ends_reasoning(token)
            if _has(self._misspelling(), token) and not has_ended:
                return replace(before, run=(), left=_Left.REFUSED)
            return _Place(None if has_ended and not run else before.reasoned + 1, before.matched, run)
        if self._may_open(before) and token == self._thinking.start[0]:
            return _Place(0, before.matched, ())
        if self.matcher is None:
            return _Place(None, before.matched, run)
        if (token in self.ends or token in self.vocabulary.ends) and self.matcher.is_accepting():
            return replace(before, run=(), left=_Left.ENDED)
        if self.matcher.try_consume_tokens([token]) != 1:
            self._check()
            return replace(before, run=(), left=_Left.REFUSED)
        return _Place(None, before.matched + 1, run)

    @property
    def _thinking(self) -> Thinking:
        thinking = self.vocabulary.thinking
        assert thinking is not None
        return thinking

    def _ends_reasoning(self, token: int) -> bool:
        """Return whether the marker that ends the reasoning is whole with a token."""
        marker = self._thinking.end
        return (*self._path[len(self._path) + 1 - len(marker) :], token) == marker

    def _may_open(self, place: _Place) -> bool:
        """Return whether reasoning may be opened here: by the answer's first token."""
        return self.may_think and not self._path and len(self._thinking.start) == 1

    def _may_follow(self, token: int) -> bool:
        """Return whether a token may come next. A mask takes a while to compute, so drafts are tried first."""
        place = self._places[-1]
        if place.run:
            return token == place.run[0]
        if place.left is not None:
            return False
        if place.reasoned is not None and _has(self._misspelling(), token):
            return self._ends_reasoning(token)
        if len(self._path) in self._ended:
            return token in self.ends
        if self._must_go_on(place):
            return token not in self.ends
        if place.reasoned is not None or self.matcher is None or self._may_open(place):
            return True
        return self.matcher.validate_tokens([token]) == 1 and _has(self._of_form(place) or b"", token)

    def _must_go_on(self, place: _Place) -> bool:
        """Return whether the answer must not end here, whatever its form."""
        return len(self._path) < self.min_tokens or (place.reasoned is not None and self.matcher is not None)

    # -- what must follow, and what may --------------------------------------------------------

    def _run_at(self, place: _Place) -> tuple[int, ...]:
        """Return the tokens that must follow, as many as this place determines."""
        if place.reasoned is not None:
            return self._closing(place.reasoned)
        matcher = self.matcher
        if matcher is None or self._may_open(place):
            return ()
        if matcher.is_stopped():
            self._check()
            return ()
        run = matcher.compute_ff_tokens()
        self._check()
        ends = self.ends
        return tuple(run[: next((i for i, token in enumerate(run) if token in ends), len(run))])

    def _alternatives(self, at: int) -> Texts:
        """Return the alternatives behind the first ``at`` tokens that the rules have followed."""
        if not self._may_weigh(at):
            return ()
        if at not in self._weighed:
            self._back_to(at)
            self._weighed[at] = self._texts()
        return self._weighed[at]

    def _may_weigh(self, at: int) -> bool:
        """Return whether a form begins there, or a text that is a value, but for what of it is forced; with a
        choice."""
        place = self._places[at]
        is_form = place.reasoned is None and self.matcher is not None and (at > 0 or not self.may_think)
        if not self.weighs or not is_form or place.run or place.left is not None or at < self.min_tokens:
            return False
        while not self._begins(at):
            at -= 1
            is_forced = bool(self._places[at].run) and at not in self._decided
            if not is_forced or _STRUCTURE.search(self.vocabulary.tokens[self._path[at]]):
                return False
        return True

    def _begins(self, at: int) -> bool:
        """Return whether a form begins there, or a text that is a value."""
        matched = self._places[at].matched
        written = self._path[at - min(matched, _BEFORE) : at]
        return not matched or bool(_VALUE.search(b"".join(self.vocabulary.tokens[token] for token in written)))

    def _texts(self) -> Texts:
        """Return the few texts that may follow, if any of them has more than one token."""
        at, found = len(self._path), list[Text]()
        try:
            self._follow(at, _FORKS, found)
        except _TooMany:
            return ()
        finally:
            self._back_to(at)
        texts = tuple(dict.fromkeys(tuple(token for token in text if token not in self.ends) for text in found))
        return texts if len(texts) > 1 and all(texts) and any(len(text) > 1 for text in texts) else ()

    def _follow(self, start: int, forks: int, found: list[Text]) -> None:
        """Find the texts behind ``start`` that begin with the tokens since then. ``forks``: places that may come where
        they part."""
        while run := self._places[-1].run:
            for token in run:
                self._step(token)
        place, at = self._places[-1], len(self._path)
        ends = place.left is not None or self.matcher.is_stopped()
        options = [] if ends else list(tokens_of(self._of_form(place) or b""))
        if not options or len(options) > _FEW:
            found.append(tuple(self._path[start:]))
            options = []
        if len(found) > _MOST or at - start > _LONGEST or (len(options) > 1 and not forks):
            raise _TooMany
        for token in options:
            self._step(token)
            self._follow(start, forks - (len(options) > 1), found)
            self._back_to(at)

    def _closing(self, reasoned: int) -> tuple[int, ...]:
        """Return the words that close reasoning, where its budget asks for them: they are a part of it, as far as it
        has room for them, and its end marker comes behind."""
        budget, thinking = self.budget, self._thinking
        if budget is None:
            return ()
        words = thinking.closing if len(thinking.closing) <= budget else ()
        return (*words, *thinking.leave) if reasoned == budget - len(words) else ()

    def _mask(self) -> bytes | None:
        """Return the tokens that may follow where the rules stand."""
        place, vocabulary = self._places[-1], self.vocabulary
        if place.left is not None:
            return None if place.left is _Left.ENDED else self._only_ends
        if place.run:
            return vocabulary.only(place.run[:1])
        if len(self._path) in self._ended:
            return self._only_ends
        mask = self._of_form(place)
        if not self._must_go_on(place):
            return mask
        if mask is None:
            return self._all_but_ends if place.reasoned is None else self._of_reasoning()
        rest = without(mask, self._only_ends)
        return rest if any(rest) else mask  # a form that ends sooner comes first

    def _of_form(self, place: _Place) -> bytes | None:
        matcher, vocabulary = self.matcher, self.vocabulary
        if place.reasoned is not None or matcher is None:
            return None
        mask = self._masks.get(len(self._path))
        if mask is None:
            mask = bytes(matcher.compute_bitmask()[: vocabulary.mask_bytes])
            self._check()
            mask = self._masks[len(self._path)] = whole_words(matcher, vocabulary, mask, self._last(place))
        if self._may_open(place):
            return union(mask, vocabulary.only(self._thinking.start))
        return mask

    def _last(self, place: _Place) -> list[int]:
        """Return the last tokens that the grammar has taken; the tokenizer splits what follows together with them.
        Where the grammar has forced the beginning of a word, the word may be split in another way and must stay in
        reach: only the tokens behind that beginning count."""
        end = len(self._path)
        first = end - min(place.matched, _BEFORE)
        forced = (at for at in range(end, first, -1) if self._places[at - 1].run)
        return self._path[next((at for at in forced if may_grow(self.vocabulary.tokens[self._path[at - 1]])), first) :]

    def _of_reasoning(self) -> bytes:
        """Return what may follow in reasoning before a form."""
        last, wrong = self._thinking.end[-1], self._misspelling()
        if self._ends_reasoning(last):
            wrong = without(wrong, self.vocabulary.only((last,)))
        return without(self._all_but_ends, wrong)

    def _misspelling(self) -> bytes:
        """Return the tokens with which the text of the marker that ends the reasoning would be whole where the rules
        stand, before a form. Its own last token may be among them."""
        if self.matcher is None:
            return b""
        tokens, size = self.vocabulary.tokens, self.vocabulary.size
        marker = b"".join(tokens[token] for token in self._thinking.end)
        tail = self._path[-len(marker) :]  # a token has a byte at least
        return self.vocabulary.completing(b"".join(tokens[token] for token in tail if token < size), marker)

    @cached_property
    def _all_but_ends(self) -> bytes:
        return self.vocabulary.all_but(self.ends)

    @cached_property
    def _only_ends(self) -> bytes:
        return self.vocabulary.only(self.ends)

    def _check(self) -> None:
        if self.matcher.is_error():
            self._fail()

    def _fail(self) -> None:
        """The matcher cannot go on, by one of its limits."""
        reason = str(self.matcher.get_error()).strip().split("\n", 1)[0]
        self.failure = self.failure or f"the grammar became too complex to be enforced ({reason:.200})"


def _has(mask: bytes, token: int) -> bool:
    return token >> 3 < len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)
