"""Steps of many sequences: each row is what its sequence alone would have, whoever else is in the step."""

import sys
import weakref
from dataclasses import dataclass, field

import mlx.core as mx
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache
from plans import Planned, cut_at

from splitinfer.engine.stage.prepared import Snapshot
from splitinfer.models.caches.caches import CachePlace
from splitinfer.models.caches.cohort import SequenceCaches, share_calls
from splitinfer.models.caches.rows import RowCache, RowsCall, RowStep, SequenceRows, each_sequence
from splitinfer.models.cut.cut import StageModel
from splitinfer.models.rows.step import StepModel, Way, arrays_to_evaluate, nbytes
from tests.stages import held_in

ROUNDING = 2e-5  # relative, float32


@dataclass
class Alone:
    """A sequence by itself: the reference. Its tokens are arbitrary, and so is what is done to it."""

    number: int
    caches: list[SequenceCaches]
    tokens: list[int] = field(default_factory=list)

    def next_tokens(self, count: int) -> list[int]:
        return [(31 * self.number + 7 * (len(self.tokens) + i)) % 150 for i in range(count)]


class Both:
    """The same steps on the stages of a model, together and one sequence at a time."""

    def __init__(self, name: str, borders: tuple[int, ...] = (2,), *, exact: bool = True) -> None:
        self.planned = Planned(cut_at(tiny.build(name)[0], *borders), exact=exact)
        self.stages, self.pools = self.planned.stages, self.planned.pools
        self.alone: dict[int, Alone] = {}
        self.opened = 0

    def open(self) -> int:
        number, self.opened = self.opened, self.opened + 1
        self.planned.open(number)
        self.alone[number] = Alone(number, [stage.make_caches() for stage in self.stages])
        return number

    def close(self, number: int) -> None:
        del self.alone[number]
        for pool in self.pools:
            pool.free(number)

    def rewind(self, number: int, back: int) -> None:
        one = self.alone[number]
        one.tokens = one.tokens[: len(one.tokens) - back]
        one.caches = [stage.make_caches() for stage in self.stages]
        if one.tokens:
            self.run_alone(one, one.tokens)

    def run_alone(self, one: Alone, tokens: list[int]) -> mx.array:
        y = None
        for stage, caches in zip(self.stages, one.caches, strict=True):
            y = stage(mx.array([tokens]), caches, y, len(tokens))
        assert y is not None
        mx.eval(y)
        return y[0]

    def step(self, *wanted: tuple[int, int]) -> float:
        """Run (sequence, rows) and compare: the largest difference, in units of the largest logit."""
        expected, slices = [], []
        for number, count in wanted:
            one = self.alone[number]
            start, new = len(one.tokens), one.next_tokens(count)
            expected.append(self.run_alone(one, new))
            slices.append((number, start, new, 0))
            one.tokens += new
        hidden, reference = self.planned.run(*slices), mx.concatenate(expected)
        assert hidden.shape == reference.shape
        return float((mx.abs(hidden - reference).max() / mx.abs(reference).max()).item())


@pytest.mark.parametrize(("name", "way"), [("llama", Way.ROWS), ("gemma3_text", Way.ROWS), ("qwen3_next", Way.MIXED)])
def test_stages_that_are_only_timed_find_the_same_way_without_computing(name: str, way: Way):
    """``tests/matrix/table`` has the ways that trials found; of 131 configurations one, phi3small's, is another."""
    model, _ = tiny.build(name)
    step = StepModel(StageModel(model, 1, len(model.layers)), exact=True)
    assert step.choose_by_form() is step.way is way


@settings(max_examples=4)
@given(data=st.data(), name=st.sampled_from(["llama", "qwen3", "gemma3_text", "qwen3_moe"]))
def test_any_steps_are_exact(data: st.DataObject, name: str):
    """Sequences join, leave, go back and share steps in every way; not a bit changes."""
    both = Both(name)
    numbers = [both.open() for _ in range(3)]
    for _ in range(data.draw(st.integers(4, 9))):
        match data.draw(
            st.sampled_from(["step", "step", "step", "decode", "decode", "decode", "open", "close", "back"])
        ):
            case "open":
                numbers.append(both.open())
            case "close" if len(numbers) > 2:
                both.close(numbers.pop(data.draw(st.integers(0, len(numbers) - 1))))
            case "back":
                number = data.draw(st.sampled_from(numbers))
                both.rewind(number, min(3, len(both.alone[number].tokens)))
            case "decode":
                assert both.step(*[(n, 1) for n in data.draw(st.permutations(numbers))]) == 0
            case _:
                some = data.draw(st.lists(st.sampled_from(numbers), min_size=1, unique=True))
                assert both.step(*[(n, data.draw(st.sampled_from([1, 1, 2, 5, 17]))) for n in some]) == 0


