"""What the command line takes from the model, and what it prints without one."""

import importlib
import io
import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import typer
from typer.testing import CliRunner

from splitinfer import cli
from splitinfer.cli import app, opening
from splitinfer.cli.options import ChatOptions, PipelineOptions, settings_of
from splitinfer.cli.serve import ServeOptions
from splitinfer.cli.serving import entries_of
from splitinfer.core.kv.budget import STAGE_MARGIN
from splitinfer.core.sampling_defaults import NOTHING, Recommended, ResolvedSampling
from splitinfer.core.sequence import SamplingParams
from splitinfer.errors import ConfigError
from splitinfer.kvstore.files import default_folder
from splitinfer.models.folder.hub import open_model
from splitinfer.server.residents import Bounds

command = importlib.import_module("splitinfer.cli.chat")  # the package has the command by that name
LAYOUT_OF_DEMO = SimpleNamespace(model="demo")


class MadeUpLLM:
    recommended_sampling = Recommended({"temperature": 0.6, "top_p": 0.9})
    layout = SimpleNamespace(model="OWNER/MODEL")

    def __enter__(self) -> "MadeUpLLM":
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []

    def answer(_llm: Any, _text: str, params: SamplingParams, **_: Any) -> int:
        found.append(params)
        return 0

    def run_chat(_llm: Any, sampling: ResolvedSampling, _offers: Any) -> int:
        found.append(sampling.params)
        return 0

    monkeypatch.setattr("splitinfer.cli.answer.answer", answer)
    monkeypatch.setattr("splitinfer.chat.repl.run_chat", run_chat)
    monkeypatch.setattr(command, "open_llm", lambda *_, **__: MadeUpLLM())
    return found


@pytest.mark.parametrize("words", [["coord", "--prompt", "hi"], ["coord", "--chat"], ["chat", "--prompt", "hi"]])
def test_the_model_decides_where_nothing_is_said(
    words: list[str], asked: list[SamplingParams], monkeypatch: pytest.MonkeyPatch
):
    run(*words)
    run(*words, "--temp", "0", "--top-k", "3")
    monkeypatch.setattr(MadeUpLLM, "recommended_sampling", NOTHING)
    run(*words)
    assert [(p.temperature, p.top_p, p.top_k) for p in asked] == [(0.6, 0.9, 0), (0.0, 0.9, 3), (0.0, 1.0, 0)]


def test_the_demo_writes_less_where_nothing_is_said(asked: list[SamplingParams], monkeypatch: pytest.MonkeyPatch):
    run("coord", "--prompt", "hi")
    monkeypatch.setattr(MadeUpLLM, "layout", LAYOUT_OF_DEMO)
    run("coord", "--prompt", "hi")
    run("coord", "--prompt", "hi", "--max-tokens", "300")
    assert [p.max_tokens for p in asked] == [2048, 200, 300]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_demo_is_offered_at_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("sys.stdin", Terminal("\nn\n"))
    assert command._with_demo(ChatOptions()).model == "demo"
    with pytest.raises(typer.Exit):
        command._with_demo(ChatOptions())
    said = capsys.readouterr()
    assert said.err.count("No model is named.") == 2
    assert said.err.endswith("splitinfer chat --model OWNER/MODEL\n")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert command._with_demo(ChatOptions()).model is None


@pytest.mark.parametrize("prompt", ["", " \n"])
def test_an_empty_prompt_is_told_before_a_model_is_loaded(prompt: str):
    with pytest.raises(ConfigError, match="there is no prompt"):
        command.prompt_of(ChatOptions(prompt=prompt))


def test_coord_and_chat_are_one_command(capsys: pytest.CaptureFixture[str]):
    for words in (["--prompt", "x", "--chat"], ["--prompt", "x", "--serve", "0"]):
        for name in ("coord", "chat"):
            assert cli.command_line()([name, "--layout", "demo", *words], standalone_mode=False) == 1
        said = capsys.readouterr().err
        assert said == "splitinfer: --prompt answers and ends, --chat and --serve stay; give one of them\n" * 2


def test_models_that_were_copied_are_listed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cli.shutdown, "exit", sys.exit)
    done = CliRunner().invoke(app, ["models", "ls"])
    assert done.exit_code == 0, done.output


def run(*args: str) -> None:
    done = CliRunner().invoke(app, [args[0], "--layout", "demo", *args[1:]], catch_exceptions=False)
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("coord", "a model is needed: --model OWNER/MODEL, a folder or 'demo', or --layout FILE"),
        ("coord --auto --workers mini", "--workers names the workers, and so does --auto"),
        ("init --use-all", "--use-all is for the machine where you chat; add --model"),
        ("coord --workers mini", "--workers needs a model to cut"),
        ("coord --layout demo --workers mini", "--layout names the workers, and so does --workers"),
        ("chat --layout demo --for context", "--for is for choosing a cut, and --layout has one"),
        ("coord --layout demo --prefill-share 2", "'--prefill-share' must be less than or equal to 1"),
        ("coord --layout demo --kv-gb nan", "'--kv-gb' must be greater than or equal to 0"),
        ("serve --layout demo --codec zip", "'--codec': 'zip' is not one of 'none', 'fp16'"),
        ("coord --layout demo --kv-low 0.95", "kv_low and kv_high must be 0 <= low < high <= 1"),
        ("coord --nope", "no such option: --nope"),
        ("coord --temp x", "'--temp' must be a valid number; see splitinfer coord --help"),
        ("serve --port 99999", "'--port' must be less than or equal to 65535; see"),
        ("chatt", "no such command 'chatt'. Did you mean 'chat'? See splitinfer --help"),
        ("chat mini", "'mini' is not expected here; see splitinfer chat --help"),
        ("coord --layout demo --logprobs 2", "--logprobs is printed with --json only; add --json; see s"),
    ],
)
def test_no_option_is_ignored_or_taken_wrong_and_that_is_told_as_any_other_error(
    words: str, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["splitinfer", *words.split()])
    monkeypatch.setattr(cli.shutdown, "exit", sys.exit)
    with pytest.raises(SystemExit) as ending:
        cli.main()
    out, said = capsys.readouterr()
    assert (ending.value.code, said.count("\n"), out) == (2, 1, "")
    assert said.startswith(f"splitinfer: {sentence}")


