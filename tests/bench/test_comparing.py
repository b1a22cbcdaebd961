"""The comparison: what fits into the time, what is right, what the table and the page say; and one on a tiny model."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.comparing import comparison as run
from scripts.comparing.comparison import AS_ONE_STAGE, BY_LAYERS, PARALLEL, RESTART, parts
from scripts.comparing.judge import reread, worst
from scripts.comparing.options import Wanted
from scripts.comparing.page import tables
from splitinfer.bench.parts import PROMPT, Cell, Part
from splitinfer.bench.report import print_found
from splitinfer.bench.systems import PIPELINE, PLAIN, System
from splitinfer.config import read_layout
from splitinfer.errors import ConfigError
from splitinfer.llm import LLM
from splitinfer.probes.plain import RIGHT, ROUNDING, WRONG, verdict


class Steady(System):
    """A system that takes ten seconds for a prompt of 2,048 tokens, and one for anything else."""

    name = PLAIN

    def __init__(self, now: list[float]) -> None:
        super().__init__(run.Tasks(0, 2, {}, {}), {})
        self._now, self.did = now, list[str]()

    def do(self, part: Part, trial: int) -> Cell:
        self.did.append(part.name)
        self._now[0] += 10 * part.prompt / 2048 if part.kind == PROMPT else 1
        return Cell([1.0])


def test_each_system_has_its_share_of_the_time(monkeypatch: pytest.MonkeyPatch):
    """What a reader wants first is measured first, and tried again while there is time; the rest is named."""
    now = [0.0]
    monkeypatch.setattr(run.time, "monotonic", lambda: now[0])
    work = run._Comparison(Wanted("demo.yaml", trials=3, minutes=4.0))
    work.parts, work.turns = [part for part in parts(64, (2048, 8192)) if part.kind != RESTART], 4
    system = Steady(now)
    work.do(system)
    assert system.did[:6] == ["stream", "prompt_2048", "drafts", "streams_16", "turn", "killed"]
    assert system.did[6:] == ["stream", "drafts", "streams_16"] * 2
    assert now[0] == 21.0
    assert {name: cell.why_not for name, cell in work.cells[PLAIN].items() if not cell.values} == {
        "prompt_8192": "no time was left"  # of 60 s 45 are left, and the shorter one lets expect 60
    }


def test_one_wrong_token_makes_an_answer_wrong_and_rounding_does_not():
    assert verdict([0.0, 0.0], 0.0)["verdict"] == RIGHT
    assert verdict([0.0, 0.01], 0.02) == {
        "verdict": ROUNDING, "said": "1 of 2 tokens are others than mlx-lm's, within 0.01 logits", "at": 2, "gap": 0.01
    }  # fmt: skip
    found = verdict([0.01, 3.0, 0.0], 0.02)
    assert (found["verdict"], found["at"]) == (WRONG, 2)
    assert found["said"] == "token 2 of 3 is 3 logits below mlx-lm's choice; rounding is 0.02"
    assert verdict([math.nan], 1.0)["verdict"] == WRONG
    assert worst([{"verdict": RIGHT}, {"verdict": WRONG}, {"verdict": ROUNDING}]) == WRONG
    assert worst([]) is None


def test_where_nobody_can_be_asked_a_second_reading_must_part_at_a_near_tie_only():
    assert reread([1, 2], [1, 2], [5.0, 5.0], 0.0, "")["verdict"] == RIGHT
    assert reread([1, 2], [1, 3], [5.0, 0.01], 0.005, "")["verdict"] == ROUNDING
    assert reread([1, 2], [1, 3], [5.0, 2.0], 0.005, "in other chunks") == {
        "verdict": WRONG,
        "said": "token 2 is another in other chunks; the two likeliest were 2 apart",
        "at": 2,
        "gap": 2.0,
    }


def test_a_report_that_cannot_be_written_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(LLM, "_open", lambda *_: pytest.fail("something is loaded"))
    with pytest.raises(ConfigError, match="cannot be written"):
        run.measure(Wanted("demo.yaml", report=Path("/dev/null/x")))


@pytest.mark.nightly
def test_a_tiny_model_beside_mlx_lm_and_peers_that_are_wrong(
    layout_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(run, "PROMPTS", (300,))
    monkeypatch.setattr(run.Cut, "kept", with_a_wrong_token)
    report = tmp_path / "report.html"
    measured = run.measure(Wanted(layout=str(layout_file), trials=1, decode_tokens=24, report=report))
    drawn = tables(measured)
    print_found(measured, drawn)
    _, _, line = capsys.readouterr().out.rstrip("\n").rpartition("\n")
    found = json.loads(line)
    ours, plain, *peers = (found["systems"][name] for name in (PIPELINE, PLAIN, PARALLEL, BY_LAYERS))
    assert [name for name, cell in ours.items() if "why_not" in cell] == ["drafts"]  # this layout has none
    for system, more in ((plain, {"turn"}), *((peer, set[str]()) for peer in peers)):
        done = {name for name, cell in system.items() if "why_not" not in cell}
        assert done == {"stream", "prompt_300", "streams_16"} | more
    assert ours["killed"]["said"] == "the same tokens"
    for name in ("turn", "restart"):
        kept = re.fullmatch(r"(\d+) of 348 tokens of KV were kept", ours[name]["said"])
        assert int(kept[1]) >= 256  # whole blocks of the prompt
    judged = {name: worst(each) for name, each in found["verdicts"].items()}
    assert judged.pop(AS_ONE_STAGE) in (RIGHT, ROUNDING)
    assert judged == {PIPELINE: RIGHT, PARALLEL: WRONG, BY_LAYERS: WRONG, PLAIN: RIGHT}
    one_stage = found["systems"][AS_ONE_STAGE]
    assert {name for name, cell in one_stage.items() if "why_not" in cell} == {"drafts", "restart"}
    assert one_stage["killed"]["said"] == "the same tokens"
    assert "after 300 tokens wrong: " in str(drawn[0].caption)
    for text in (line, report.read_text()):
        assert "anna" not in text
        assert str(layout_file.parent) not in text


def with_a_wrong_token(self: Any, part: Any, answer: Any) -> Any:
    """What mlx-lm in several processes keeps of an answer if its third token is another one."""
    tokens = [*answer.token_ids[:2], (answer.token_ids[2] + 1) % 300, *answer.token_ids[3:]]
    self.answers.setdefault(part.name, tuple(tokens))
    return answer


def test_an_error_in_the_report_names_no_machine_address_or_path(tmp_path: Path):
    stages = [{"name": "anna", "layers": 1}, {"name": "back", "layers": 1, "address": "tcp://bens-mini.local:5577"}]
    file = tmp_path / "layout.yaml"
    file.write_text(yaml.safe_dump({"model": "m", "stages": stages}))
    layout = read_layout(file)
    for said, told in {
        "ssh: connect to host bens-mini.local port 22: no route": "ssh: connect to host stage 2 port 22: no route",
        "stage back (tcp://bens-mini.local:5577) was lost": "stage 2 (…) was lost",
        "nothing in /Users/anna/model, of 192.168.0.7": "nothing in …, of …",
        "its llama has no pipeline; 16 tokens/s": "its llama has no pipeline; 16 tokens/s",
    }.items():
        assert run.without_names(said, layout) == told