@pytest.mark.parametrize("exact", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_cohorts_over_many_lengths(exact: bool):
    """Long enough that arrays grow, with members of equal and of unequal length."""
    both = Both("llama", exact=exact)
    a, b, c, d = (both.open() for _ in range(4))
    assert both.step((a, 250), (b, 250), (c, 130), (d, 40)) <= ROUNDING
    worst = 0.0
    for _ in range(12):
        worst = max(worst, both.step((a, 1), (b, 1), (c, 1), (d, 1)))
    assert both.pools[0].at(a, 262).cohort is both.pools[0].at(b, 262).cohort is not None
    both.close(b)
    worst = max([worst, *(both.step((d, 1), (c, 1), (a, 1)) for _ in range(3))])
    assert worst == 0 if exact else worst <= ROUNDING


@pytest.mark.parametrize(
    ("lengths", "exact", "groups"),
    [
        ([5, 5, 5], True, [[0, 1, 2]]),
        ([5, 6, 5], True, [[0, 2], [1]]),
        ([5, 200, 255], False, [[0, 1, 2]]),
        ([300, 600, 620, 1100], False, [[0], [1, 2], [3]]),
        ([], False, []),
    ],
)
def test_who_shares_a_call(lengths: list[int], exact: bool, groups: list[list[int]]):
    assert share_calls(lengths, pads=not exact) == groups


def cohort(count: int) -> tuple[Both, list[int]]:
    """Sequences that decode together, on one stage."""
    both = Both("llama", ())
    numbers = [both.open() for _ in range(count)]
    both.step(*[(n, 20) for n in numbers])
    both.step(*[(n, 1) for n in numbers])
    return both, numbers


def test_who_ends_takes_its_bytes_along():
    """Nobody holds them: neither the cache list of the last step, nor a cohort with one sequence left in it."""
    both, numbers = cohort(8)
    pool = both.pools[0]
    held, gone = held_in(pool), weakref.ref(pool.at(numbers[0], 21).cohort)
    for number in numbers[1:]:
        both.close(number)
    assert pool.at(numbers[0], 21).cohort is None
    assert held_in(pool) == held / 8
    both.close(numbers[0])
    assert held_in(pool) == 0
    assert gone() is None


def test_a_member_left_behind_does_not_keep_the_others_bytes():
    """As a session that is held while the others go on."""
    both, numbers = cohort(4)
    both.step(*[(n, 1) for n in numbers[1:]])
    left = both.pools[0].at(numbers[0], 21)
    assert left.cohort is None
    assert nbytes([left]) == held_in(both.pools[0]) / 4
    assert both.step((numbers[0], 1), (numbers[1], 1)) == 0


@pytest.mark.parametrize("more", [0, 3], ids=["equal lengths", "unequal lengths"])
def test_a_layer_of_a_cohort_has_no_loop_over_its_members(more: int):
    def calls(layers: int, members: int) -> int:
        """The calls that the host makes to build a step's graph ahead."""
        model, count = tiny.build("llama", num_hidden_layers=layers)[0], 0
        step = StepModel(StageModel(model, 0, layers), exact=False)
        step.use(Way.ROWS, shares_calls=True)
        caches = [step.stage.make_caches() for _ in range(members)]
        for i, one in enumerate(caches):
            step.run([SequenceRows(one, 0, 20 + more * i)], [1] * (20 + more * i), None)

        def noting(_frame: object, event: str, _argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        for _ in range(2):  # the first one makes the cohort
            parts = [SequenceRows(one, one.place.position, 1, 1) for one in caches]
            count = 0
            sys.setprofile(noting)
            try:
                Snapshot(part.caches for part in parts)
                step.run(parts, [1] * members, None)
                arrays_to_evaluate(parts)
            finally:
                sys.setprofile(None)
        return count

    of_one_layer = [calls(6, members) - calls(5, members) for members in (3, 12)]
    assert of_one_layer[0] == of_one_layer[1]


def test_choices_among_tokens_stay_each_sequence_s_own():
    """An indexer returns numbers of a sequence's tokens, or nothing while there are few: neither is a row."""
    parts = [SequenceRows(SequenceCaches([KVCache()], [], CachePlace()), 0, rows) for rows in (2, 1)]
    step = RowStep((RowsCall((parts[0],), 0), RowsCall((parts[1],), 2)))
    cache = RowCache(0, KVCache())
    cache.bind(step)
    choices = [mx.array([[[[1, 0], [0, 1]]]], mx.int32), None]
    made = iter(choices)
    rows, own = each_sequence(lambda x, _cache: (x + 1, next(made)), (mx.zeros((3, 1, 4)), cache), {})
    assert rows.shape == (3, 1, 4)
    seen = []
    each_sequence(lambda x, _cache, choice: seen.append(choice) or x, (rows, cache, own), {})
    assert seen == choices
