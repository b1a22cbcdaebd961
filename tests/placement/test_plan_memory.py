"""What fits: the arithmetic of loading and admitting, machines that stages share, and what would help."""

from dataclasses import replace

import pytest

from splitinfer.core.kv.budget import BLOCK, KV_SHARE, STAGE_MARGIN, KVBudget, StageKV, use_of
from splitinfer.core.layout import LOCAL
from splitinfer.machine.profile import Profiles
from splitinfer.placement.asked import Aim, Asked
from splitinfer.placement.cuts import Cut, on_grid, orders
from splitinfer.placement.memory import Memory
from splitinfer.placement.remedies import lacking, shortage
from tests.placement.rigs import GB, MODEL, rig

_CUT = Cut((0, 1), (8, 4))
_NO_DRAFT = Asked()


def test_what_a_machine_lacks_is_what_it_needs_to_load_and_to_admit():
    memory = Memory(rig((1, 1), free=(10 * GB, 3 * GB)), _NO_DRAFT)
    first, last = memory.lacks(_CUT, 8192, 4)
    weights = MODEL.weights(0, 8), MODEL.weights(8, 12)
    tokens = 4 * use_of(8192).tokens
    assert first == weights[0] + round(8 * 4096 * tokens / KV_SHARE) - 10 * GB
    assert last == weights[1] + round(4 * 4096 * tokens / KV_SHARE) - 3 * GB
    # With little KV the margin decides, which loading wants to see free.
    assert memory.lacks(_CUT, 1, 1)[1] == weights[1] + 4 * 4096 + STAGE_MARGIN - 3 * GB


def test_the_longest_context_is_that_of_the_live_budget():
    profiles = rig((1, 1), free=(8 * GB, 6 * GB))
    memory = Memory(profiles, _NO_DRAFT)
    for layers in ((4, 8), (8, 4), (11, 1)):
        cut = Cut((0, 1), layers)
        stages = [
            StageKV(int((profiles.machines[m].free_bytes - MODEL.weights(a, b)) * KV_SHARE), 4096 * (b - a))
            for m, a, b in cut.stages()
        ]
        longest = memory.longest(cut)
        assert longest == KVBudget(tuple(stages)).longest(MODEL.context_length)
        assert memory.fits(cut, longest, 1)
        assert longest == MODEL.context_length or not memory.fits(cut, longest + BLOCK, 1)
    assert memory.longest(Cut((0, 1), (1, 11))) == 0  # 5.75 GB of weights, and the margin
    assert Memory(rig((1, 1), free=(8 * GB, GB)), _NO_DRAFT).longest(_CUT) == 0


def test_drafts_and_what_is_spared_take_memory_of_the_coordinator():
    profiles = rig((1, 1), free=(10 * GB, 10 * GB))
    plain, drafting, sparing = (
        Memory(profiles, asked).lacks(_CUT, 8192, 1)
        for asked in (_NO_DRAFT, Asked(acceptance=0.7), Asked(spare_bytes=GB))
    )
    draft = MODEL.draft
    assert draft is not None
    assert drafting[0] - plain[0] == draft.weights + 8192 * draft.kv_per_token
    assert drafting[1] == plain[1]
    assert [a - b for a, b in zip(sparing, plain, strict=True)] == [GB, GB]


def test_a_larger_share_for_kv_holds_more():
    profiles = rig((1, 1), free=(8 * GB, 6 * GB))
    half, most = (Memory(profiles, Asked(kv_share=share)).longest(_CUT) for share in (0.5, 0.9))
    assert most == pytest.approx(1.8 * half, rel=0.05)


def test_stages_of_one_machine_share_its_memory():
    apart = rig((1, 1), free=(5 * GB, 5 * GB))
    here = replace(apart, machines=(apart.machines[0], replace(apart.machines[1], address=LOCAL)))
    assert Memory(apart, _NO_DRAFT).fits(Cut((0, 1), (6, 6)), 8192, 1)
    lacks = Memory(here, _NO_DRAFT).lacks(Cut((0, 1), (6, 6)), 8192, 1)
    assert lacks[0] == lacks[1] > GB


def test_scores_count_for_each_token_of_context():
    profiles = rig((1, 1), free=(8 * GB, 8 * GB))
    scored = replace(profiles, machines=tuple(replace(m, scores=2**16) for m in profiles.machines))
    plain, with_scores = (Memory(each, _NO_DRAFT) for each in (profiles, scored))
    assert with_scores.longest(_CUT) < plain.longest(_CUT)


@pytest.mark.parametrize("free", [(3 * GB, 2 * GB), (2 * GB, GB), (GB, 6 * GB), (5 * GB, GB)])
@pytest.mark.parametrize("aim", list(Aim))
def test_each_remedy_makes_it_fit_and_little_less_does_not(free: tuple[int, int], aim: Aim):
    profiles, asked = rig((1, 2), free=free), Asked(streams=6, acceptance=0.6)
    found = shortage(profiles, asked, aim)
    context, sequences = found.context_asked, found.sequences

    def fits(what: Profiles, tokens: int = context, count: int = sequences) -> bool:
        memory = Memory(what, asked)
        cuts = on_grid(orders(len(what.machines), 12, uses_all=False), 12)
        return any(memory.fits(cut, tokens, count) for cut in cuts)

    if found.lacking <= 0:
        assert fits(profiles)
        return
    assert not fits(profiles)
    assert (found.machine is None) == (found.first > 0) == (free[0] == GB)
    other = replace(profiles.machines[1], name="other", address="tcp://other:1")
    for factor, fit in ((1.0, True), (0.95, False)):
        further = replace(other, free_bytes=int(factor * (found.machine or 1e18)))
        assert fits(replace(profiles, machines=(*profiles.machines, further))) == (fit and not found.first)
    if found.context is not None:
        assert fits(profiles, found.context)
        assert found.context + BLOCK >= context or not fits(profiles, found.context + BLOCK)
    if found.streams is not None:
        assert fits(profiles, context, found.streams)
        assert not fits(profiles, context, found.streams + 1)
    if found.weights is not None:
        for share, fit in ((found.weights, True), (found.weights + 0.02, False)):
            layers = tuple(replace(each, weights=int(share * each.weights)) for each in MODEL.layers)
            model = replace(MODEL, layers=layers, embedding=int(share * MODEL.embedding), head=int(share * MODEL.head))
            assert fits(replace(profiles, model=model)) == fit


def test_what_is_lacking_where_all_machines_must_have_layers():
    profiles = rig((1, 1), free=(20 * GB, GB // 2))
    assert lacking(profiles, _NO_DRAFT, 8192, 1) <= 0 < lacking(profiles, Asked(uses_all=True), 8192, 1)
