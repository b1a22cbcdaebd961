"""Plans and results: what every stage does in a step, and what it returns.

Stages do nothing but what plans say. A plan is immutable and numbered. It has a sequence that is new to the stages in
full (``NewSequence``), a known one as its next tokens (``Slice``). A stage truncates its cache to ``Slice.start``
before it runs. So rolling back, after a wrong draft or an edited turn of a conversation, is data in the next plan and
not a message. After a loss the scheduler makes new plans from the tokens, which rebuild a lost stage; no plan is kept.
Results hold token ids, never hidden states.

    Scheduler --StepPlan--> stage 0 --hidden--> stage 1 ... last stage --StepResult--> Scheduler
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from splitinfer.core.kv.block_tree import Key
from splitinfer.core.picture import Picture
from splitinfer.core.sampling_params import SamplingParams

_FAR = 1e12  # seconds or bytes; no clock and no step reaches it


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence's static data, which the scheduler fills in and sends once.

    ``prefix``: the tokens before the first slice's start. Their KV is copied from the stored ``blocks``, in order, as
    far as there are tokens; the last stage needs the tokens for penalties. ``num_prompt``: positions before it belong
    to the prompt, whose hidden states links may pack (``core.codecs``). ``pictures``: the prompt's. ``takes_over``:
    the ``retained`` sequence whose KV covers these tokens, and perhaps more; nothing is copied then.

    Raises:
        ValueError: blocks without a prefix, a prefix without blocks, or pictures that overlap.
    """

    seq_id: int
    params: SamplingParams
    seed: int
    blocks: tuple[int, ...] = ()
    prefix: tuple[int, ...] = ()
    num_prompt: int = 0
    pictures: tuple[Picture, ...] = ()
    takes_over: int | None = None

    def __post_init__(self) -> None:
        if any(before.end > after.start for before, after in pairwise(self.pictures)):
            raise ValueError(f"the pictures of sequence {self.seq_id} overlap")
        if bool(self.blocks) != bool(self.prefix):
            raise ValueError(f"sequence {self.seq_id} begins with {len(self.prefix)} tokens of {self.blocks}")


@dataclass(frozen=True, slots=True)
class Slice:
    """One sequence's part of a step: positions [start, start + len(token_ids)).

    num_logits: how many of the last rows go through norm, head and sampler; 0 for a chunk that is not the prompt's
        last.
    num_drafts: how many of the last tokens are drafts. The row before a draft verifies it; an earlier slice verifies a
        draft that begins the slice.
    num_next: how many drafts the last stage makes after the sampled tokens.
    scored: the prompt tokens after the slice's other rows, if their log probabilities are wanted; else empty.

    Raises:
        ValueError: the numbers contradict each other.
    """

    seq_id: int
    start: int
    token_ids: tuple[int, ...]
    num_logits: int
    num_drafts: int = 0
    num_next: int = 0
    scored: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        size = len(self.token_ids)
        if not self.token_ids or self.start < 0 or not 0 <= self.num_logits <= size:
            raise ValueError(f"a slice of {size} tokens from {self.start} wants {self.num_logits} logits")
        if not 0 <= self.num_drafts <= size or (self.num_drafts and self.num_logits != min(self.num_drafts + 1, size)):
            raise ValueError(f"a slice of {size} tokens with {self.num_drafts} drafts wants {self.num_logits} logits")
        if self.num_next < 0 or self.num_next > 0 == self.num_logits:
            raise ValueError(f"a slice with {self.num_logits} logits wants {self.num_next} drafts")
        if self.scored and len(self.scored) + self.num_logits != size:
            raise ValueError(f"a slice of {size} tokens with {self.num_logits} logits scores {len(self.scored)} tokens")

    @property
    def num_rows(self) -> int:
        """How many of its last rows go through the head."""
        return len(self.scored) + self.num_logits

    @property
    def end(self) -> int:
        """One past the slice's last position."""
        return self.start + len(self.token_ids)

    @property
    def is_decode(self) -> bool:
        """Whether it is a single row that wants a token and is not a draft."""
        return len(self.token_ids) == self.num_logits == 1 and not self.num_drafts

    @property
    def begins_with_draft(self) -> bool:
        """Whether its first token is a draft. The slice is then rejected if another token is sampled in that place."""
        return self.num_drafts == len(self.token_ids)

    def is_rejected(self, position: int, token_id: int | None) -> bool:
        """Return whether the slice follows a wrong draft. ``position``, ``token_id``: the last sampled token; ``None``:
        none was sampled. A slice that begins with a draft is valid only if that token is the draft, in its place."""
        return self.begins_with_draft and (self.start, self.token_ids[0]) != (position, token_id)

    def num_accepted(self, sampled: Seq[int]) -> int:
        """Return how many of the ``num_logits`` sampled tokens count: all up to the first that differs from the next
        draft.

        Sampling the target at each position with that position's key, and accepting drafts while they are equal,
        gives the target's tokens whatever the drafts are.

        >>> Slice(1, 9, (4, 5, 6), 3, num_drafts=2).num_accepted((5, 7, 8))
        2
        """
        for count, (token, draft) in enumerate(zip(sampled, self._verified, strict=False), 1):
            if token != draft:
                return count
        return len(sampled)

    def is_verdict(self, tokens: Seq[int]) -> bool:
        """Return whether ``tokens`` can be the ones that count: all, or all up to one that differs from the next
        draft."""
        if len(tokens) >= self.num_logits or not tokens:
            return len(tokens) == self.num_logits and self.num_accepted(tokens) == len(tokens)
        return self.num_accepted(tokens) == len(tokens) and tokens[-1] != self._verified[len(tokens) - 1]

    def is_answered_by(self, found: "SampledSlice | None", tokens: Seq[int] | None) -> bool:
        """Return whether ``found`` is a possible result for its rows and drafts. ``found``: None if no result came,
        because nothing was asked for or a stage left it out. ``tokens``: its sequence's before the result; None if it
        has ended."""
        sampled = () if found is None else tuple(token.token_id for token in found.tokens)
        if found is not None and len(found.drafts) > self.num_next:
            return False
        if found is not None and tuple(one.token_id for one in found.scored) != self.scored:
            return False
        if not self.num_drafts:
            return len(sampled) == self.num_logits and (found is not None or not self.num_rows)
        if tokens is None and self.begins_with_draft:
            return True  # whether it was rejected is no longer known
        if tokens is not None and self.is_rejected(len(tokens) - 1, tokens[-1]):
            return not sampled
        return self.is_verdict(sampled)

    @property
    def _verified(self) -> tuple[int, ...]:
        """The drafts that a row of this slice verifies."""
        return self.token_ids[len(self.token_ids) - self.num_logits + 1 :] if self.num_drafts else ()


