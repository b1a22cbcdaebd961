"""Several models in one memory: what is loaded and what goes, decided without any of them."""

import random
from dataclasses import replace

import pytest

from splitinfer.server.residents import Bounds, Change, Resident, decide

ALL = Bounds(room=100)
A, B, C = (Resident(name, 40) for name in "abc")
MINI = frozenset(["mini"])


def loaded(one: Resident, rested: float = 0.0, using: int = 0) -> Resident:
    return replace(one, is_loaded=True, rested_since=rested, num_using=using)


@pytest.mark.parametrize(
    ("what", "models", "waiting", "bounds", "turn"),
    [
        ("nothing is loaded", [A, B], ["b"], ALL, Change(load="b")),
        ("there is room for both", [loaded(A), B], ["b"], ALL, Change(load="b")),
        ("who has rested longest goes", [loaded(A, 5), loaded(B, 3), C], ["c"], ALL, Change(("b",), "c")),
        ("one at a time is wanted", [loaded(A), B], ["b"], Bounds(100, most=1), Change(("a",), "b")),
        ("one in use stays while another can go", [loaded(A, 1, 2), loaded(B, 9), C], ["c"], ALL, Change(("b",), "c")),
        ("all are in use", [loaded(A, 1, 1), B], ["b"], Bounds(60), Change(leaving=frozenset("a"))),
        ("the older one comes first", [loaded(A, 1, 1), B, C], ["c", "b"], ALL, Change(load="c")),
        ("it is too large for any room", [loaded(A), Resident("d", 200)], ["d"], ALL, Change(("a",), "d")),
        ("one that has failed is loaded again", [replace(loaded(A), has_failed=True)], ["a"], ALL, Change(("a",), "a")),
        ("one that fails in use ends first", [replace(loaded(A, 0, 1), has_failed=True)], ["a"], ALL,
         Change(leaving=frozenset("a"))),
        ("nobody wants what it was to go for", [loaded(A), B], ["a"], Bounds(60), Change(load="a")),
        ("it has rested for long enough", [loaded(A, 39), loaded(B, 41)], [], Bounds(100, ttl=60), Change(("a",))),
        ("one in use does not rest", [loaded(A, 0, 1)], [], Bounds(100, ttl=60), Change()),
        ("a worker serves one", [loaded(replace(A, workers=MINI)), loaded(B), replace(C, needs=1, workers=MINI)], ["c"],
         ALL, Change(("a",), "c")),
        ("nothing is bounded in time", [loaded(A, -1e9)], [], ALL, Change()),
    ],
    ids=lambda value: value if isinstance(value, str) and " " in value else "",
)  # fmt: skip
def test_what_is_done_next(what: str, models: list[Resident], waiting: list[str], bounds: Bounds, turn: Change):
    assert decide(models, waiting, bounds, now=100.0) == turn


@pytest.mark.parametrize("seed", range(20))
def test_whoever_asks_is_served_and_nobody_loses_a_model_in_use(seed: int):
    """A thousand turns: requests come and end, and what is decided is done."""
    rng = random.Random(seed)
    bounds = Bounds(100, rng.choice([None, 1, 2]), rng.choice([None, 5.0]))
    models = {
        name: Resident(name, rng.randint(10, 100), frozenset(rng.sample(["mini", "air"], rng.randint(0, 2))))
        for name in "abcde"
    }
    waiting, waited = list[tuple[str, int]](), 0
    for now in range(1000):
        if rng.random() < 0.5:
            waiting.append((rng.choice("abcde"), now))
        for name, one in models.items():
            if ended := sum(rng.random() < 0.5 for _ in range(one.num_using)):
                models[name] = replace(one, num_using=one.num_using - ended, rested_since=now)
        turn = decide(list(models.values()), [name for name, _ in waiting], bounds, now)
        for name in turn.unload:
            assert models[name].num_using == 0
            models[name] = replace(models[name], is_loaded=False)
        if turn.load is not None:
            models[turn.load] = replace(models[turn.load], is_loaded=True)
            together = [one for one in models.values() if one.is_loaded]
            assert sum(one.needs for one in together) <= bounds.room
            assert bounds.most is None or len(together) <= bounds.most
            assert len(frozenset().union(*(one.workers for one in together))) == sum(
                len(one.workers) for one in together
            )
        for name, since in [*waiting]:
            if models[name].is_loaded and name not in turn.leaving:
                waiting.remove((name, since))
                waited = max(waited, now - since)
                models[name] = replace(models[name], num_using=models[name].num_using + 1, rested_since=now)
    assert waited < 60
