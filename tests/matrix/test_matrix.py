"""Every architecture of mlx-lm, cut everywhere: right to the last bit, or refused; and the table says so."""

from importlib.metadata import version

import compare
import configs
import pytest
import table

CONFIGS = configs.configurations()
KNOWN, ROWS = table.written()
KINDS = ["llama", "gpt_oss", "gemma3n", "deepseek_v3", "mamba2", "qwen3_next", "hunyuan"]
"""One for each kind of cache and of border: plain; windows, with experts; shared keys and values, with windows; latent;
states; states beside keys and values; several arrays that cross. Toys are refused (``test_refusals``)."""


@pytest.mark.parametrize(("name", "each_alone"), [
    *((name, False) for name in KINDS), *(pytest.param(name, True, marks=pytest.mark.nightly) for name in CONFIGS),
])  # fmt: skip
def test_cuts(name: str, each_alone: bool) -> None:
    row = table.row(name, compare.examine(CONFIGS[name], each_alone=each_alone))
    if version("mlx-lm") == KNOWN:
        assert table.comparable(ROWS.get(name, "")) == table.comparable(row), "scripts/matrix --write"


@pytest.mark.skipif(version("mlx-lm") != KNOWN, reason="the table is for another mlx-lm: scripts/matrix")
def test_no_architecture_is_forgotten() -> None:
    described = {configs.architecture(name) for name in CONFIGS} | set(configs.LEFT_OUT)
    assert described == set(configs.architectures())
    assert sorted(ROWS) == sorted([*CONFIGS, *configs.LEFT_OUT]), "scripts/matrix --write"