@dataclass(frozen=True, slots=True)
class Save:
    """Stores a copy of a sequence's KV of positions [start, end), which earlier steps computed, as block ``block_id``.
    With the ``tokens`` of those positions it is also written to disk, as a child of the block with key ``parent``.

    Raises:
        ValueError: the range is empty, or the tokens are not as many.
    """

    block_id: int
    seq_id: int
    start: int
    end: int
    parent: Key = b""
    tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise ValueError(f"block {self.block_id} is to hold positions {self.start} to {self.end}")
        if len(self.tokens) not in (0, self.end - self.start):
            raise ValueError(f"block {self.block_id} of {self.end - self.start} tokens came with {len(self.tokens)}")

    @property
    def is_for_disk(self) -> bool:
        """Whether it is also written to disk."""
        return bool(self.tokens)


@dataclass(frozen=True, slots=True)
class Fetch:
    """Reads positions [start, end), which are on disk under ``key``, as block ``block_id``. A stage that cannot reports
    so in its figures.

    Raises:
        ValueError: the range is empty.
    """

    block_id: int
    key: Key
    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise ValueError(f"block {self.block_id} is to be read with positions {self.start} to {self.end}")


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One micro-batch for all stages.

    A stage works in this order. It makes the ``saves``; it ends the ``retained`` sequences but keeps their KV; it frees
    the ``freed`` ones; it adds the ``new`` ones, which may begin with ``dropped`` blocks for the last time; it drops
    those blocks; it reads the ``fetches``; it runs the ``slices``, each of another sequence. ``erased``: keys of files
    that will not be read again.

    Raises:
        ValueError: two slices belong to one sequence.
    """

    step: int
    new: tuple[NewSequence, ...] = ()
    slices: tuple[Slice, ...] = ()
    freed: tuple[int, ...] = ()
    saves: tuple[Save, ...] = ()
    dropped: tuple[int, ...] = ()
    fetches: tuple[Fetch, ...] = ()
    erased: tuple[Key, ...] = ()
    retained: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len({part.seq_id for part in self.slices}) != len(self.slices):
            raise ValueError(f"step {self.step} has two slices of one sequence")

    @property
    def has_commands(self) -> bool:
        """Whether it does anything besides running its slices."""
        return bool(self.new or self.ended or self.saves or self.dropped or self.fetches or self.erased)

    @property
    def ended(self) -> tuple[int, ...]:
        """The sequences that no later slice belongs to."""
        return (*self.freed, *self.retained)

    @property
    def num_tokens(self) -> int:
        """Rows of hidden state that cross each link in this step."""
        return sum([len(part.token_ids) for part in self.slices])

    @property
    def following(self) -> tuple[Slice, ...]:
        """The slices of the step that probably follows on its sequences, with 0 for each token. Empty unless the step
        only decodes."""
        if not all(part.is_decode for part in self.slices):
            return ()
        return tuple(Slice(part.seq_id, part.end, (0,), 1) for part in self.slices)

    @property
    def has_only_logits(self) -> bool:
        """Whether it has rows and each of them wants logits, as in decodes and drafts."""
        return bool(self.slices) and all(part.num_logits == len(part.token_ids) for part in self.slices)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The layout of a hidden state's bytes: ``dtype`` by MLX's name, and the row-major ``shape``."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A stored block's part of one cache, which ``slot`` names: with ``by_token`` the arrays of positions [start, end),
    else the state at ``end``. The bytes are sent beside it."""

    slot: tuple[int, ...]
    by_token: bool
    start: int
    end: int
    arrays: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A sampled token, or a scored one of the prompt. ``logprob`` and ``top`` are set only if the request asked for
    them."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SampledSlice:
    """The tokens sampled for one slice, one for each row with logits. With drafts they end at the first wrong one; a
    rejected slice has no tokens. ``drafts``: the last stage's drafts of the tokens after them. ``scored``: the slice's
    ``scored`` tokens, with their log probabilities."""

    seq_id: int
    tokens: tuple[SampledToken, ...]
    drafts: tuple[int, ...] = ()
    scored: tuple[SampledToken, ...] = ()


