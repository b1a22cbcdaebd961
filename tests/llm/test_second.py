"""What a second machine would bring is computed from the model's bytes and the machine's costs."""

import pytest

from splitinfer.llm.second import alone_in_words, figures, halved
from splitinfer.machine.costs import Costs
from splitinfer.machine.profile import LayerProfile, MachineProfile, ModelProfile, Profiles
from splitinfer.placement.asked import Asked

MODEL = ModelProfile("m", (LayerProfile("a", 10**9, 100),) * 12, 2 * 10**9, 0, hidden_row=100)
ASKED = Asked(context=1024, streams=8, prompt=16, answer=16)
STUDIO = MachineProfile("studio", {"a": Costs.line(1e-3, 1e-3)})


def test_both_halves_are_as_alike_as_layers_allow():
    assert halved(MODEL).layers == (5, 7)  # 2 + 5 GB and 7 GB


def test_two_like_machines_halve_a_long_prompt_and_not_a_chat():
    alone, both = figures(Profiles(MODEL, (STUDIO,)), ASKED)
    assert both.ttft < 0.75 * alone.ttft
    assert both.many > 1.4 * alone.many
    assert both.one < alone.one == pytest.approx(1000 / 24, rel=0.05)  # 12 layers of 1 ms and 1 ms for the row


def test_bytes_are_said_at_once_and_speeds_where_costs_are_known():
    unmeasured = alone_in_words(MODEL, None, ASKED)
    assert "would leave 7 GB of the 14 GB of weights here, which frees 7 GB. After an answer, /plan" in unmeasured
    alone, both = figures(Profiles(MODEL, (STUDIO,)), ASKED)
    said = alone_in_words(MODEL, STUDIO, ASKED)
    assert f"8 requests at once {both.many:.3g} tokens per second instead of {alone.many:.3g}, " in said
    assert f"a single chat {both.one:.3g} instead of {alone.one:.3g} (predicted" in said


def test_one_layer_is_not_cut():
    one = ModelProfile("m", MODEL.layers[:1])
    assert alone_in_words(one, STUDIO, ASKED) == "All 1 layers are on this machine."
