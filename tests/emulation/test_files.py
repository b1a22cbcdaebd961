"""Machine files: what each key becomes, what fits a layout, what is refused. Costs pass through what is given."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from splitinfer.core.costs.shape import Shape
from splitinfer.errors import ConfigError
from splitinfer.machine.costs import Costs
from tests.emulation.device_queue import DeviceTraits
from tests.emulation.files import EXAMPLES, read_devices, read_machine
from tests.emulation.machine import Hop

BY_STAGE = """
stages:
  - {layers: 40, rows_ms: {1: 47, 8: 52}, buffers: 88}
  - {layers: 26, rows_ms: {1: 31, 8: 34}, buffers: 57}
draft_ms: 3
draft_buffers: 4
launches_ahead: true
max_buffers: 7
wait_us: 50
idle_after_s: 0.5
idle_factor: 1.5
"""
BY_LAYER = """
each_layer: {rows_ms: {1: 1, 8: 2}, buffers: 2.2, decode_per_1k_ms: 0.1, prompt_per_1k_ms: 0.01}
each_step_ms: 0.5
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "m.yaml"
    path.write_text(text)
    return path


def ms(costs: Costs, rows: int) -> float:
    return 1000 * costs.at(Shape(rows))


def test_what_a_device_of_one_stage_needs(tmp_path: Path):
    _, found = read_devices(written(tmp_path, BY_STAGE), [5, 3])
    assert (ms(found.stages[0], 1), ms(found.stages[0], 8)) == pytest.approx((31, 34))
    assert found.device == DeviceTraits(7, 50 * 1e-6, 0.5, 1.5)
    assert (found.buffers_of(0), found.draft, found.draft_buffers) == (57, 0.003, 4)


def test_times_of_links_and_of_what_rows_attend_to(tmp_path: Path):
    stage = "{layers: 2, rows_ms: {1: 10, 101: 20}, decode_per_1k_ms: 1}"
    machine = read_machine(written(tmp_path, f"stages: [{stage}]\nhop_ms: 0.5\nper_row_us: 2"))
    assert machine.hops == (Hop(0.0005, 2e-6),)
    costs = machine.stages[0]
    assert [costs.at(Shape(101)), costs.at(Shape(1, decode_context=1000))] == pytest.approx([0.02, 0.011], rel=1e-3)


def test_times_of_stages_fit_a_layout_of_as_many(tmp_path: Path):
    for count in (1, 3):
        with pytest.raises(ConfigError, match=f"has the times of 2 stages, but the layout has {count}; take another"):
            read_devices(written(tmp_path, BY_STAGE), [40] * count)


@pytest.mark.parametrize("stages", ["", "stages: [{layers: 5}, {layers: 7}]"])
def test_costs_of_each_layer_fit_every_layout(stages: str, tmp_path: Path):
    devices = read_devices(written(tmp_path, BY_LAYER + stages), [1, 10, 40])
    for device, num_layers, buffers in zip(devices, (1, 10, 40), (2, 22, 88), strict=True):
        assert ms(device.stages[0], 1) == pytest.approx(0.5 + num_layers)
        assert ms(device.stages[0], 8) == pytest.approx(0.5 + 2 * num_layers)
        assert device.buffers == (buffers,)
    attends = Shape(1, decode_context=3000), Shape(1, chunk_context=3000)
    assert [1000 * devices[1].stages[0].at(shape) for shape in attends] == pytest.approx([10.5 + 3, 10.5 + 0.3])


def test_costs_of_each_layer_are_a_machine_once_there_are_stages(tmp_path: Path):
    machine = read_machine(written(tmp_path, BY_LAYER + "stages: [{layers: 5}, {layers: 7}]"))
    assert (machine.layers, machine.buffers) == ((5, 7), (11, 15))
    assert [ms(stage, 1) for stage in machine.stages] == pytest.approx([5.5, 7.5])
    with pytest.raises(ConfigError, match="not how many layers each stage has; add, for example, 'stages: "):
        read_machine(written(tmp_path, BY_LAYER))


@pytest.mark.parametrize("text", [BY_STAGE, BY_LAYER + "stages: [{layers: 5}, {layers: 7}]"])
def test_a_machine_survives_being_written_down(text: str, tmp_path: Path):
    machine = read_machine(written(tmp_path, text))
    assert read_machine(written(tmp_path, json.dumps(machine.as_dict()))) == machine


STAGE, LAYER = "stages: [{layers: 1, rows_ms: {1: 3}}]\n", "each_layer: {rows_ms: {1: 2}}\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (STAGE + "max_buffers: 0", "max_buffers: input should be greater than or equal"),
        (STAGE + "host: 1", "host: there is no such key"),
        ("each_layer: {rows_ms: {1: 2, 8: 1}}", "more rows than one cannot take less time"),
        (LAYER + STAGE, "stages.0.rows_ms: there is no such key"),
        ("stages: []", "stages: list should have at least 1 item"),
        ("stages: [", ""),
        ("3", "a description has keys, such as stages"),
    ],
)
def test_what_is_no_machine_is_refused_in_one_sentence(text: str, sentence: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=f"machine .*m.yaml: .*{sentence}") as caught:
        read_machine(written(tmp_path, text))
    assert "\n" not in str(caught.value)


# -- the examples --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "stage", "rows_ms"),
    [
        ("two-large", 0, {1: 47, 8: 52, 16: 75, 32: 140, 128: 545, 512: 2150}),
        ("two-large", 1, {1: 31, 8: 34, 16: 50, 32: 92, 128: 360, 512: 1420}),
        ("two-small", 1, {1: 8, 8: 9, 32: 14, 128: 45, 512: 170}),
        ("three-large", 2, {1: 30, 8: 33, 16: 48, 32: 90, 128: 345, 512: 1370}),
    ],
)
def test_costs_pass_through_what_was_given(name: str, stage: int, rows_ms: dict[int, float]):
    costs = read_machine(Path(name)).stages[stage]
    assert {rows: ms(costs, rows) for rows in rows_ms} == pytest.approx(rows_ms, rel=1e-6)
    times = [ms(costs, rows) for rows in range(1, 700)]
    assert all(a <= b for a, b in pairwise(times))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_are_found_by_name(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    machine = read_machine(path)
    assert machine.launches_ahead
    assert read_machine(Path(path.stem)).as_dict() == read_machine(Path(path.name)).as_dict() == machine.as_dict()
    monkeypatch.chdir(tmp_path)
    (tmp_path / path.name).write_text("stages: [{layers: 1, rows_ms: {1: 3}}]")
    assert read_machine(Path(path.name)).num_stages == 1, "a file of that name goes before the example"


def test_ranks_have_a_part_of_each_layer_and_sum(tmp_path: Path):
    """What a step costs whatever layers there are, each of them pays."""
    file = written(tmp_path, BY_LAYER + "sum_us: {1: 100, 101: 200}")
    (whole,) = read_devices(file, [10])
    silent, summing = (whole.of_rank(2, sums=sums) for sums in (False, True))
    assert [ms(each.stages[0], 1) for each in (whole, silent, summing)] == pytest.approx([10.5, 5.5, 5.5 + 20 * 0.1])
    assert ms(summing.stages[0], 101) - ms(silent.stages[0], 101) == pytest.approx(20 * 0.2)
    by_stage = read_devices(written(tmp_path, BY_STAGE), [40, 26])[0].of_rank(2, sums=True)
    assert ms(by_stage.stages[0], 1) == pytest.approx(23.5)
