"""Without a layout the machines are measured, and the best cut is taken; what was chosen is said."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import stages
from processes import worker

from splitinfer import SamplingParams
from splitinfer.cli import opening as commands
from splitinfer.cli.options import PipelineOptions
from splitinfer.core.layout import Layout, StageSpec
from splitinfer.engine.profiling import measure as measuring
from splitinfer.engine.profiling.measure import OnStep, Question
from splitinfer.errors import CannotFit, ConfigError, LayoutError, ModelError
from splitinfer.keyring import Keyring, Known
from splitinfer.llm import LLM, Settings, automatic
from splitinfer.llm.automatic import as_workers, chosen_from
from splitinfer.machine.costs import Costs
from splitinfer.machine.profile import LayerProfile, MachineProfile, ModelProfile, Profiles
from splitinfer.placement import pairs
from splitinfer.placement.asked import Aim

KEY = "ab" * 32


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Machines are measured in no time; their names."""
    names: list[str] = []

    def measure(name: str, question: Question, report: OnStep) -> MachineProfile:
        names.append(name)
        return machine(name)

    monkeypatch.setattr(measuring, "measure_machine", measure)
    return names


def machine(name: str, seconds: float = 3e-3, free: int = 10**9, address: str | None = None) -> MachineProfile:
    costs = Costs.line(seconds / 8, seconds)
    return MachineProfile(name, {"kind 1": costs}, address, step=1e-4, free_bytes=free)


def test_a_model_that_does_not_fit_alone_says_how_to_add_a_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(automatic, "free_bytes", lambda: 10**6)
    with pytest.raises(CannotFit, match=r"1 MB are free here.*`splitinfer up HOST --model demo`.*`splitinfer init`"):
        automatic.alone("demo", Settings())


