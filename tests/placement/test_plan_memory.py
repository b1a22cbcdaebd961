"""What fits: the arithmetic of loading and admitting, machines that stages share, and what would help."""

import re
from dataclasses import replace

import pytest

from splitinfer.core.kv.budget import BLOCK, KV_SHARE, STAGE_MARGIN, KVBudget, StageKV
from splitinfer.core.layout import LOCAL
from splitinfer.machine.profile import DraftProfile
from splitinfer.placement.asked import Aim, Asked
from splitinfer.placement.cuts import Cut
from splitinfer.placement.document import shortage
from splitinfer.placement.formulas import Formulas
from splitinfer.placement.memory import Memory
from tests.placement.rigs import GB, MODEL, rig

_CUT = Cut((0, 1), (8, 4))
_NO_DRAFT = Asked()


def test_what_a_machine_lacks_is_what_it_needs_to_load_and_to_admit():
    memory = Memory(rig((1, 1), free=(10 * GB, 3 * GB)), _NO_DRAFT)
    first, last = memory.lacks(_CUT, 8192, 4).values()
    weights = MODEL.weights(0, 8), MODEL.weights(8, 12)
    tokens = 4 * KVBudget().use_of(8192).tokens
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
    assert [sparing[m] - plain[m] for m in (0, 1)] == [GB, GB]


def test_heads_take_memory_of_the_last_machine():
    profiles = rig((1, 1), free=(10 * GB, 10 * GB))
    heads = replace(profiles, model=replace(MODEL, draft=DraftProfile("mtp", GB // 2, 4096, like="layer")))
    plain, drafting = (Memory(heads, asked).lacks(_CUT, 8192, 1) for asked in (_NO_DRAFT, Asked(acceptance=0.7)))
    assert drafting[0] == plain[0]
    assert drafting[1] - plain[1] == GB // 2 + 8192 * 4096 + MODEL.embedding


def test_a_larger_share_for_kv_holds_more():
    profiles = rig((1, 1), free=(8 * GB, 6 * GB))
    half, most = (Memory(profiles, Asked(kv_share=share)).longest(_CUT) for share in (0.5, 0.9))
    assert most == pytest.approx(1.8 * half, rel=0.05)


def test_stages_of_one_machine_share_its_memory():
    apart = rig((1, 1), free=(5 * GB, 5 * GB))
    here = replace(apart, machines=(apart.machines[0], replace(apart.machines[1], address=LOCAL)))
    assert Memory(apart, _NO_DRAFT).fits(Cut((0, 1), (6, 6)), 8192, 1)
    lacks = Memory(here, _NO_DRAFT).lacks(Cut((0, 1), (6, 6)), 8192, 1)
    assert set(lacks) == {0}
    assert lacks[0] > GB


def test_scores_count_for_each_token_of_context():
    profiles = rig((1, 1), free=(8 * GB, 8 * GB))
    scored = replace(profiles, machines=tuple(replace(m, scores=2**16) for m in profiles.machines))
    plain, with_scores = (Memory(each, _NO_DRAFT) for each in (profiles, scored))
    assert with_scores.longest(_CUT) < plain.longest(_CUT)


def test_what_is_lacking_in_words():
    words = shortage(rig((1, 1), free=(5 * GB, 3 * GB)), Asked(streams=16), Aim.THROUGHPUT)
    assert re.fullmatch(
        r"For throughput, 16 streams of 8,192 tokens would need [\d.]+ GB more memory. Ways to make room: a context of "
        r"[\d,]+ tokens for one sequence, fewer bits a weight, one more machine. "
        r"\(KV may take 50% of what the weights leave free.\)",
        words,
    )
    used = shortage(rig((1, 1), free=(20 * GB, GB // 2)), Asked(uses_all=True), Aim.CHAT)
    assert used.startswith("For chat, a sequence of 8,192 tokens would need ")
    assert "a context" not in used


def test_experts_that_have_no_room_stay_on_disk():
    """They cost the time of the disk; a cut with a disk that was not measured is refused."""
    layers = tuple(replace(layer, experts=layer.weights // 2, chosen=layer.weights // 16) for layer in MODEL.layers)
    profiles = rig((1, 1), free=(4 * GB, 16 * GB))
    profiles = replace(profiles, model=replace(MODEL, layers=layers, draft=None))
    assert not Memory(profiles, _NO_DRAFT).fits(_CUT, 8192, 1)
    read = replace(profiles, machines=[replace(each, disk=float(GB)) for each in profiles.machines])
    memory, asked = Memory(read, _NO_DRAFT), _NO_DRAFT
    assert memory.fits(_CUT, 8192, 1)
    first, last = memory.in_memory(_CUT)
    assert 0 < first < last == 1
    missing = (1 - first) * sum(layer.chosen for layer in layers[:8]) / GB
    slow, quick = (1 / Formulas(each, asked).one(_CUT, None) for each in (read, profiles))
    assert slow - quick == pytest.approx(missing)
    roomy = replace(read, machines=[replace(each, free_bytes=64 * GB) for each in read.machines])
    assert Memory(roomy, asked).in_memory(_CUT) == [1, 1]
    assert Memory(roomy, asked).longest(_CUT) == Memory(replace(profiles, machines=roomy.machines), asked).longest(_CUT)
