"""`splitinfer bench --mode speculation`: as a process on tiny models, and its figures from made-up trials."""

import io
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import brief
import pytest
import typer
import yaml
from effort import thorough
from rich.console import Console

from splitinfer.bench.shared.texts import passages
from splitinfer.bench.speculation.report import (
    IN_FLIGHT,
    SEQUENTIAL,
    Case,
    Trial,
    case_document,
    curve,
)
from splitinfer.bench.speculation.tables import tables
from splitinfer.cli.bench import _shares
from splitinfer.core.costs.by_rows import RowCosts
from splitinfer.core.speculation.flight import Flight, best_flight, run_seconds, tokens_per_second
from splitinfer.errors import ConfigError

KERNELS = {1: 1.0, 2: 1.1, 3: 1.3, 4: 1.15, 6: 1.4, 8: 1.35, 12: 1.6, 16: 1.7}


FEWER = {
    "speculation.trials._CROWD": 4,
    "speculation.trials.SETTLE": 8,
    "speculation.trials._WARM_UP": 12,
}


def rig(front: float = 0.4, draft: float = 0.05, link: float = 0.01) -> RowCosts:
    stages = [{n: share * t for n, t in KERNELS.items()} for share in (front, 1 - front)]
    return RowCosts.through(stages, draft, link)


def bench(*options: str, seconds: float = 250) -> dict[str, Any]:
    command = brief.command(["--mode", "speculation", "--trials", "1", *options], FEWER)
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.timeout(300)
def test_replay_on_a_tiny_model(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    layout = tmp_path / "halves.yaml"
    stages = [{"name": "front", "layers": 1}, {"name": "back", "layers": 3, "address": "local"}]
    layout.write_text(yaml.safe_dump({"model": str(tiny_folder("llama")), "stages": stages}))
    picture = tmp_path / "speed.png"
    found = bench(
        "--layout", str(layout), "--decode-tokens", thorough("30", "40"), "--acceptance", "0,0.8",
        "--plot", str(picture),
    )  # fmt: skip
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [case["case"] for case in found["cases"]] == ["acceptance 0", "acceptance 0.8"]
    for case, share in zip(found["cases"], (0.0, 0.8), strict=True):
        names = set(case["systems"])
        assert {SEQUENTIAL, IN_FLIGHT, "plain mlx-lm"} < names
        assert len([name for name in names if name.startswith("synchronous")]) == 3
        for name, each in case["systems"].items():
            assert each["same_tokens"] == each["of"] == 1, name
        sync = case["systems"][case["best_synchronous"]]
        assert sync["acceptance"] == pytest.approx(share, abs=0.25)
        assert sum(right for _, right in sync["by_place"]) <= sum(tried for tried, _ in sync["by_place"])
    assert found["crowd"]["ratio"]["median"] > 0
    assert found["draft_share_of_a_step"] > 0.01, (found["draft_ms"], found["step_ms_by_rows"])


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_demo_pair_on_a_text(tmp_path: Path) -> None:
    text = tmp_path / "tale.txt"
    line = "There was once a king who had a daughter, and she was so fair that the sun himself wondered at her.\n\n"
    text.write_text("".join(f"{i}. {line}" for i in range(200)))
    found = bench("--layout", "demo.yaml", "--decode-tokens", "16", "--text", str(text), "--json")
    assert found["drafter"] == "demo-draft"
    assert [case["temperature"] for case in found["cases"]] == [0.0, 0.8]
    assert "mlx-lm with 2 drafts" in found["cases"][0]["systems"]
    assert "mlx-lm with 2 drafts" not in found["cases"][1]["systems"], "its sampling has other keys"


def test_shares_are_from_0_to_1() -> None:
    for wrong in ("0.5,2", "many", ""):
        with pytest.raises(typer.BadParameter, match="numbers from 0 to 1"):
            _shares(wrong)


def test_a_text_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        passages(tmp_path / "no.txt", 3, 3200)


# -- figures from made-up trials -------------------------------------------------------------------


def case() -> Case:
    """In flight twice as fast as without drafts, and exactly as fast as its runs would be."""
    r = rig()
    flight = best_flight(r, 0.75, 2)
    runs = {0: 2, 3: 3, 9: 1}
    tokens = sum(n * (right + 1) for right, n in runs.items())
    each = sum(n * run_seconds(r, flight, right) for right, n in runs.items()) / tokens
    flown = Trial(each, (1, 2, 3, 4, 5), 24, 18, 40, ((6, 4), (18, 14)), r, runs, flight)
    sync = Trial(1.25 * each, (1, 2, 3, 4, 5), 10, 7, 20, rig=r)
    slow = Trial(2.0 * each, (1, 2, 3, 4, 6), 10, 7, 20, rig=r)
    return Case(
        "made up",
        0.0,
        {SEQUENTIAL: [Trial(2 * each, (1, 2, 3, 4, 5))], IN_FLIGHT: [flown], "synchronous 3": [sync],
         "synchronous 7": [slow]},
    )  # fmt: skip


def test_figures_of_a_case() -> None:
    found = case_document(case(), 2)
    assert found["systems"][IN_FLIGHT]["speed_up"]["median"] == pytest.approx(2.0)
    assert found["systems"][IN_FLIGHT]["thrown_away"] == pytest.approx(1 - 18 / 40)
    assert found["systems"][IN_FLIGHT]["by_place"] == [[6, 4], [18, 14]]
    assert found["systems"]["synchronous 7"]["same_tokens"] == 0
    assert found["best_synchronous"] == "synchronous 3"
    assert found["in_flight_to_best_synchronous"]["median"] == pytest.approx(1.25)
    assert found["in_flight"]["share_of_expected"]["median"] == pytest.approx(1.0)
    assert found["in_flight"]["limit_speed_up"]["median"] == pytest.approx((2 + 12 + 10) / 6)


def test_the_curve_is_between_one_and_the_limit() -> None:
    points = curve(rig(), 2, [i / 20 for i in range(20)])
    for point in points:
        assert 1 <= point["synchronous"] <= point["in_flight"] <= point["limit"] * 1.0001
    assert [p["in_flight"] for p in points] == sorted(p["in_flight"] for p in points)


def test_tables_are_for_people() -> None:
    r = rig()
    found = {
        "layout": {"name": "8-8.yaml", "layers": (8, 8)}, "drafter": "replay", "cases": [case_document(case(), 2)],
        "crowd": {"requests": 8, "ratio": {"median": 1.0, "low": 0.9, "high": 1.1}}, "draft_ms": 5.0, "link_ms": 0.5,
        "draft_share_of_a_step": 0.05, "curve": curve(r, 2, (0.5, 0.8)),
    }  # fmt: skip
    console = Console(width=130, record=True, file=io.StringIO())
    console.print(*tables(found))
    text = console.export_text()
    for words in ("in flight to synchronous 3", "2.00", "8 requests at once"):
        assert words in text
    assert tokens_per_second(r, Flight(3), 0.8) > r.sequential
