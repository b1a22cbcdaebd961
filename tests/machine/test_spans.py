"""Which layers are timed, and that what they cost comes out of the timings of spans, whatever the model's kinds."""

import random
from collections import Counter

import pytest

from splitinfer.core.costs.shape import Shape
from splitinfer.core.costs.stage import StageCosts
from splitinfer.machine.profile import LayerProfile, ModelProfile
from splitinfer.machine.spans import Chosen, Span, Timings, choose, fit

ROWS = (1, 2, 4, 8, 16, 32, 128, 512)
PLENTY = 2**50
GB = 10**9


def model(kinds: str, weights: int = 500 * 2**20, head: int = 800 * 2**20, per_token: int = 4096) -> ModelProfile:
    """A model with a layer for each letter; small letters have no KV that grows."""
    layers = (LayerProfile(kind, weights, per_token if kind.isupper() else 0) for kind in kinds)
    return ModelProfile("m", tuple(layers), embedding=head, head=head, hidden_row=10_240)


class Rig:
    """A device of known costs."""

    def __init__(self, kinds: str, step: float, noise: float = 0.0) -> None:
        self.kinds, self.step, self._random, self._noise = kinds, step, random.Random(1), noise
        self.costs = {
            kind: StageCosts.through({1: 1e-3 * (n + 1), 8: 1.2e-3 * (n + 1), 512: 40e-3 * (n + 1)}, *self.slopes(kind))
            for n, kind in enumerate(dict.fromkeys(kinds))
        }
        self.head = StageCosts.line(2e-3, 1e-4)

    def slopes(self, kind: str) -> tuple[float, float]:
        return (4e-8, 2e-8) if kind.isupper() else (0.0, 0.0)

    def seconds(self, span: Span, shape: Shape) -> float:
        layers = sum(self.costs[kind].at(shape) for kind in self.kinds[span.start : span.end])
        head = 0.0
        if span.end == len(self.kinds):
            head = self.head.at(Shape(1 if shape.chunk_context else shape.rows))
        return (self.step + layers + head) * self._random.uniform(1 - self._noise, 1 + self._noise)

    def timings(self, chosen: Chosen) -> Timings:
        found = Timings()
        for span in chosen.spans:
            shapes = {n: Shape(n, 3 * n) if n <= 32 else Shape(n, 0, n * n // 2) for n in ROWS}
            found.by_rows[span] = {n: (shape, self.seconds(span, shape)) for n, shape in shapes.items()}
        for kind, single in chosen.singles.items():
            if kind.isupper():
                much = (Shape(8, 16_000), Shape(512, 0, 700_000), Shape(512, 0, 10**6))
                found.contexts[kind] = [(shape, self.seconds(single, shape)) for shape in much]
        return found


@pytest.mark.parametrize("kinds", ["A" * 66, "aaaB" * 9, "Ab" * 12, "C" + "A" * 60, "A" * 11 + "B", "AAB", "AB"])
def test_what_layers_cost_comes_out(kinds: str):
    rig = Rig(kinds, step=0.4e-3)
    chosen = choose(model(kinds), PLENTY)
    found = fit(model(kinds), chosen, rig.timings(chosen))
    single = {kind for kind in kinds if Counter(kinds)[kind] == 1 and kinds.index(kind) == len(kinds) - 1}
    for kind in set(kinds) - single:  # a kind that only the last layer has cannot be told from the head
        for shape in (Shape(1, 1000), Shape(8, 8), Shape(20, 20_000), Shape(512, 0, 500_000)):
            assert found.layers[kind].at(shape) == pytest.approx(rig.costs[kind].at(shape), rel=0.02), (kind, shape)
    if len(kinds) > 3:
        assert found.step == pytest.approx(rig.step, rel=0.05)
    if not single and len(kinds) > 2:
        for rows in (1, 8, 32, 64):
            assert found.head.at(Shape(rows)) == pytest.approx(rig.head.at(Shape(rows)), rel=0.05)


def test_noise_of_a_percent_moves_little():
    rig = Rig("aaaB" * 9, step=0.4e-3, noise=0.01)
    chosen = choose(model(rig.kinds), PLENTY)
    found = fit(model(rig.kinds), chosen, rig.timings(chosen))
    for kind in "aB":
        for rows in (1, 8, 512):
            assert found.layers[kind].at(Shape(rows)) == pytest.approx(rig.costs[kind].at(Shape(rows)), rel=0.05)
    assert found.step == pytest.approx(rig.step, abs=0.1e-3)


@pytest.mark.parametrize("seed", range(20))
def test_no_layer_costs_nothing_on_a_busy_machine(seed: int):
    rig = Rig("aaaB" * 3, step=0.4e-3, noise=0.8)
    rig._random.seed(seed)
    chosen = choose(model(rig.kinds), PLENTY)
    found = fit(model(rig.kinds), chosen, rig.timings(chosen))
    assert all(costs.at(Shape(1)) > 0 for costs in found.layers.values())


def test_what_the_head_and_the_only_layer_of_a_kind_cost_is_divided_by_their_bytes():
    kinds = "AAAAB"
    chosen = choose(model(kinds, weights=300, head=100), PLENTY)
    timings = Rig(kinds, step=0.0).timings(chosen)
    timings.contexts.clear()
    found = fit(model(kinds, weights=300, head=100, per_token=0), chosen, timings)
    layer, head = found.layers["B"].at(Shape(1)), found.head.at(Shape(1))
    assert layer / head == pytest.approx(3, rel=0.1)


def test_a_row_of_kv_is_read_as_quickly_as_weights_where_long_contexts_were_not_timed():
    kinds = "A" * 12
    chosen = choose(model(kinds), PLENTY)
    timings = Rig(kinds, step=0.0).timings(chosen)
    timings.contexts.clear()
    costs = fit(model(kinds), chosen, timings).layers["A"]
    slope = costs.at(Shape(1, 10_000)) - costs.at(Shape(1))
    assert slope == pytest.approx(10_000 * 4096 / (500 * 2**20) * 1e-3, rel=0.05)


def test_larger_steps_that_there_was_no_time_for_are_on_the_line_through_the_others():
    kinds = "A" * 12
    chosen = choose(model(kinds), PLENTY)
    timings = Rig(kinds, step=0.0).timings(chosen)
    timings.contexts.clear()
    whole = fit(model(kinds, per_token=0), chosen, timings).layers["A"]
    for timed in timings.by_rows.values():
        del timed[512]
    cut = fit(model(kinds, per_token=0), chosen, timings).layers["A"]
    assert cut.at(Shape(128)) == pytest.approx(whole.at(Shape(128)), rel=0.01)
    assert cut.at(Shape(512)) == pytest.approx(whole.at(Shape(512)), rel=0.3)
    with pytest.raises(ValueError, match="no step was timed"):
        fit(model(kinds), chosen, Timings({span: {} for span in chosen.spans}))


def test_what_is_timed_of_a_model_of_many_kinds():
    chosen = choose(model("aaaB" * 9, weights=100 * 2**20), PLENTY)
    assert chosen.long == Span(1, 4)
    assert chosen.singles == {"a": Span(1, 2), "B": Span(3, 4)}
    assert chosen.spans == (Span(1, 2), Span(3, 4), Span(0, 1), Span(35, 36), Span(1, 4))


@pytest.mark.parametrize(("weights", "layers"), [(GB, 2), (150 * 2**20, 2), (60 * 2**20, 5), (10**6, 8)])
def test_the_longer_span_is_as_long_as_caches_are_large(weights: int, layers: int):
    long = choose(model("A" * 40, weights), PLENTY).long
    assert long is not None
    assert long.num_layers == layers


def test_the_longer_span_fits():
    long = choose(model("A" * 40, 10**6), 3 * 10**6 + 5).long
    assert long is not None
    assert long.num_layers == 3
    assert choose(model("A" * 40, GB), GB).long is None
    assert choose(model("A"), PLENTY).spans == (Span(0, 1),)


def test_a_model_of_one_layer_has_some_costs():
    chosen = choose(model("A"), PLENTY)
    rig = Rig("A", step=1e-3)
    found = fit(model("A"), chosen, rig.timings(chosen))
    total = found.step + found.layers["A"].at(Shape(1)) + found.head.at(Shape(1)) + found.embedding.at(Shape(1))
    assert total == pytest.approx(rig.seconds(Span(0, 1), Shape(1)), rel=0.05)
