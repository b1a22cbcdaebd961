"""Every architecture of mlx-lm, cut everywhere: right to the last bit, or refused; and the table says so."""

from dataclasses import replace
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


@pytest.mark.parametrize(("name", "care"), [
    *((name, compare.USUAL) for name in KINDS),
    *(pytest.param(name, compare.ALL, marks=pytest.mark.nightly) for name in CONFIGS),
])  # fmt: skip
def test_cuts(name: str, care: compare.Care) -> None:
    finding = compare.examine(CONFIGS[name], care)
    if version("mlx-lm") == KNOWN:
        rows = [table.row(name, finding)]
        if care is compare.USUAL:  # which looks at one other chunking only
            rows.append(table.row(name, replace(finding, any_chunking=False)))
        assert table.comparable(ROWS.get(name, "")) in map(table.comparable, rows), "scripts/matrix --write"


@pytest.mark.skipif(version("mlx-lm") != KNOWN, reason="the table is for another mlx-lm: scripts/matrix")
def test_no_architecture_is_forgotten() -> None:
    described = {configs.architecture(name) for name in CONFIGS} | set(configs.LEFT_OUT)
    assert described == set(configs.architectures())
    assert sorted(ROWS) == sorted([*CONFIGS, *configs.LEFT_OUT]), "scripts/matrix --write"
