"""Machine files: what each key becomes, what fits a layout, what is refused. Costs pass through what is given."""

from pathlib import Path

import pytest

from splitinfer.core.costs.shape import Shape
from splitinfer.errors import ConfigError
from splitinfer.machine.costs import Costs
from tests.emulation.files import read_devices

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


STAGE, LAYER = "stages: [{layers: 1, rows_ms: {1: 3}}]\n", "each_layer: {rows_ms: {1: 2}}\n"


def test_ranks_have_a_part_of_each_layer_and_sum(tmp_path: Path):
    """What a step costs whatever layers there are, each of them pays."""
    file = written(tmp_path, BY_LAYER + "sum_us: {1: 100, 101: 200}")
    (whole,) = read_devices(file, [10])
    silent, summing = (whole.of_rank(2, sums=sums) for sums in (False, True))
    assert [ms(each.stages[0], 1) for each in (whole, silent, summing)] == pytest.approx([10.5, 5.5, 5.5 + 20 * 0.1])
    assert ms(summing.stages[0], 101) - ms(silent.stages[0], 101) == pytest.approx(20 * 0.2)
    by_stage = read_devices(written(tmp_path, BY_STAGE), [40, 26])[0].of_rank(2, sums=True)
    assert ms(by_stage.stages[0], 1) == pytest.approx(23.5)
