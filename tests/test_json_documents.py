"""Documents that are printed while something could not be measured are JSON all the same."""

import json
import math
from typing import Any

import pytest

from splitinfer.bench.report import print_found


def read(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_a_benchmark_prints_null_for_what_it_could_not_measure(capsys: pytest.CaptureFixture[str]):
    print_found({"ratio": math.nan, "rates": (1.0, math.inf)}, [])
    assert read(capsys.readouterr().out.splitlines()[-1]) == {"ratio": None, "rates": [1.0, None]}
