"""Programs and libraries that people call a server with, on a scripted model.

    python -m tests.campaigns clients --at FOLDER --only codex      # FOLDER keeps what was installed, for the next time

Each is installed from PyPI or npm, in the newest version, in a folder of its own; the document says which could not be
had. Of a library a script in ``libraries/`` tries what it can do: streams, a round trip of tools, reasoning, errors. A
program gets one task: the model calls its shell, and answers once the outcome is there. An error of the server is a
trouble. `openai`, `anthropic` and recorded requests are tried in every run of the tests. The order is drawn by the
seed, and all are tried again while there is time; the server keeps their KV meanwhile.
"""

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import scripted

from .libraries.probe import ANSWER, TALE, THOUGHT
from .report import Missing, Report
from .serving import Serving, serving

LIBRARIES = Path(__file__).resolve().parent / "libraries"
DOCS = Path(__file__).resolve().parents[2] / "docs"  # an agent's first prompt has up to 100,000 characters of English
MINUTES = 1.0
_SECONDS, _INSTALL_SECONDS = 300.0, 600.0  # of one client
_CONTEXT = 131072
_SEED = 3  # of the model's weights: with them an answer in a form opens no reasoning, which it could not close
_FAILED = re.compile(r"request \S+ .*(?:GET|POST|HEAD) (\S+) ([45]\d\d)")
_NO_FAULTS = ("404", "499")  # a route that a server may lack; a client that has heard enough
_EXPECTED = ("litellm", "ollama")  # whose scripts try errors, too
_TASK, _MARK, _DONE = "Touch the file.", "touched.txt", "The file is there."


@dataclass(frozen=True)
class Client:
    """A library of PyPI with a script in ``libraries/``, or a program.

    package: of PyPI, or of npm. words: the program and its arguments. env, files: what sets it up, with ``URL`` where
    the server's belongs. says: what it must print; with ``_DONE`` it must also have run the command.
    """

    package: str
    words: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    says: str = _DONE
    npm: bool = False


_OPENAI = {
    "OPENAI_BASE_URL": "URL/v1", "OPENAI_API_BASE": "URL/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": "scripted"
}  # fmt: skip
_CLAUDE = {
    "ANTHROPIC_BASE_URL": "URL", "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_MODEL": "scripted",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL": "scripted", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
}  # fmt: skip
_CODEX = """\
model = "scripted"
model_provider = "here"
model_context_window = 65536
[model_providers.here]
name = "here"
base_url = "URL/v1"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
_OPENCODE = {
    "model": "here/scripted",
    "permission": {"bash": "allow"},
    "provider": {"here": {
        "npm": "@ai-sdk/openai-compatible", "name": "here", "api": "URL/v1",
        "options": {"baseURL": "URL/v1", "apiKey": "none"},
        "models": {"scripted": {"name": "scripted", "limit": {"context": 65536, "output": 4096}}},
    }},
}  # fmt: skip
_CONTINUE = """\
{name: here, version: 1.0.0, schema: v1, models: [{name: scripted, provider: openai, model: scripted, apiBase: URL/v1,
 apiKey: none, roles: [chat], capabilities: [tool_use]}]}
