"""Plans and results: what every stage does in a step, and what it returns.

All that the stages do follows from plans. A plan is immutable and numbered; a sequence that is new to the
stages comes in full (``NewSequence``), a known one as its next tokens (``Slice``). A stage truncates its
cache to ``Slice.start`` before it runs: rolling back after a rejected draft, or after an edited turn of a
conversation, is data in the next plan and no message of its own. After a loss the scheduler makes new plans from
the tokens, which rebuild a lost stage; no plan is kept. Results hold token ids, never hidden states.

    Scheduler --StepPlan--> stage 0 --hidden--> stage 1 ... last stage --StepResult--> Scheduler
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import pairwise

from splitinfer.core.kv.block_tree import Key
from splitinfer.core.picture import Picture
from splitinfer.core.sampling_params import SamplingParams

_FAR = 1e12  # seconds, or bytes; no clock and no step has more


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence's static data, sent once. Filled by the scheduler.

    ``prefix``: the tokens before the first slice's start. Their KV is copied from the stored ``blocks``, in order, as
    far as there are tokens; the last stage needs the tokens for penalties. ``num_prompt``: positions before it belong
    to the prompt, whose hidden states links may pack (``core.wire_codec``). ``pictures``: those in the prompt.
    ``takes_over``: the ``retained`` sequence whose KV is that of these tokens, and perhaps more; nothing is copied.

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

    The last ``num_logits`` rows go through norm, head and sampler; 0 for a chunk that is not the prompt's last. The
    last ``num_drafts`` tokens are drafts of what will be sampled in their places; each is verified by the row before
    it, the slice's first token by an earlier slice. ``num_next``: drafts that the last stage is to make behind what is
    sampled. ``scored``: the prompt's tokens behind the slice's other rows, whose log probabilities are wanted; empty if
    they are not.

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
        """Whether it is one row that wants a token, and no draft."""
        return len(self.token_ids) == self.num_logits == 1 and not self.num_drafts

    @property
    def begins_with_draft(self) -> bool:
        """Whether its first token is a draft, so that it is rejected if another token is sampled in that place."""
        return self.num_drafts == len(self.token_ids)

    def is_rejected(self, position: int, token_id: int | None) -> bool:
        """Return whether it lies behind a wrong draft, where ``token_id`` was sampled last, for ``position`` (``None``:
        no token was). A slice that begins with a draft is valid only if it begins there with that token."""
        return self.begins_with_draft and (self.start, self.token_ids[0]) != (position, token_id)

    def num_accepted(self, sampled: Seq[int]) -> int:
        """Return how many of the ``num_logits`` sampled tokens count: those up to the first that is not the next draft.

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
        """Return whether ``tokens`` can be those that count: all, or those up to one that is not the next draft."""
        if len(tokens) >= self.num_logits or not tokens:
            return len(tokens) == self.num_logits and self.num_accepted(tokens) == len(tokens)
        return self.num_accepted(tokens) == len(tokens) and tokens[-1] != self._verified[len(tokens) - 1]

    def is_answered_by(self, found: "SampledSlice | None", tokens: Seq[int] | None) -> bool:
        """Return whether ``found`` is possible for its rows and drafts. ``tokens``: its sequence's before it; ``None``:
        it has ended. ``found``: ``None`` where nothing came, because nothing is wanted, or a stage has left it out."""
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
        """The drafts that have a row before them."""
        return self.token_ids[len(self.token_ids) - self.num_logits + 1 :] if self.num_drafts else ()


