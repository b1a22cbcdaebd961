"""Agents' command-line tools: how each is told of a server, and given one task that needs its shell.

An agent passes if it ends with code 0, shows the model's last words, and the command that the model called has run: in
a folder of its own, with a home of its own, and with nothing of this machine's settings.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

TASK = "Run the command that makes the file, then say that it is done."
MADE, HOLDS, SAYS = "made-by-the-agent.txt", "from-the-tool", "The command has run"


@dataclass(frozen=True)
class Start:
    """How an agent is started: arguments behind its name, variables, and files in its home."""

    arguments: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


def codex(url: str, key: str, model: str) -> Start:
    """OpenAI's Codex: responses, by a provider of one's own."""
    config = f"""
model = "{model}"
model_provider = "splitinfer"
model_context_window = 60000

[model_providers.splitinfer]
name = "splitinfer"
base_url = "{url}/v1"
env_key = "SPLITINFER_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""
    arguments = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK)
    return Start(arguments, {"SPLITINFER_KEY": key}, {".codex/config.toml": config})


def claude(url: str, key: str, model: str) -> Start:
    """Anthropic's Claude Code: messages."""
    variables = {
        "ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": key, "ANTHROPIC_MODEL": model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": model, "ANTHROPIC_SMALL_FAST_MODEL": model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1",
    }  # fmt: skip
    return Start(("-p", TASK, "--allowedTools", "Bash"), variables)


def opencode(url: str, key: str, model: str) -> Start:
    """opencode: chat completions by Vercel's provider."""
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "splitinfer",
        "options": {"baseURL": f"{url}/v1", "apiKey": key},
        "models": {model: {"name": model, "tool_call": True, "limit": {"context": 60000, "output": 4096}}},
    }
    config = {
        "$schema": "https://opencode.ai/config.json", "model": f"splitinfer/{model}",
        "small_model": f"splitinfer/{model}", "provider": {"splitinfer": provider},
        "permission": {"bash": "allow", "edit": "allow"}, "autoupdate": False, "share": "disabled",
    }  # fmt: skip
    return Start(("run", TASK), files={".config/opencode/opencode.json": json.dumps(config)})


def qwen(url: str, key: str, model: str) -> Start:
    """Qwen Code: chat completions."""
    variables = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key, "OPENAI_MODEL": model}
    settings = {"security": {"auth": {"selectedType": "openai"}}, "privacy": {"usageStatisticsEnabled": False}}
    files = {".qwen/settings.json": json.dumps(settings)}
    return Start(("--yolo", "--auth-type", "openai", "-p", TASK), variables, files)


AGENTS: Mapping[str, Callable[[str, str, str], Start]] = {
    "codex": codex,
    "claude": claude,
    "opencode": opencode,
    "qwen": qwen,
}


def try_agent(name: str, program: str, folder: Path, url: str, key: str, model: str, seconds: float) -> str | None:
    """Give an agent its task; why it failed, if it did. ``folder``: where it has its home and works."""
    start = AGENTS[name](url, key, model)
    home, work = folder / "home", folder / "work"
    work.mkdir(parents=True, exist_ok=True)
    for path, text in start.files.items():
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(text, encoding="utf-8")
    variables = {
        "HOME": str(home),
        "PATH": f"{Path(program).parent}{os.pathsep}{os.environ['PATH']}",
        **start.variables,
    }
    with (folder / "said.txt").open("w", encoding="utf-8") as said:
        try:
            done = subprocess.run(
                [program, *start.arguments], cwd=work, env=variables, stdin=subprocess.DEVNULL, stdout=said,
                stderr=subprocess.STDOUT, timeout=seconds,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"it did not end within {seconds:g} s: {_end(folder)}"
    made = work / MADE
    if not made.exists() or HOLDS not in made.read_text(encoding="utf-8"):
        return f"it ended with {done.returncode} and did not run the command: {_end(folder)}"
    if done.returncode or SAYS not in (folder / "said.txt").read_text(encoding="utf-8"):
        return f"it ended with {done.returncode}: {_end(folder)}"
    return None


def found(name: str, modules: Path | None) -> str | None:
    """Where an agent's program is."""
    if modules is not None and (there := modules / "node_modules" / ".bin" / name).exists():
        return str(there)
    return shutil.which(name)


def _end(folder: Path) -> str:
    said = (folder / "said.txt").read_text(encoding="utf-8", errors="replace")
    return " ".join(said[-400:].split())
