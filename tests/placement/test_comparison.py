"""This machine alone beside a cut: what a second machine brings, and why a cell has no figure."""

from dataclasses import replace

import pytest

from splitinfer.machine.costs import Costs
from splitinfer.machine.profile import LayerProfile, MachineProfile, ModelProfile, Profiles
from splitinfer.placement.asked import Aim, Asked
from splitinfer.placement.comparison import Comparison, beside, halved, held_in_words
from splitinfer.placement.plan import plan
from tests.placement.rigs import GB, rig
from tests.placement.test_pairs import two_macs

MODEL = ModelProfile("m", (LayerProfile("a", 10**9, 100),) * 12, 2 * 10**9, 0, hidden_row=100)
ASKED = Asked(context=1024, streams=8, prompt=16, answer=16)
STUDIO = MachineProfile("studio", {"a": Costs.line(1e-3, 1e-3)})


def shown(profiles: Profiles, asked: Asked = ASKED) -> Comparison:
    return beside(plan(profiles, asked, [Aim.CHAT]), Aim.CHAT)


def test_both_halves_are_as_alike_as_layers_allow():
    assert halved(MODEL).layers == (5, 7)  # 2 + 5 GB and 7 GB
    assert held_in_words(MODEL) == "With a second machine, this one would hold 7 GB of 14 GB."
    assert held_in_words(replace(MODEL, layers=MODEL.layers[:1])) == ""


def test_a_machine_alone_is_shown_with_another_one_like_it():
    found = shown(Profiles(MODEL, (STUDIO,)))
    assert found.headings == ("studio alone", "with a second one like it")
    names = ["fits", "one chat", "chat: 16 + 16 tokens", "8 at once", "a prompt of 4,096 tokens"]
    assert [row[0] for row in found.rows] == names
    _, one, turn, many, prompt = found.rows
    assert turn[1] == "564 ms"  # 12 layers of 1 ms and 16 rows of 1 ms; then 15 tokens of 24 ms
    assert one[1:] == ("42 tokens/s", "38 tokens/s")  # 12 layers of 1 ms and 1 ms for the row; then two hops of 1 ms
    assert many[1].endswith("tokens/s in total")
    assert prompt[1] == "49.5 s"
    assert found.sentence.startswith(
        "With a second machine like this one: one chat 1.1 times as slow, several at once 1."
    )
    one_layer = Profiles(replace(MODEL, layers=MODEL.layers[:1]), (STUDIO,))
    assert shown(one_layer).sentence == "It fits on studio."


def test_the_best_cut_over_several_machines_is_shown_where_one_alone_is_better_too():
    found = shown(rig((1, 3)), Asked(context=8192, acceptance=0.7))
    alone, drafts, both = found.headings  # drafts are beside what is best
    assert (alone, drafts) == ("m0 alone", "with drafts, 70% right")
    assert both.startswith("m0 ")
    assert "Drafts make one chat" in found.sentence
    assert len(list(found.lines())) == 3


@pytest.mark.parametrize(
    ("free", "cells", "sentence"),
    [
        ((8 * GB, 8 * GB), ["does not fit: 8 chats of 4,096 tokens need", "tokens/s in total"], "several at once fit,"),
        ((5 * GB, 8 * GB), ["does not fit: 8 chats", "tokens/s in total"], "it fits, and does not on m0 alone."),
        ((2 * GB, 2 * GB), ["does not fit"], "It does not fit on m0."),
    ],
)  # fmt: skip
def test_a_cell_that_cannot_be_had_says_why(free: tuple[int, int], cells: list[str], sentence: str):
    profiles = rig((1, 1), free=free)
    found = shown(replace(profiles, model=replace(profiles.model, draft=None)), Asked(context=8192, streams=8))
    assert all(said in cell for said, cell in zip(cells, found.rows[3][1:], strict=True))
    assert sentence in found.sentence


def test_tensor_parallel_has_a_column_of_its_own():
    found = shown(two_macs(20e-6), Asked())
    assert found.headings[2] == "tensor parallel: m0+m1 64"
    assert "With m1, tensor parallel: one chat 1.8 times as fast" in found.sentence