@dataclass(frozen=True, slots=True)
class StageFigures:
    """What one step cost one stage. Times are seconds on that stage's own monotonic clock.

    started, ended: when computing began and ended.
    received: when its frame had arrived; meaningless on the first stage.
    sent: when its output was ready to send, except for the message around it.
    bytes_copied, copying: bytes of stored KV copied for new sequences, and the seconds that took.
    rows: number of rows that it computed.
    unfit: rows that the link's codec could not hold, so that they were sent exactly.
    fetching: seconds that reading the plan's fetches took.
    lacking: block ids of the fetches that it could not read.
    drafting: seconds of making drafts for the next step, after ``ended``.
    written: keys of blocks written to its disk since the last figures.
    experts_wanted, experts_found: experts that layers needed since the last figures, and those of them in memory.
    experts_read, experts_waiting: bytes of the others, and the seconds of waiting for them.
    """

    stage: int
    started: float
    ended: float
    received: float = 0.0
    bytes_sent: int = 0
    sent: float = 0.0
    bytes_copied: int = 0
    copying: float = 0.0
    rows: int = 0
    unfit: int = 0
    fetching: float = 0.0
    lacking: tuple[int, ...] = ()
    written: tuple[Key, ...] = ()
    drafting: float = 0.0
    experts_wanted: int = 0
    experts_found: int = 0
    experts_read: int = 0
    experts_waiting: float = 0.0

    def check(self) -> None:
        """Check figures that a peer sent.

        Raises:
            ValueError: no step can have these times or counts.
        """
        times = abs(self.started) + abs(self.ended) + abs(self.received) + abs(self.sent)
        seconds = (self.copying, self.fetching, self.drafting, self.experts_waiting)
        counts = (
            *(self.stage, self.bytes_sent, self.bytes_copied, self.rows, self.unfit),
            *(self.experts_found, self.experts_wanted - self.experts_found, self.experts_read),
        )
        is_sound = times + sum(seconds) < _FAR and self.started <= self.ended  # false if any is NaN
        if not is_sound or min(*seconds, *counts) < 0 or max(counts) > _FAR:
            raise ValueError(f"stage {self.stage} reports times or counts of a step that no step has")


class FiguresLater(Seq[StageFigures]):
    """The figures of several stages, which ``read`` returns when they are first asked for. Nothing before the next
    launch needs them. Raises as ``read``, when asked."""

    def __init__(self, read: Callable[[], tuple[StageFigures, ...]]) -> None:
        self._read = read
        self._found: tuple[StageFigures, ...] | None = None

    @property
    def _all(self) -> tuple[StageFigures, ...]:
        if self._found is None:
            self._found = self._read()
        return self._found

    def __getitem__(self, at: Any) -> Any:
        return self._all[at]

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[StageFigures]:
        return iter(self._all)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a plan. The last stage makes it. ``figures`` has one entry for each stage."""

    step: int
    sampled: tuple[SampledSlice, ...] = ()
    figures: Seq[StageFigures] = ()