@pytest.mark.parametrize("auto", [False, True])
def test_paired_workers_are_named_and_used_when_told_to(
    auto: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    mini = {"name": "mini", "address": "tcp://10.0.0.2:5577", "key": KEY}
    first = automatic.alone("demo", Settings()).layout.stages[0]
    stages = (replace(first, end=6), StageSpec("mini", 6, 12, mini["address"], KEY))
    found = automatic.Chosen(Layout(stages, "demo", name="(planned)"), "cut over mini")
    monkeypatch.setattr("splitinfer.discovery.discover.paired", lambda *_: [mini])
    monkeypatch.setattr(commands, "planned", lambda _options, _model, workers: found if workers == [mini] else None)
    chosen = commands.layout_of(PipelineOptions(model="demo", auto=auto))
    assert (chosen.text == found.text) == auto
    assert [stage.name for stage in chosen.layout.to_find] == ["mini"] * auto, "by its key, also if it moves"
    assert ("Found and paired: mini; --auto uses it." in capsys.readouterr().err) != auto


def test_a_wrong_model_is_told_before_anybody_is_looked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("splitinfer.discovery.discover.paired", lambda *_: pytest.fail("it looked for workers"))
    with pytest.raises(ModelError, match="there is no model"):
        commands.layout_of(PipelineOptions(model="none-such"))


def test_workers_as_they_are_written():
    found = as_workers(
        ["mini.local", "10.0.0.3:7000", f"air=tcp://air.local:5577#{KEY}", "local", "local", "[fe80::1%en5]:5577",
         {"address": "mini.local:9", "key": KEY}]
    )  # fmt: skip
    assert [(each.name, each.address, each.key) for each in found] == [
        ("mini", "tcp://mini.local:5577", None),
        ("10.0.0.3", "tcp://10.0.0.3:7000", None),
        ("air", "tcp://air.local:5577", KEY),
        ("local", "local", None),
        ("local-2", "local", None),
        ("worker", "tcp://[fe80::1%en5]:5577", None),
        ("mini-2", "tcp://mini.local:9", KEY),
    ]


def test_a_worker_has_the_key_that_is_known_by_its_name():
    other = "cd" * 32
    known = [(KEY, "Mini.local"), (other, ""), (other, "air"), (KEY, "air"), (other, "local")]
    found = as_workers(["mini.local", f"mini=10.0.0.3#{other}", "studio", "local"], known)
    assert [(each.name, each.key) for each in found] == [
        ("mini", KEY),
        ("mini-2", other),
        ("studio", None),
        ("local", None),
    ]
    with pytest.raises(LayoutError, match="2 keys are known here under the name 'air'; write air=ADDRESS#KEY"):
        as_workers(["air"], known)


def test_a_worker_of_which_only_its_paired_name_is_said_is_found(monkeypatch: pytest.MonkeyPatch):
    """No resolver knows the name *mini*, and it announces itself; what has an address or another name stays."""
    looked_for = list[tuple[str, str, str]]()

    def announced(workers: list[tuple[str, str, str]]) -> dict[str, str]:
        looked_for.extend(workers)
        return {"mini": "tcp://10.77.0.2:5577"}

    monkeypatch.setattr(automatic, "best_addresses", announced)
    monkeypatch.setattr(Keyring, "known", lambda _: (Known(KEY, "mini"), Known("cd" * 32, "studio")))
    found = automatic.found_workers(["mini", "studio.local", "air"])
    assert [(each.address, each.key) for each in found] == [
        ("tcp://10.77.0.2:5577", KEY), ("tcp://studio.local:5577", "cd" * 32), ("tcp://air:5577", None)
    ]  # fmt: skip
    assert looked_for == [("mini", KEY, "tcp://mini:5577")]


@pytest.mark.parametrize(
    ("workers", "words"),
    [
        (["a b"], "is not an address"),
        (["a=b=c"], "is not a worker's address; write"),
        ([""], "is not a worker's address; write"),
        (["a#12"], "is not a worker's address; write"),
        (["a", "tcp://a:5577"], "are both at"),
        (["a:99999"], "is not from 1 to 65535"),
        ([{"name": "a"}], "a worker has an address"),
        ([{"address": "a", "layers": 3}], "a worker has an address"),
        ([{"address": "a", "key": "12"}], "has the key .12., but a key has 64 hex"),
    ],
)
def test_workers_that_are_none(workers: list[str], words: str):
    with pytest.raises(ConfigError, match=words):
        as_workers(workers)


MODEL = ModelProfile("m", (LayerProfile("kind 1", 10**7, 100),) * 12, 10**6, 10**6, hidden_row=100)


def test_the_quicker_machine_gets_more_and_that_is_said():
    profiles = Profiles(MODEL, (machine("studio"), machine("mini", 9e-3, address="tcp://mini:1")))
    chosen = chosen_from(profiles, Settings(), Aim.THROUGHPUT)
    first, second = chosen.layout.stages
    assert first.num_layers > 2 * second.num_layers
    assert (first.address, second.address) == (None, "tcp://mini:1")
    assert chosen.text.startswith(f"Planned for throughput: studio {first.num_layers}, mini {second.num_layers}. ")
    assert "With mini: one chat " in chosen.text
    assert "\n" not in chosen.text


def test_what_does_not_fit_says_by_how_much():
    profiles = Profiles(MODEL, (machine("studio", free=10**7), machine("mini", free=10**7, address="tcp://mini:1")))
    with pytest.raises(CannotFit, match=r"would need [\d.]+ [MG]B more memory"):
        chosen_from(profiles, Settings(), Aim.CHAT)


def test_a_pipeline_of_workers_alone(tiny_folder: Callable[..., Path], measured: list[str]):
    """The same tokens as in any other cut."""
    folder, prompt = tiny_folder("llama"), stages.prompt(9)
    with stages.worker("tcp") as there, LLM(model=str(folder), workers=[f"mini={there}"], aim=Aim.CONTEXT) as llm:
        assert llm.layout.num_layers == 4
        assert "Planned for context: " in llm.explanation
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=12))
    assert output.token_ids == stages.plain_greedy(folder, prompt, 12)
    assert len(measured) == 1


@pytest.mark.nightly
@pytest.mark.usefixtures("measured")
def test_a_planned_stage_across_two_machines(tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch):
    """A worker of this machine stands for one of another, and sums count as quick: the planned layout runs as it is."""
    monkeypatch.setattr(pairs, "_host", lambda machine: machine.address)
    monkeypatch.setattr(pairs, "sum_of", lambda *_: Costs())
    folder, prompt = tiny_folder("llama"), stages.prompt(9)
    with worker() as there, LLM(model=str(folder), workers=[f"mini={there.address}"]) as llm:
        (stage,) = llm.layout.stages
        assert stage.across == ("local", there.address)
        assert "Tensor parallel is faster: " in llm.explanation
        output = llm.generate([prompt])[0]
        assert "is the best cut for chat" in llm.plan().text
    assert output.token_ids[:12] == stages.plain_greedy(folder, prompt, 12)


def test_no_workers_are_no_choice(tiny_folder: Callable[..., Path], measured: list[str]):
    with LLM(model=str(tiny_folder("llama"))) as llm:
        assert llm.layout.num_stages == 1
        assert "With a second machine, this one would hold" in llm.explanation
    assert measured == []


def test_what_contradicts_itself_is_one_sentence():
    with pytest.raises(ConfigError, match="give a layout or workers, not both"):
        LLM("demo", workers=["mini"])
    with pytest.raises(ConfigError, match="give a layout, or a model"):
        LLM()
