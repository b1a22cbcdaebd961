"""The cut in force is compared with the best, by what its own steps have cost."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import stages

from splitinfer import SamplingParams
from splitinfer.core.layout import Layout, lay_out
from splitinfer.core.scheduler.cost_model import CostModel, Shape, StageCosts
from splitinfer.errors import RequestError
from splitinfer.llm import live_plan
from splitinfer.llm.rebalance import Rebalance, profiles_of, rebalance
from splitinfer.llm.setup import with_layers
from splitinfer.machine.profile import LayerProfile, ModelProfile, Profiles
from splitinfer.placement.asked import Aim, Asked
from splitinfer.wire.messages import Ready

GB = 10**9
MODEL = ModelProfile("m", (LayerProfile("a", 10**7, 100),) * 12, 10**6, 10**6, hidden_row=100, context_length=4096)
ASKED = Asked(context=1024, simulated=3, streams=2, answer=16, prompt=16)


def layout(*layers: int) -> Layout:
    return Layout(lay_out((f"s{i}", n, None if i == 0 else f"tcp://host{i}:1") for i, n in enumerate(layers)), "m")


def ready(stage: int, free: int = GB) -> Ready:
    return Ready(stage, 10**7, 100, 0, 100, free, None, True, None, None, "gpu")


def ran(found: Layout, *seconds_a_layer: float) -> CostModel:
    """The costs of a pipeline that has run, with machines of different speeds."""
    each = zip(found.stages, seconds_a_layer, strict=True)
    return CostModel([StageCosts.line(n * stage.num_layers, 0.0) for stage, n in each], hop=1e-4)


def test_what_steps_have_cost_is_divided_over_layers_and_head():
    found = layout(8, 4)
    profiles = profiles_of(MODEL, found, ran(found, 2e-3, 1e-3), [ready(0), ready(1, free=5)], 0.0)
    first, second = profiles.machines
    assert first.layers["a"].at(Shape(1)) == pytest.approx(2e-3, rel=0.05)
    whole = 4 * second.layers["a"].at(Shape(1)) + second.head.at(Shape(1))
    assert whole == pytest.approx(4e-3, rel=1e-6)
    assert second.free_bytes == 10**7 + 5
    assert profiles.link("s0", "s1").latency == 1e-4


def test_layers_go_to_the_quicker_machine():
    found = layout(8, 4)
    profiles = profiles_of(MODEL, found, ran(found, 3e-3, 1e-3), [ready(0), ready(1)], 0.0)
    better = rebalance(profiles, found, ASKED, Aim.THROUGHPUT)
    assert better.is_worth_it
    assert better.layout.stages[1].num_layers > 6
    assert better.gain > 1.5
    assert f"would give {better.gain:.2f} times the tokens a second" in better.text
    again = profiles_of(MODEL, better.layout, ran(better.layout, 3e-3, 1e-3), [ready(0), ready(1)], 0.0)
    settled = rebalance(again, better.layout, ASKED, Aim.THROUGHPUT)
    assert not settled.is_worth_it
    assert settled.layout == better.layout
    assert "is the best for throughput" in settled.text


def test_without_steps_nothing_is_known():
    with pytest.raises(RequestError, match="no step has been computed yet"):
        profiles_of(MODEL, layout(8, 4), CostModel.of(2), [ready(0), ready(1)], 0.0)


def test_a_running_pipeline_is_planned_and_recut(tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch):
    prompt, seen = stages.prompt(9), list[Profiles]()

    def other(profiles: Profiles, found: Layout, asked: Asked, aim: Aim) -> Rebalance:
        seen.append(profiles)
        assert (asked.context, aim) == (512, Aim.CONTEXT)
        return Rebalance(replace(found, stages=with_layers(found, [1, 3]).stages), 2.0, "better")

    monkeypatch.setattr(live_plan, "rebalance", other)
    with stages.pipeline(tiny_folder("llama"), [2, 2], draft="ngram") as llm:
        with pytest.raises(RequestError, match="no step has been computed yet"):
            llm.plan()
        before = llm.generate([prompt], SamplingParams(max_tokens=12))[0].token_ids
        found = llm.plan(Aim.CONTEXT)
        assert [machine.name for machine in seen[0].machines] == ["s0", "s1"]
        assert seen[0].machines[1].layers["attention"].at(Shape(1)) > 0
        assert llm.recut(found.layout) > 0
        assert llm.layout.cut == "1-3"
        assert llm.generate([prompt], SamplingParams(max_tokens=12))[0].token_ids == before
