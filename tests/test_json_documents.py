"""Documents that are printed while something could not be measured are JSON all the same."""

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
from campaigns import deaths

from splitinfer.bench.shared.printing import print_found


def read(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_a_benchmark_prints_null_for_what_it_could_not_measure(capsys: pytest.CaptureFixture[str]):
    print_found({"ratio": math.nan, "rates": (1.0, math.inf)}, [], as_json=True)
    assert read(capsys.readouterr().out) == {"ratio": None, "rates": [1.0, None]}


def test_a_campaign_prints_null_for_a_loss_that_nobody_noticed(capsys: pytest.CaptureFixture[str]):
    outcome = deaths.Outcome("kill-1", "two", 1, "kill", True, (), math.nan, math.nan)
    deaths._tell(outcome, 0, SimpleNamespace())  # type: ignore[arg-type]
    told = read(capsys.readouterr().out)
    assert (told["to_notice"], told["to_resume"], told["found"]) == (None, None, None)
    assert outcome.is_missed
