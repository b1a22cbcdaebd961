"""Every campaign for a short time, each night on other choices: it comes to its end, and nothing is wrong. What the
machine lacks is skipped with its reason.
"""

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CASES = {
    "soak": "soak --minutes 0.7",
    "deaths": "deaths --strikes 5",
    "deaths over rdma": "deaths --strikes 5 --link rdma",
    "deaths for good": "deaths --strikes 4 --only gone",
    "deaths for good, with too little memory": "deaths --strikes 2 --only tight",
    "strangers": "strangers --minutes 1",
    "clients": "clients --minutes 0.1",
    "up": "up --minutes 10",
    "browser": "browser --minutes 1",
    "truth": "truth --minutes 1 --ratios 1:2 --hops 1 --trials 1 --tokens 60 --slower 4",
    "json_schemas": "json_schemas --minutes 1",
}

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(2400)]  # clients are installed first


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_wrong(name: str):
    seed = ["--seed", str(datetime.now(UTC).toordinal())]
    words = [sys.executable, "-m", "tests.campaigns", *CASES[name].split(), *seed]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout.splitlines()[-1])
    if "skipped" in found:
        pytest.skip(found["skipped"])
    if found.get("means_nothing"):
        pytest.skip("the machine was too busy to measure on")
    assert found["troubles"] == [], f"{' '.join(words[2:])}\n{done.stdout[-5000:]}{done.stderr[-5000:]}"
    assert done.returncode == 0
