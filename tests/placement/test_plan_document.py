"""A plan as a layout file and in words: it loads again, and says what the figures say."""

import re
from dataclasses import replace

import yaml

from splitinfer.config import Layout
from splitinfer.placement.asked import Aim, Asked
from splitinfer.placement.comparison import layout_text
from splitinfer.placement.cuts import Cut
from splitinfer.placement.document import layout_of, why
from splitinfer.placement.plan import Best, CutFigures, Plan, Ways
from tests.placement.rigs import GB, rig

_ORIGIN = "By splitinfer 9.8.7 on 2026-01-31."
_FIGURES = CutFigures(21.25, 80.5, 12.0, 30.0, 4096, 42.0, 99.0)
_BEST = Best(Aim.CHAT, Cut((0, 2, 1), (6, 4, 2)), _FIGURES, Cut((0, 1), (11, 1)), 1.25)


def _plan(asked: Asked, *best: Best, free: tuple[int, ...] = (8 * GB, 3 * GB, 6 * GB)) -> Plan:
    ways = {each.aim: Ways(pipeline=each) for each in best}
    return Plan(rig((1, 2, 1), free=free), asked, {each.aim: each for each in best}, 121, ways)


def test_a_layout_file_loads_as_the_cut_that_was_planned():
    plan = _plan(Asked(acceptance=0.7), _BEST)
    text = layout_text(plan, _BEST, _ORIGIN)
    layout = Layout.from_dict(yaml.safe_load(text))
    assert [(each.name, each.num_layers, each.address) for each in layout.stages] == [
        ("m0", 6, None), ("m2", 4, "tcp://m2.local:5577"), ("m1", 2, "tcp://m1.local:5577"),
    ]  # fmt: skip
    assert (layout.model, layout.draft) == ("some/model", "some/draft")
    assert layout.stages == layout_of(plan, _BEST).stages
    for part in (_ORIGIN, "# m0 alone: fits: ", "# m0 6, m2 4, m1 2: ", "# with drafts, 70% right: ", "4,096"):
        assert part in text


def test_without_drafts_the_layout_has_none():
    best = replace(_BEST, figures=replace(_FIGURES, one_with_drafts=None, many_with_drafts=None))
    text = layout_text(_plan(Asked(), best), best, _ORIGIN)
    assert "draft" not in text
    assert Layout.from_dict(yaml.safe_load(text)).draft is None


def test_why_says_what_stages_take_and_what_memory_forces():
    plan = _plan(Asked(acceptance=0.7), _BEST)
    sentences = " ".join(why(plan, _BEST))
    assert re.match(r"Each token: [\d.]+ ms on m0, [\d.]+ ms on m2, [\d.]+ ms on m1\. ", sentences)
    assert "m0 11, m1 1 would be 25% faster, but" in sentences
    assert "GB of memory." in sentences
    alone = replace(_BEST, aim=Aim.THROUGHPUT, cut=Cut((0,), (12,)), faster=None)
    sentences = " ".join(why(plan, alone))
    assert sentences.startswith("Each step of one group of chats: ")
    assert "m1 gets no layers" in sentences