@pytest.mark.parametrize("words", ["", "keys add", "chat", "serve", "up", "plan", "bench"])
def test_help_shows_whole_names_of_options_in_80_columns_and_no_type_for_flags(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    monkeypatch.setattr(sys, "argv", ["splitinfer", *words.split(), "--help"])
    monkeypatch.setattr(cli.shutdown, "exit", lambda _: None)
    cli.main()
    said = capsys.readouterr().out
    assert "--help" in said
    assert [odd for odd in ("…", "<=x", "bool") if odd in said] == []


def test_a_second_init_for_a_model_writes_a_second_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file_of = importlib.import_module("splitinfer.cli.init")._file_of
    monkeypatch.chdir(tmp_path)
    Path("m-pair.yaml").touch()
    assert file_of("OWNER/M") == Path("m-pair-2.yaml")


def test_a_long_wait_for_the_other_machine_is_explained(monkeypatch: pytest.MonkeyPatch):
    pairing, said = importlib.import_module("splitinfer.cli.init"), list[str]()
    is_said = threading.Event()
    monkeypatch.setattr(pairing, "say", lambda text: (said.append(text), is_said.set()))
    with pairing._said_after(60.0, "not yet"):
        pass
    with pairing._said_after(0.0, "now"):
        assert is_said.wait(30)
    assert said == ["now"]


def test_each_declared_option_reaches_the_settings(tmp_path: Path):
    given: dict[str, Any] = {
        "kv_bytes": 2.5, "kv_dir": str(tmp_path), "kv_dir_bytes": math.inf, "policy": "watermark", "context": 99,
        "float32_head": True, "token_budget": 64,
    }  # fmt: skip
    settings = settings_of(given)
    assert (settings.kv_bytes, settings.disk.path, settings.kv_dir_bytes) == (25 * 10**8, tmp_path, 10**18)
    assert (settings.policy, settings.context, settings.float32_head, settings.token_budget) == (
        "watermark", 99, True, 64
    )  # fmt: skip
    usual = PipelineOptions().settings.disk
    assert usual.path == default_folder()


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_shells_get_a_completion_script(shell: str):
    script = completing(f"source_{shell}")
    assert f"_SPLITINFER_COMPLETE=complete_{shell}" in script
    assert "_splitinfer_completion" in script or "complete --command splitinfer" in script


def test_completion_knows_commands_and_options_and_loads_no_library_of_arrays():
    assert completing("complete_bash", COMP_WORDS="splitinfer co", COMP_CWORD="1") == "coord\n"
    assert completing("complete_bash", COMP_WORDS="splitinfer coord --lay", COMP_CWORD="2") == "--layout\n"


_COMPLETING = """
import sys
from splitinfer.cli import app
try:
    app(prog_name="splitinfer")
finally:
    heavy = {"mlx", "mlx_lm", "numpy", "transformers", "zmq", "huggingface_hub", "matplotlib"} & set(sys.modules)
    if heavy:
        print("loaded", *sorted(heavy))
"""


def completing(instruction: str, **env: str) -> str:
    env = {**os.environ, **env, "_SPLITINFER_COMPLETE": instruction}
    done = subprocess.run([sys.executable, "-c", _COMPLETING], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("chats", "writes_turns", "is_said"), [(True, False, 1), (False, False, 0), (True, True, 0)])
def test_a_model_that_was_not_trained_to_chat(
    chats: bool, writes_turns: bool, is_said: int, monkeypatch: pytest.MonkeyPatch
):
    said, llm = list[str](), MagicMock()
    llm.tokenizer.writes_turns = writes_turns
    monkeypatch.setattr("splitinfer.console.load_llm", lambda *_: llm)
    monkeypatch.setattr("splitinfer.console.say", said.append)
    for _ in range(2):
        with opening.open_llm(PipelineOptions(layout="none-such"), chats=chats):
            assert len(said) == is_said
        said.clear()


def test_a_rank_is_a_worker_that_models_take_turns_on(tmp_path: Path):
    """Of a stage across two machines only the half that is computed here needs memory here."""
    layout = tmp_path / "x.yaml"
    stages = "[{name: a, layers: 6}, {name: b, layers: 6, across: [local, mini.local]}]"
    layout.write_text(f"model: demo\nstages: {stages}\n")
    (entry,) = entries_of(ServeOptions(layout=str(layout)), Bounds(2**40, None, None))
    whole = sum(tensor.nbytes for tensor in open_model("demo").tensors.values())
    assert entry.workers == {"tcp://mini.local:5577"}
    assert entry.needs == int(whole * 0.75) + 2 * STAGE_MARGIN
