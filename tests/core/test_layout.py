"""Layouts are right in themselves once they exist: ranges, names and addresses."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.core.layout import Layout, StageSpec, lay_out
from splitinfer.core.link_transport import LinkTransport
from splitinfer.errors import LayoutError

MINI = "tcp://mini.local:5577"


def two(address: str | None = MINI) -> Layout:
    return Layout(lay_out([("studio", 40, None), ("mini", 26, address)]), name="40-26.yaml")


def error_of(*stages: StageSpec) -> str:
    with pytest.raises(LayoutError) as caught:
        Layout(stages, name="x.yaml")
    return str(caught.value)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=8))
def test_every_layer_is_on_exactly_one_stage(counts: list[int]):
    layout = Layout(lay_out((f"s{i}", count, "local" if i else None) for i, count in enumerate(counts)))
    owned = [layer for stage in layout.stages for layer in range(stage.start, stage.end)]
    assert owned == list(range(sum(counts)))
    assert layout.num_layers == sum(counts)


def test_a_stage_across_two_machines_has_two_workers():
    ranks = ("local", f"mini.local#{'a' * 64}")
    layout = Layout(lay_out([("both", 40, None, {"across": ranks}), ("air", 26, "local")]))
    found = [(worker.name, worker.address, worker.start, worker.end, worker.key) for worker in layout.workers]
    assert found == [
        ("both/0", "local", 0, 40, None), ("both/1", MINI, 0, 40, "a" * 64), ("air", "local", 40, 66, None),
    ]  # fmt: skip
    assert (layout.cut, layout.has_own_stage, two().has_own_stage) == ("40x2-26", False, True)
    assert [[each.name for each in one.here] for one in (layout, two())] == [["both/0", "air"], ["studio"]]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"across": ("local",) * 3}, "is across 3, not 2 machines; give a third one a stage of its own"),
        ({"across": ("local",) * 2, "key": "a" * 64}, "is across two machines and has an address or a key of"),
        ({"sums": "jaccl"}, "has sums, which only a stage across two machines has"),
        ({"across": ("local",) * 2, "sums": "mpi"}, "has the sums 'mpi', which are unknown; known: jaccl, ring"),
        ({"across": ("local",) * 2, "sums_device": "rdma_en5:rdma_en3"}, "for jaccl"),
        ({"across": ("local", "local#" + "a" * 64)}, "has a key; only a worker at tcp://host:port has one"),
        ({"across": ("mini.local",) * 2}, "are both at tcp://mini.local:5577"),
    ],
)
def test_what_a_stage_across_machines_cannot_be(fields: dict[str, Any], reason: str):
    assert reason in error_of(StageSpec("both", 0, 4, **fields))


RDMA_LINK = LinkTransport("rdma")
NAMED = LinkTransport("auto", device="rdma_en2:rdma_en3")
BOTH = {"across": ("local", "mini.local"), "sums": "jaccl"}
LATER = {"across": ("mini.local", "air.local"), "sums": "jaccl"}


@pytest.mark.parametrize(
    ("first", "second", "is_refused"),
    [
        (BOTH, {"link_transport": RDMA_LINK}, True),
        (BOTH, {"link_transport": LinkTransport("auto")}, True),
        (BOTH, {"link_transport": LinkTransport("rdma", "ring")}, False),
        (BOTH, {}, False),
        ({**BOTH, "sums": "ring"}, {"link_transport": RDMA_LINK}, False),
        ({**BOTH, "sums_device": "rdma_en5:rdma_en2"}, {"link_transport": NAMED}, True),
        ({**BOTH, "sums_device": "rdma_en2:rdma_en5"}, {"link_transport": NAMED}, False),
        ({}, {**LATER, "link_transport": RDMA_LINK}, True),
        ({}, {**LATER, "sums_device": "rdma_en3:rdma_en5", "link_transport": NAMED}, True),
        ({}, {**LATER, "sums_device": "rdma_en2:rdma_en5", "link_transport": NAMED}, False),
    ],
)  # fmt: skip
def test_a_link_and_sums_do_not_share_an_rdma_device(first: dict[str, Any], second: dict[str, Any], is_refused: bool):
    """Devices that are not named may be the same one."""
    address = None if second.get("across") else "tcp://other.local:5577"
    stages = StageSpec("one", 0, 4, **first), StageSpec("two", 4, 8, address, **second)
    if not is_refused:
        Layout(stages)
        return
    said = error_of(*stages)
    assert "the link to stage 'two' of layout x.yaml and the sums of the stage across two machines beside it" in said
    assert said.endswith("give the link `transport: tcp`, or name two devices (`device`, `sums_device`)")


def test_check_names_the_numbers():
    two().check(66)
    with pytest.raises(LayoutError) as caught:
        two().check(48)
    assert str(caught.value) == "layout 40-26.yaml holds 66 layers (40 + 26), but the model has 48"
    with pytest.raises(LayoutError) as caught:
        Layout(lay_out([("all", 1, None)])).check(12)
    assert str(caught.value) == "layout (unnamed) holds 1 layer, but the model has 12"


def test_with_model_keeps_the_rest():
    layout = Layout(lay_out([("all", 12, None)]), model="a", draft="ngram", dtype="float16", name="x.yaml")
    assert layout.with_model("b") == Layout(layout.stages, "b", "ngram", "float16", "x.yaml")
    assert layout.model == "a"


def own(count: int, *rest: tuple[Any, ...]) -> tuple[StageSpec, ...]:
    return lay_out([("studio", count, None), *rest])


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        (own(40, ("mini", 0, MINI)), "stage 'mini' of layout x.yaml holds 0 layers; it needs at least 1"),
        (own(-3), "stage 'studio' of layout x.yaml holds -3 layers; it needs at least 1"),
        *((
            (StageSpec("studio", 0, 40), StageSpec("mini", start, 66, MINI)),
            f"stage 'mini' of layout x.yaml starts at layer {start}, but the stage before it ends at 40",
        ) for start in (39, 41)),
        ((StageSpec("studio", 1, 40),), "stage 'studio' of layout x.yaml starts at layer 1"),
        ((), "layout x.yaml has no stages; it needs at least one"),
        (own(40, ("studio", 26, MINI)), "two stages of layout x.yaml are named 'studio'; each needs its own name"),
        (lay_out([("studio", 40, "local")]), "stage 'studio' of layout x.yaml is the first, so it is this machine"),
        *((
            own(40, ("mini", 13, MINI), ("air", 13, again)),
            f"stages 'mini' and 'air' of layout x.yaml are both at {again.replace(':0', ':')}; each needs its own",
        ) for again in (MINI, "tcp://MINI.local:5577", "tcp://mini.local:05577")),
        (own(40, ("mini", 13, MINI, {"codec": "zip"})), "stage 'mini' of layout x.yaml has the codec 'zip', which is "
                                                        "unknown; known: none, fp16, fp8, int8"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(stages: tuple[StageSpec, ...], said: str):
    assert error_of(*stages).startswith(said)


def test_an_unknown_dtype_is_refused():
    with pytest.raises(LayoutError, match=r"dtype 'int8' of layout x\.yaml is unknown; known: auto, float32, float16"):
        Layout(own(12), dtype="int8", name="x.yaml")


def test_a_worker_without_an_address_is_yet_to_be_found():
    layout = two(address=None)
    assert [stage.name for stage in layout.to_find] == ["mini"]
    found = layout.with_found({"mini": (MINI, "ab" * 32), "another": (MINI, "cd" * 32)})
    assert (found.stages[1].address, found.stages[1].key, found.to_find) == (MINI, "ab" * 32, ())
    assert found.stages[0] == layout.stages[0]
    assert two().to_find == ()


@pytest.mark.parametrize(
    ("address", "long"),
    [
        *((one, one) for one in ("local", MINI, "tcp://10.0.0.7:1", "tcp://mini_2:65535", "tcp://[fe80::1%en0]:5577")),
        ("inproc://a-1", "inproc://a-1"),
        *((short, MINI) for short in ("mini.local", "mini.local:5577", "tcp://mini.local", "tcp://mini.local:05577")),
    ],
)
def test_good_addresses_which_may_be_short(address: str, long: str):
    assert two(address).stages[1].address == long


@pytest.mark.parametrize(
    "address",
    [
        *("", "tcp://:5577", "tcp://mini.local:", "udp://mini:1", "rdma://mini:1", "::1", "-mini"),
        *("tcp://mini:55x", "tcp://mini:-1", "tcp://a b:1", "tcp://mini:1/x", "tcp://*:5577", "inproc://"),
    ],
)
def test_bad_addresses(address: str):
    with pytest.raises(LayoutError, match=r"^address of stage 'mini' of layout .*(is not an address|begins with)"):
        two(address)


@pytest.mark.parametrize("port", ["0", "00", "65536", "9" * 5000])
def test_ports_have_a_range(port: str):
    with pytest.raises(LayoutError, match=r"^address of stage 'mini' .* port \d+ of .* is not from 1 to 65535"):
        two(f"tcp://mini.local:{port}")


def test_workers_may_share_a_host_and_be_local_together():
    stages = lay_out([("a", 1, None), ("b", 1, MINI), ("c", 1, "tcp://mini.local:5578"), ("d", 1, "local")])
    layout = Layout((*stages, StageSpec("e", 4, 5, "local")))
    assert [stage.is_local for stage in layout.stages] == [False, False, False, True, True]