@dataclass(frozen=True, slots=True)
class Save:
    """Stores a copy of a sequence's KV of positions [start, end), which earlier steps computed, as block ``block_id``.

    With the ``tokens`` of those positions it is also written to disk, as the block after that of key ``parent``.

    Raises:
        ValueError: an empty range, or tokens of another number.
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
        """Whether it is to be written to disk."""
        return bool(self.tokens)


@dataclass(frozen=True, slots=True)
class Fetch:
    """Reads positions [start, end), which are on disk under ``key``, as block ``block_id``. A stage that cannot reports
    that in its figures.

    Raises:
        ValueError: an empty range.
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

    A stage first makes the ``saves``, then ends the ``retained`` sequences but keeps their KV, then frees the ``freed``
    ones, then adds ``new`` ones, which may begin with ``dropped`` blocks for the last time, then drops those and adds
    ``fetches``, then runs the ``slices``, each of another sequence. ``erased``: keys of files that will not be read
    again.

    Raises:
        ValueError: two slices of one sequence.
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
        """The sequences that no later slice is of."""
        return (*self.freed, *self.retained)

    @property
    def num_tokens(self) -> int:
        """Rows of hidden state that cross each link in this step."""
        return sum(len(s.token_ids) for s in self.slices)

    @property
    def following(self) -> tuple[Slice, ...]:
        """The slices of the step that is likely to follow on its sequences, with 0 for each token; none if it does more
        than decode."""
        if not all(part.is_decode for part in self.slices):
            return ()
        return tuple(Slice(part.seq_id, part.end, (0,), 1) for part in self.slices)

    @property
    def has_only_logits(self) -> bool:
        """Whether every row wants logits, as those of decodes and drafts do, and it has rows."""
        return bool(self.slices) and all(part.num_logits == len(part.token_ids) for part in self.slices)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The layout of a hidden state's bytes: ``dtype`` by MLX's name, row-major ``shape``."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredPart:
    """What a stored block has of one cache, which ``slot`` names: with ``by_token`` the arrays of positions [start,
    end), else the state at ``end``. The bytes go beside it."""

    slot: tuple[int, ...]
    by_token: bool
    start: int
    end: int
    arrays: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One token, chosen or the prompt's. ``logprob`` and ``top`` only where the request asked for them."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SampledSlice:
    """The tokens sampled for one slice, one for each row with logits. With drafts they end at the first wrong one, and
    there are none if the slice was rejected. ``drafts``: what the last stage has drafted behind them. ``scored``: the
    slice's own, with their log probabilities."""

    seq_id: int
    tokens: tuple[SampledToken, ...]
    drafts: tuple[int, ...] = ()
    scored: tuple[SampledToken, ...] = ()


@dataclass(frozen=True, slots=True)
class StageFigures:
    """What one step cost one stage. Times are seconds on that stage's own monotonic clock.

    started, ended: of computing.
    received: when its frame had arrived; meaningless on the first stage.
    sent: when its output was ready to be sent, but for the message around it.
    bytes_copied, copying: bytes of stored KV copied for new sequences, and the seconds that took.
    rows: number of rows that it computed.
    unfit: rows that the link's codec could not hold and that were sent as they are.
    fetching: seconds that reading the plan's fetches took.
    lacking: ids of the fetches' blocks that it could not read.
    drafting: seconds of making drafts behind the step, after ``ended``.
    written: keys of blocks written to its disk since the last figures.

    Raises:
        ValueError: times or counts that no step has.
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

    def __post_init__(self) -> None:
        times = abs(self.started) + abs(self.ended) + abs(self.received) + abs(self.sent)
        took = self.copying + self.fetching + self.drafting
        counts = (self.stage, self.bytes_sent, self.bytes_copied, self.rows, self.unfit)
        is_sound = times + took < _FAR and self.started <= self.ended  # not so where any is no number
        if not is_sound or min(self.copying, self.fetching, self.drafting, *counts) < 0 or max(counts) > _FAR:
            raise ValueError(f"stage {self.stage} reports times or counts of a step that no step has")


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a plan. The last stage makes it; ``figures`` has one entry from each stage."""

    step: int
    sampled: tuple[SampledSlice, ...] = ()
    figures: tuple[StageFigures, ...] = ()

    def received_at(self, at: float) -> "StepResult":
        """Return the same with the first stage's times as if it had received the step then: on the clock of who has
        sent it, where that has no stage of its own."""
        first, *others = self.figures
        late = first.received - at
        moved = replace(
            first, received=at, started=first.started - late, ended=first.ended - late, sent=first.sent - late
        )
        return replace(self, figures=(moved, *others))
