"""Layouts for the machines that are left: who gets the layers, what room there is, and what is missing."""

from dataclasses import replace

import pytest

from splitinfer.core.layout import Layout, StageSpec, lay_out
from splitinfer.errors import CannotFit
from splitinfer.machine.costs import Costs
from splitinfer.machine.profile import DraftProfile, LayerProfile, MachineProfile, ModelProfile, Profiles
from splitinfer.placement.asked import Asked
from splitinfer.placement.without import alike, without

MB = 10**6
MODEL = ModelProfile("m", (LayerProfile("a", 100 * MB, 1000),) * 12, MB, MB, hidden_row=100, context_length=8192)
ASKED = Asked(context=4096)


def machine(name: str, megabytes: int, seconds: float = 1e-3) -> MachineProfile:
    address = None if name == "studio" else f"tcp://{name}:1"
    return MachineProfile(name, {"a": Costs.line(seconds, 0.0)}, address, free_bytes=megabytes * MB)


def profiles(*machines: MachineProfile, model: ModelProfile = MODEL) -> Profiles:
    return Profiles(model, machines)


def layout(*layers: int, **changes: object) -> Layout:
    named = zip(("studio", "mini", "air"), layers, strict=False)
    stages = lay_out((name, n, None if name == "studio" else f"tcp://{name}:1") for name, n in named)
    return Layout(stages, "m", **changes)  # type: ignore[arg-type]


def gone(written: Layout, *names: str) -> list[StageSpec]:
    return [one for one in written.workers if one.name in names]


def test_the_coordinator_takes_all_layers_if_it_can():
    written = layout(6, 6)
    both = profiles(machine("studio", 4000), machine("mini", 4000))
    found = without(both, ASKED, written, gone(written, "mini"), 500)
    assert (found.layout.cut, found.room, found.drafts) == ("12", 4096, True)
    assert found.speed == pytest.approx(1 / 12e-3, rel=0.1)


def test_the_others_share_the_layers_by_memory():
    """And the codec and transport of those that stay, and the layout's other values, are kept."""
    written = layout(4, 4, 4, draft="ngram", kv_format="k8v8").with_codec("fp16")
    three = profiles(machine("studio", 1200), machine("mini", 4000), machine("air", 1200))
    found = without(three, ASKED, written, gone(written, "mini"), 500)
    first, second = found.layout.stages
    assert (second.name, second.address, second.codec) == ("air", "tcp://air:1", "fp16")
    assert 3 <= first.num_layers <= 9
    assert (found.layout.draft, found.layout.kv_format) == ("ngram", "k8v8")


def test_open_requests_have_room_where_the_whole_context_has_none():
    written, tight = layout(6, 6), profiles(machine("studio", 1500), machine("mini", 4000))
    found = without(tight, replace(ASKED, context=8192), written, gone(written, "mini"), 700)
    assert found.room == 700


def test_what_is_missing_is_said():
    written = layout(6, 6)
    small = profiles(machine("studio", 700), machine("mini", 4000))
    with pytest.raises(CannotFit, match=r"studio cannot hold the model without mini: 7\d\d MB of memory are missing"):
        without(small, ASKED, written, gone(written, "mini"), 500)


def test_a_drafter_stays_out_where_it_has_no_room():
    heavy = replace(MODEL, draft=DraftProfile("eagle", 2000 * MB, like="a"))
    written, drafting = layout(6, 6, draft="eagle"), replace(ASKED, acceptance=0.7)
    for megabytes, has_drafter in (4500, True), (2500, False):
        both = profiles(machine("studio", megabytes), machine("mini", 9000), model=heavy)
        found = without(both, drafting, written, gone(written, "mini"), 500)
        assert (found.drafts, found.layout.draft) == (has_drafter, "eagle")


@pytest.mark.parametrize(
    ("across", "lost", "megabytes", "names"),
    [
        (("local", "tcp://mini:1"), 1, 1600, ["both/0"]),
        (("tcp://air:1", "tcp://mini:1"), 0, 1450, ["coordinator", "both/1"]),
    ],
)
def test_of_two_machines_of_a_stage_one_is_left(across: tuple[str, ...], lost: int, megabytes: int, names: list[str]):
    written = Layout((StageSpec("both", 0, 12, across=across),), "m")
    both = MachineProfile("both", {"a": Costs.line(1e-3, 0.0)}, free_bytes=megabytes * MB)
    found = without(profiles(both), ASKED, written, [written.workers[lost]], 500)
    assert [stage.name for stage in found.layout.stages] == names
    assert found.layout.stages[-1].address == (None if len(names) == 1 else "tcp://mini:1")
    assert not any(stage.across for stage in found.layout.stages)


def test_a_stage_across_two_machines_stays_while_both_are_there():
    stages = (StageSpec("both", 0, 8, across=("local", "tcp://mini:1")), StageSpec("air", 8, 12, "tcp://air:1"))
    written = Layout(stages, "m")
    both = replace(machine("studio", 3000), name="both")
    found = without(profiles(both, machine("air", 3000)), ASKED, written, gone(written, "air"), 500)
    assert (found.layout.cut, found.layout.stages[0].across) == ("12x2", stages[0].across)


def test_machines_of_unknown_speed_count_as_alike():
    """One machine is then enough, if it has room."""
    written = layout(4, 4, 4)
    blank = [replace(machine(name, 4000), layers={"a": Costs()}) for name in ("studio", "mini", "air")]
    found = without(alike(profiles(*blank)), ASKED, written, gone(written, "mini"), 500, is_known=False)
    assert (found.layout.cut, found.speed) == ("12", None)