"""
_LLM = "[{model_id: scripted, model_name: scripted, api_base: URL/v1, supports_tools: true, supports_schema: true}]"
_STREAM = ("--output-format", "stream-json", "--verbose")

CLIENTS = {
    "litellm": Client("litellm"),
    "ollama": Client("ollama"),
    "agents": Client("openai-agents"),
    "pydantic_ai": Client("pydantic-ai-slim[openai,anthropic]"),
    "instructor": Client("instructor"),
    "claude": Client(
        "@anthropic-ai/claude-code", ("claude", "-p", _TASK, "--allowedTools", "Bash", *_STREAM), _CLAUDE, npm=True
    ),
    "codex": Client(
        "@openai/codex", ("codex", "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", _TASK),
        _OPENAI, {".codex/config.toml": _CODEX}, npm=True,
    ),
    "opencode": Client(
        "opencode-ai", ("opencode", "run", "--model", "here/scripted", _TASK),
        files={".config/opencode/opencode.json": json.dumps(_OPENCODE)}, npm=True,
    ),
    "qwen": Client("@qwen-code/qwen-code", ("qwen", "-p", _TASK, "--yolo"), _OPENAI, npm=True),
    "continue": Client(
        "@continuedev/cli", ("cn", "-p", _TASK, "--allow", "Bash", "--config", "config.yaml"),
        files={"config.yaml": _CONTINUE}, npm=True,
    ),
    "aider": Client(
        "aider-chat", ("aider", "--model", "openai/scripted", "--no-git", "--no-check-update", "--yes-always",
                       "--no-show-model-warnings", "--message", _TASK), _OPENAI, says=TALE,
    ),
    "llm": Client(
        "llm", ("llm", "-m", "scripted", _TASK), {**_OPENAI, "LLM_USER_PATH": "llm"},
        {"llm/extra-openai-models.yaml": _LLM}, says=TALE,
    ),
}  # fmt: skip


def scripts() -> scripted.Scripts:
    """What the model answers."""
    weather = scripted.call("get_weather", THOUGHT, "One moment. ", city="Oslo")
    shells = {"Bash": "command", "bash": "command", "run_shell_command": "command", "exec_command": "cmd"}
    more: dict[str, dict[str, Any]] = {"bash": {"description": "Touch."}, "run_shell_command": {"is_background": False}}
    called = {
        tool: [scripted.call(tool, **{argument: f"touch {_MARK}"}, **more.get(tool, {})), _DONE]
        for tool, argument in shells.items()
    }
    return {"get_weather": [weather, ANSWER], **called, scripted.PLAIN: [TALE]}


# -- installing ------------------------------------------------------------------------------------


def install(client: Client, folder: Path) -> str:
    """Install a client in ``folder``, if it is not there, and return why that failed, or an empty text."""
    if (folder / "done").exists():
        return ""
    folder.mkdir(parents=True, exist_ok=True)
    if client.npm:
        steps = [["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), client.package]]
    else:
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--no-compile", client.package]
        steps = [[sys.executable, "-m", "venv", str(folder)], pip]
    try:
        for step in steps:
            subprocess.run(step, capture_output=True, text=True, timeout=_INSTALL_SECONDS, check=True)
    except subprocess.CalledProcessError as error:
        return f"it ended with {error.returncode}: {error.stderr[-200:]}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)[:200]
    (folder / "done").touch()
    return ""


def version_of(client: Client, folder: Path) -> str:
    """Return the version of an installed client."""
    if client.npm:
        return str(json.loads((folder / "node_modules" / client.package / "package.json").read_text())["version"])
    packages = map(str, folder.glob("lib/python*/site-packages"))
    name = client.package.partition("[")[0]
    return next(iter(importlib.metadata.distributions(name=name, path=list(packages)))).version


# -- trying ----------------------------------------------------------------------------------------


def try_library(name: str, folder: Path, url: str) -> dict[str, str | None]:
    """Return, for each ability of a library, why it failed, if it did."""
    told = {"CLIENT_URL": url, "CLIENT_KEY": "none", "CLIENT_MODEL": "scripted"}
    done = _run([str(folder / "bin" / "python"), str(LIBRARIES / f"{name}_client.py")], folder, told)
    try:
        found: dict[str, str | None] = json.loads(done[1].splitlines()[-1])
        return found
    except (ValueError, IndexError):
        return {"all": f"it ended with {done[0]}: {done[1][-500:]}"}


def try_program(client: Client, folder: Path, home: Path, url: str) -> dict[str, str | None]:
    """Return whether a program did its task, in a home and a project that are empty but for its ``files``."""
    for name, text in client.files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text.replace("URL", url))
    env = {name: value.replace("URL", url) for name, value in client.env.items()}
    bin_ = folder / ("node_modules/.bin" if client.npm else "bin")
    own = {
        "HOME": str(home),
        "PWD": str(home),
        "XDG_CONFIG_HOME": str(home / ".config"),
        "XDG_DATA_HOME": str(home / ".data"),
    }
    code, said = _run([str(bin_ / client.words[0]), *client.words[1:]], home, {**own, **env})
    wrong = []
    if " ".join(client.says.split()) not in " ".join(said.split()):
        wrong.append(f"it did not say {client.says!r}, ended with {code}, and said: {said[-1500:]}")
    if client.says == _DONE and not (home / _MARK).exists():
        wrong.append("the command was not run")
    return {"task": "; ".join(wrong) or None}


def _run(words: Sequence[str], folder: Path, env: Mapping[str, str]) -> tuple[int, str]:
    try:
        done = subprocess.run(
            words, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=_SECONDS, env={**os.environ, **env}, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        return -1, f"not done within {_SECONDS:g} s: {error.stdout!r:.500}"
    return done.returncode, done.stdout


# -- the campaign ----------------------------------------------------------------------------------


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--at", type=Path, metavar="FOLDER", help="where clients are installed, and stay")
    parser.add_argument("--only", action="append", choices=CLIENTS, help="may be repeated")


def campaign(report: Report, given: argparse.Namespace) -> None:
    at = given.at.resolve() if given.at else report.folder / "clients"
    absent = {name: why for name in given.only or CLIENTS if (why := install(CLIENTS[name], at / name))}
    tries = [name for name in given.only or CLIENTS if name not in absent]
    report.figures |= {"not_had": absent}
    if not tries:
        raise Missing(f"not to be had: {absent}")
    abilities = Counter[str]()
    english = "".join(path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md")))
    with _serving(report.folder / "libraries") as of_libraries, _serving(report.folder / "programs", english) as other:
        report.begin()
        for number in report.numbers():
            for name in report.chance(number).sample(tries, len(tries)):
                client = CLIENTS[name]
                server = other if client.words else of_libraries
                before = len(server.running.err)
                if client.words:
                    home = report.folder / f"{name}-{number}"
                    home.mkdir()
                    found = try_program(client, at / name, home, server.url)
                else:
                    found = try_library(name, at / name, server.url)
                abilities[name] += len(found)
                report.expect_none(f"{name}: {ability}: {why}" for ability, why in found.items() if why)
                report.expect_none(f"{name}: {each}" for each in _refused(server, before) if name not in _EXPECTED)
        report.expect_none([*of_libraries.left(), *other.left()])
    report.figures |= {"tried": abilities, "versions": {name: version_of(CLIENTS[name], at / name) for name in tries}}


def _serving(folder: Path, common: str = "") -> AbstractContextManager[Serving]:
    model = scripted.save(folder, scripts(), seed=_SEED, common=common)
    return serving("--model-name", "scripted", model=str(model), layers=scripted.LAYERS, context=_CONTEXT)


def _refused(server: Serving, before: int) -> list[str]:
    """Return the routes that were answered with an error since then, by the server's log."""
    found = Counter(_FAILED.findall(server.running.err[before:]))
    return [f"{count} times {code} for {route}" for (route, code), count in found.items() if code not in _NO_FAULTS]
