"""A server for clients to be tried on: real processes, two stages, and a model that calls the tools it is offered.

    python -m tests.campaigns.clients.scripted_server         says where it is, until Ctrl-C

The script has an answer for each of the agents' tools that are known here, each a harmless command whose outcome the
next answer mentions; for any other client there is ``get_weather``.
"""

import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import processes
import scripted
import yaml

ROOT = processes.ROOT

THOUGHT, SAID = "The user asks for something that the tool can do.", "One moment. "
ANSWER = "It is sunny in Oslo, as the tool says."
DONE = "The command has run; that was the task."
COMMAND = "echo from-the-tool > made-by-the-agent.txt && cat made-by-the-agent.txt"

_AGENTS = {
    # a tool's name -> what it is given
    "exec_command": {"cmd": COMMAND},  # Codex
    "shell": {"command": ["bash", "-lc", COMMAND]},  # Codex, before
    "shell_command": {"command": COMMAND},
    "Bash": {"command": COMMAND, "description": "Runs what was asked"},  # Claude Code
    "bash": {"command": COMMAND, "description": "Runs what was asked"},  # opencode
    "run_shell_command": {
        "command": COMMAND,
        "is_background": False,
        "description": "Runs what was asked",
    },  # Qwen Code
}


def scripts() -> scripted.Scripts:
    """What the model answers. Beginnings differ, since each place of a script is a token of its own."""
    found = {
        "get_weather": [scripted.call("get_weather", THOUGHT, SAID, city="Oslo"), ANSWER],
        scripted.PLAIN: ["There was a king who had three daughters, and the youngest told the best tales of all."],
    }
    for name, given in _AGENTS.items():
        called = scripted.call(name, f"{name} can do that.", f"{SAID}With {name}. ", **given)
        found[name] = [called, f"{DONE} It was done with {name}."]
    return found


@contextmanager
def scripted_server(*options: str, context: int = 65536) -> Iterator[str]:
    """A server on a free port of this machine; its address. ``options``: of ``splitinfer serve``."""
    with tempfile.TemporaryDirectory(prefix="splitinfer-clients-") as made:
        folder = Path(made)
        corpus = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").rglob("*.md"))]
        model = scripted.save(folder / "scripted", scripts(), merges=6000, corpus=corpus)
        env = {name: str(folder / name) for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME")}
        stages = [{"name": "front", "layers": 1}, {"name": "back", "layers": 1, "address": "local"}]
        layout = folder / "layout.yaml"
        layout.write_text(yaml.safe_dump({"model": str(model), "stages": stages}), encoding="utf-8")
        wanted = ("--port", "0", "--context", str(context), "--model-name", "scripted")
        serving = processes.Running("serve", "--layout", str(layout), *wanted, *options, env=env)
        try:
            yield serving.sees(r"serving \S+ at (http://\S+)/v1", 120)[1]
        finally:
            serving.end()


def main() -> None:
    """Serve until Ctrl-C, or until it is told to end."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background processes ignore the first
        signal.signal(number, signal.default_int_handler)
    with scripted_server(*sys.argv[1:]) as url:
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()
        try:
            while True:
                time.sleep(1)
        except KeyboardInterrupt:
            return


if __name__ == "__main__":
    main()
