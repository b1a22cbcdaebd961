"""The cut in force is compared with the best, by what its own steps have cost."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import stages

from splitinfer import SamplingParams
from splitinfer.core.costs.model import CostModel
from splitinfer.core.costs.shape import Shape
from splitinfer.core.costs.stage import StageCosts
from splitinfer.core.layout import Layout, lay_out
from splitinfer.errors import RequestError
from splitinfer.llm.rebalance import Followed, LiveFigures, Rebalance, figures_of, rebalance
from splitinfer.llm.setup import with_layers
from splitinfer.machine.costs import Costs
from splitinfer.machine.profile import LayerProfile, LinkProfile, MachineProfile, ModelProfile, Profiles
from splitinfer.placement.asked import Aim, Asked
from splitinfer.placement.formulas import costs_of
from splitinfer.placement.pairs import with_pairs, with_sums
from splitinfer.wire.messages import Ready

GB = 10**9
MODEL = ModelProfile("m", (LayerProfile("a", 10**7, 100),) * 12, 10**6, 10**6, hidden_row=100, context_length=4096)
ASKED = Asked(context=1024, streams=2, answer=16, prompt=16)


def layout(*layers: int) -> Layout:
    return Layout(lay_out((f"s{i}", n, None if i == 0 else f"tcp://host{i}:1") for i, n in enumerate(layers)), "m")


def ready(stage: int, free: int = GB) -> Ready:
    return Ready(stage, 10**7, 100, 0, 100, free, None, True, None, None, "gpu")


def ran(found: Layout, *seconds_a_layer: float) -> CostModel:
    """The costs of a pipeline that has run, with machines of different speeds."""
    each = zip(found.stages, seconds_a_layer, strict=True)
    return computing(*(Costs(((1, n * stage.num_layers),)) for stage, n in each))


def live(found: Layout, costs: CostModel, measured: Profiles | None = None, free: int = GB) -> LiveFigures:
    said = [ready(i, free) for i in range(found.num_stages)]
    return figures_of(MODEL, found, costs, said, ASKED, measured)


def test_what_steps_have_cost_is_divided_over_layers_and_head():
    found = layout(8, 4)
    profiles = live(found, ran(found, 2e-3, 1e-3), free=5).profiles
    first, second = profiles.machines
    assert first.layers["a"].at(Shape(1)) == pytest.approx(2e-3, rel=0.05)
    whole = 4 * second.layers["a"].at(Shape(1)) + second.head.at(Shape(1))
    assert whole == pytest.approx(4e-3, rel=1e-6)
    assert second.free_bytes == 10**7 + 5
    assert profiles.link("s0", "s1").latency == 1e-4


def test_the_first_steps_on_a_busy_machine_say_little_of_long_contexts():
    own, took = StageCosts(), (0.20, 0.24, 1.10, 0.70, 0.62, 0.30, 0.80)
    for i, seconds in enumerate(3 * took):
        own.took(Shape(1, 36 + i), seconds)
    (machine,) = live(layout(12), CostModel([own])).profiles.machines
    assert min(took) < costs_of(MODEL, machine, 0, 12).at(Shape(1, 1000)) < max(took)


def test_layers_go_to_the_quicker_machine():
    found = layout(8, 4)
    better = rebalance(live(found, ran(found, 3e-3, 1e-3)), Aim.THROUGHPUT)
    assert better.is_worth_it
    assert better.layout.stages[1].num_layers > 6
    assert better.gain > 1.5
    assert f"would be {better.gain:.2f} times as fast as the current 8 + 4." in better.text
    settled = rebalance(live(better.layout, ran(better.layout, 3e-3, 1e-3)), Aim.THROUGHPUT)
    assert not settled.is_worth_it
    assert settled.layout == better.layout
    assert "is the best cut for throughput" in settled.text


def test_without_steps_nothing_is_known():
    with pytest.raises(RequestError, match="0 steps have been computed yet"):
        live(layout(8, 4), CostModel.of(2))


def machine(name: str, seconds_a_layer: float, step: float = 2e-3) -> MachineProfile:
    """A machine as it was measured; its steps take ``step`` seconds beside the layers."""
    layers = {"a": Costs.line(seconds_a_layer, seconds_a_layer / 2)}
    address = None if name == "s0" else f"tcp://host{name[1:]}:1"
    return MachineProfile(name, layers, address, step=step, free_bytes=GB)


def computing(*stages: Costs) -> CostModel:
    """What is learned of stages that cost so much, from steps of one row to eight."""
    learned = [StageCosts() for _ in stages]
    for i in range(100):
        for stage, own in zip(stages, learned, strict=True):
            own.took(Shape(1 + i % 8), stage.at(Shape(1 + i % 8)))
    return CostModel(learned, hop=1e-4)


def test_a_throttled_machine_shows():
    """Measured alike, 6-6 was the best; by now one takes three times as long, the fixed part of a step, too."""
    measured = Profiles(MODEL, (machine("s0", 1e-3), machine("s1", 1e-3)), (LinkProfile("s0", "s1", 1e-4),))
    found, stage = layout(6, 6), costs_of(MODEL, machine("s0", 1e-3), 0, 6)
    steady = live(found, computing(stage, costs_of(MODEL, machine("s1", 1e-3), 6, 12)), measured)
    assert steady.times == {"s0": pytest.approx(1, rel=1e-3), "s1": pytest.approx(1, rel=1e-3)}
    assert not rebalance(steady, Aim.THROUGHPUT).is_worth_it
    throttled = live(found, computing(stage, costs_of(MODEL, machine("s1", 1e-3).slower(3), 6, 12)), measured)
    assert throttled.times["s1"] == pytest.approx(3, rel=0.02)
    before, now = measured.machines[1], throttled.profiles.machines[1]
    assert now.step == pytest.approx(3 * before.step, rel=0.02)
    assert now.draft == before.draft, "no part of a stage's steps"
    better = rebalance(throttled, Aim.THROUGHPUT)
    assert better.is_worth_it
    assert better.layout.stages[0].num_layers > 7
    assert "s1 takes 3 times as long as it was measured to take; --measure measures it again." in better.text


def test_a_machine_that_has_no_layers_may_get_some():
    measured = Profiles(MODEL, (machine("s0", 1e-3), machine("s1", 1e-3), machine("s2", 1e-3)))
    found = layout(6, 6)
    slow = [costs_of(MODEL, machine("s0", 1e-3), 0, 6), costs_of(MODEL, machine("s1", 4e-3), 6, 12)]
    better = rebalance(live(found, computing(*slow), measured), Aim.THROUGHPUT)
    assert "s2" in [stage.name for stage in better.layout.stages]
    assert better.is_worth_it


@pytest.mark.parametrize(("sum_seconds", "is_worth_it"), [(2e-5, False), (2e-3, True)])
def test_two_machines_that_are_one_stage_show_what_their_sums_take(sum_seconds: float, is_worth_it: bool):
    """Estimated by the link, they were worth it. Where they take longer, the layers are better cut between both."""
    half = replace(MODEL, layers=(LayerProfile("a", MODEL.layers[0].weights // 2, 50, sums=2),) * 12)
    alike = (machine("s0", 1e-3), machine("s1", 1e-3))
    measured = Profiles(replace(MODEL, half=half), alike, (LinkProfile("s0", "s1", 1e-5),))
    across = ("local", "tcp://host1:1")
    found = Layout(lay_out([("s0+s1", 12, None, {"across": across})]), "m")
    computed = with_pairs(with_sums(measured, ("s0", "s1"), Costs.line(sum_seconds, 0))).machines[-1]
    figures = live(found, computing(costs_of(MODEL, computed, 0, 12)), measured)
    learned = figures.profiles.link("s0", "s1").sums
    assert learned.rows(1) == pytest.approx(sum_seconds, rel=0.1)
    better = rebalance(figures, Aim.CHAT)
    assert better.is_worth_it == is_worth_it
    assert better.layout == found if not is_worth_it else not better.layout.stages[0].across


def test_profiles_of_other_machines_are_of_no_use():
    measured, found = Profiles(MODEL, (machine("s0", 1e-3), machine("other", 1e-3))), layout(8, 4)
    assert live(found, ran(found, 2e-3, 1e-3), measured).times == {}


def test_a_running_pipeline_is_planned_and_recut(tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch):
    prompt, seen = stages.prompt(9), list[Profiles]()

    def other(figures: LiveFigures, aim: Aim) -> Rebalance:
        seen.append(figures.profiles)
        assert (figures.asked.context, aim) == (512, Aim.CONTEXT)
        return Rebalance(with_layers(figures.layout, [1, 3]), 2.0, "better")

    monkeypatch.setattr("splitinfer.llm.llm.rebalance", other)
    with stages.pipeline(tiny_folder("llama"), [2, 2], draft="ngram") as llm:
        with pytest.raises(RequestError, match="0 steps have been computed yet"):
            llm.plan()
        before = llm.generate([prompt], SamplingParams(max_tokens=40))[0].token_ids
        found = llm.plan(Aim.CONTEXT)
        assert [machine.name for machine in seen[0].machines] == ["s0", "s1"]
        assert seen[0].machines[1].layers["kind 1"].at(Shape(1)) > 0
        assert llm.outcome() is None, "no advice was followed"
        assert llm.follow(found) > 0
        assert llm.layout.cut == "1-3"
        assert llm.outcome() is None, "no step has been computed since"
        assert llm.generate([prompt], SamplingParams(max_tokens=40))[0].token_ids == before
        assert llm.outcome(acts=False) is not None
        monkeypatch.setattr(Followed, "gain", lambda _self, _costs: 0.8)
        slower = "1-3 is 0.80 times as fast as 2-2 was, for the same steps, so 2-2 is"
        assert [llm.outcome(acts=False) for _ in range(2)] == [f"{slower} to be loaded again."] * 2
        assert llm.layout.cut == "1-3"
        assert llm.outcome() == f"{slower} in force again."
        assert llm.layout.cut == "2-2"
        assert llm.outcome() is None, "it is told once"


@pytest.mark.parametrize(("aim", "gain"), [(Aim.CHAT, 1 / 1.5), (Aim.THROUGHPUT, 0.5)])
def test_advice_that_was_followed_is_judged_by_the_same_steps(aim: Aim, gain: float):
    before, worse = ran(layout(6, 6), 1e-3, 1e-3), ran(layout(6, 6), 1e-3, 2e-3)
    before.hop = worse.hop = 0.0
    followed = Followed.now(layout(6, 6), aim, before)
    assert followed.gain(before) == pytest.approx(1, rel=0.01)
    assert followed.gain(worse) == pytest.approx(gain, rel=0.02)
    assert followed.gain(CostModel.of(2)) is None


def test_what_was_never_measured_is_left_out():
    """Steps of one row and of short prompts say nothing of eight at once, nor of a prompt of 4,096 tokens."""
    own = StageCosts()
    for i in range(40):
        own.took(Shape(1, 40 + i), 0.01 + 0.0001 * (i % 3))
    figures = figures_of(MODEL, layout(12), CostModel([own]), [ready(0)], replace(ASKED, streams=8), None)
    shown = rebalance(figures, Aim.CHAT).beside
    _, one, _, several, prompt = shown.rows
    assert one[1].startswith("100 tokens/s (")
    assert several[0] == "4 at once"
    assert prompt[1] == "not known: measured up to 1 tokens a step"


def test_nothing_is_advised_by_steps_that_differ():
    costs = [StageCosts(), StageCosts()]
    for i in range(60):
        for own, seconds in zip(costs, (0.01 * (1 + 2 * (i // 4 % 2)), 0.001), strict=True):
            own.took(Shape(1, 40), seconds)
    found = rebalance(live(layout(6, 6), CostModel(costs)), Aim.CHAT)
    assert not found.is_worth_it
    assert found.text.startswith("No cut is advised. On s0 the same step took up to ")
