"""Every architecture of mlx-lm, cut everywhere: right to the last bit, or refused; and the table says so."""

from dataclasses import replace
from importlib.metadata import version

import compare
import configs
import effort
import pytest
import table

CONFIGS = configs.configurations()
KNOWN, ROWS = table.written()
same_release = pytest.mark.skipif(version("mlx-lm") != KNOWN, reason="the table is for another mlx-lm: scripts/matrix")


@pytest.mark.parametrize("name", CONFIGS)
def test_cuts(name: str) -> None:
    finding = compare.examine(CONFIGS[name], effort.thorough(compare.USUAL, compare.ALL))
    if version("mlx-lm") == KNOWN:
        known = table.comparable(ROWS.get(name, ""))
        rows = [table.row(name, finding)]
        if finding.any_chunking and not effort.everything:  # as far as was looked
            rows.append(table.row(name, replace(finding, any_chunking=False)))
        assert known in map(table.comparable, rows), "scripts/matrix --write"


@same_release
def test_no_architecture_is_forgotten() -> None:
    described = {configs.architecture(name) for name in CONFIGS} | set(configs.LEFT_OUT)
    assert described == set(configs.architectures())
    assert list(ROWS) == sorted([*CONFIGS, *configs.LEFT_OUT], key=str.lower), "scripts/matrix --write"
