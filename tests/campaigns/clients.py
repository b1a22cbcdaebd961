"""Libraries that people call a server with, and what agents were recorded to send, on a scripted model.

    python -m tests.campaigns clients --python VENV/bin/python      # where litellm, for example, is installed

The scripts in ``libraries/`` try what each can do: streams, a round trip of tools, reasoning, errors (`openai` and
`anthropic` are tried by ``server/test_conformance.py`` and ``server/test_answers.py``). What Codex,
Claude Code, opencode and Qwen Code sent (``server/recorded_requests.json``) is sent again: an agent that asks must get
a call of its own tool, and one that hands the outcome back must be told that the task is done. The order is drawn by
the seed, and all are tried again while there is time; the server keeps their KV meanwhile.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import scripted

from .report import Missing, Report
from .serving import left_by, serving, settle

LIBRARIES = Path(__file__).resolve().parent / "libraries"
SCRIPTS = ("litellm_client", "ollama_client")
RECORDED = Path(__file__).resolve().parents[1] / "server" / "recorded_requests.json"
MISSING = ("ModuleNotFoundError", "PackageNotFoundError")
_SECONDS = 300.0  # for a script
_CONTEXT = 65536
_SEED = 3  # of the model's weights: with them an answer in a form opens no reasoning, which it could not close

TALE = "There was a king who had three daughters, and the youngest told the best tales of all."
DONE = "The command has run; that was the task."
COMMAND = "echo from-the-tool > made-by-the-agent.txt && cat made-by-the-agent.txt"
_AGENTS: dict[str, dict[str, Any]] = {
    "exec_command": {"cmd": COMMAND},  # Codex
    "Bash": {"command": COMMAND, "description": "Runs what was asked"},  # Claude Code
    "bash": {"command": COMMAND, "description": "Runs what was asked"},  # opencode
    "run_shell_command": {"command": COMMAND, "is_background": False, "description": "Runs it"},  # Qwen Code
}


def scripts() -> scripted.Scripts:
    """What the model answers. Beginnings differ, since each place of a script is a token of its own."""
    thought = "The user asks for something that the tool can do."
    weather = scripted.call("get_weather", thought, "One moment. ", city="Oslo")
    found = {"get_weather": [weather, "It is sunny in Oslo, as the tool says."], scripted.PLAIN: [TALE]}
    for name, given in _AGENTS.items():
        called = scripted.call(name, f"{name} can do that.", f"One moment. With {name}. ", **given)
        found[name] = [called, f"{DONE} It was done with {name}."]
    return found


# -- libraries -------------------------------------------------------------------------------------


def try_script(name: str, pythons: Sequence[str], url: str) -> dict[str, Any] | None:
    """What a script found: the library's version, and by ability why it failed, if it did; ``None``: no interpreter has
    the library."""
    told = {"CLIENT_URL": url, "CLIENT_KEY": "none", "CLIENT_MODEL": "scripted"}
    for python in pythons:
        command = [python, str(LIBRARIES / f"{name}.py")]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, env={**os.environ, **told})
        except subprocess.TimeoutExpired:
            return {"version": "?", "found": {"all": f"not done within {_SECONDS:g} s"}}
        if done.returncode and any(word in done.stderr for word in MISSING):
            continue
        try:
            result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        except (ValueError, IndexError):
            return {"version": "?", "found": {"all": f"it ended with {done.returncode}: {done.stderr[-500:]}"}}
        return result
    return None


# -- agents ----------------------------------------------------------------------------------------


def try_recorded(url: str, recorded: dict[str, Any]) -> str:
    """Send an agent's request; why its answer is not what the agent needs, or ""."""
    body = json.dumps({**recorded["body"], "model": "scripted"}).encode()
    asked = urllib.request.Request(url + recorded["path"], body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=_SECONDS) as answer:
            lines = answer.read().decode().splitlines()
    except OSError as error:
        return f"{error}"
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    said = _said(recorded["path"], events)
    if recorded["client"].endswith("hands the outcome back"):
        return "" if DONE in said else f"it was told {said!r:.300}"
    if recorded["client"].endswith("title"):
        return "" if TALE in said else f"it was told {said!r:.300}"
    tools = [name for name in _AGENTS if f"call {name} " in said]
    return "" if tools and COMMAND in said else f"no tool was called: {said!r:.300}"


def _said(path: str, events: Sequence[dict[str, Any]]) -> str:
    """The text of a stream, and ``call NAME ARGUMENTS`` for each call."""
    if path == "/v1/responses":
        items = next(one["response"]["output"] for one in events if one["type"] == "response.completed")
        parts = [part["text"] for item in items for part in item.get("content") or ()]
        return "".join([*parts, *(f"call {i['name']} {i['arguments']}" for i in items if i["type"] == "function_call")])
    found = list[str]()
    for event in events:
        if path == "/v1/messages":
            found.append(f"call {name} " if (name := event.get("content_block", {}).get("name")) else "")
            found += [str(event.get("delta", {}).get(key) or "") for key in ("text", "partial_json")]
            continue
        for delta in (choice["delta"] for choice in event["choices"]):
            found.append(delta.get("content") or "")
            for function in (call["function"] for call in delta.get("tool_calls") or ()):
                found += [f"call {function['name']} " if function.get("name") else "", function.get("arguments") or ""]
    return "".join(found)


# -- the campaign ----------------------------------------------------------------------------------


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--python", action="append", help="an interpreter with clients; this one if none is given")
    parser.add_argument("--only", choices=(*SCRIPTS, "agents"))


def campaign(report: Report, given: argparse.Namespace) -> None:
    pythons = given.python or [sys.executable]
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    tries = [name for name in (*SCRIPTS, "agents") if given.only in (None, name)]
    abilities, absent, versions = Counter[str](), set[str](), dict[str, str]()
    with tempfile.TemporaryDirectory(prefix="clients-") as folder:
        model = scripted.save(Path(folder) / "scripted", scripts(), seed=_SEED)
        wanted = ("--model-name", "scripted")
        with serving(*wanted, model=str(model), layers=scripted.LAYERS, context=_CONTEXT) as server:
            report.begin()
            for number in report.numbers():
                for name in report.chance(number).sample(tries, len(tries)):
                    if name == "agents":
                        failed = {one["client"]: try_recorded(server.url, one) for one in recorded}
                    elif (found := try_script(name, pythons, server.url)) is not None:
                        versions[name], failed = found["version"], found["found"]
                    else:
                        absent.add(name)
                        continue
                    abilities[name] += len(failed)
                    report.expect_none(f"{name}: {ability}: {why}" for ability, why in failed.items() if why)
            report.expect_none([*left_by(settle(server.look)), *server.complaints])
    if not abilities:
        raise Missing(f"not installed here: {', '.join(sorted(absent))}")
    report.figures |= {"tried": abilities, "versions": versions, "not_installed": sorted(absent)}
