"""What `splitinfer service status` prints. Pure."""

import shlex

from splitinfer.service.actions import Status


def lines(status: Status) -> list[str]:
    """The lines about one service: the first says whether it runs."""
    name = status.service.name
    if status.file is None:
        if status.state.is_loaded:
            return [f"{name}: its file is gone, but the system knows it; `splitinfer service remove {name}` forgets it"]
        return [f"{name}: not installed; `splitinfer service install {name}` does it"]
    environment = status.installed.environment if status.installed else {}
    command = shlex.join(status.installed.command) if status.installed else "unknown: the file cannot be understood"
    return [
        f"{name}: {_running(status)}",
        f"  command  {command}",
        *(f"  variable {each}={value}" for each, value in environment.items()),
        f"  file     {status.file}",
        f"  log      {status.log}",
        *(f"    {line}" for line in status.last_lines),
    ]


def _running(status: Status) -> str:
    state = status.state
    if not state.is_loaded:
        return "installed, but the system does not know it: it starts when you log in, or when you install it again"
    what = f"runs, process {state.pid}" if state.pid is not None else "does not run"
    again = f"; started {state.starts} times" if (state.starts or 0) > 1 else ""
    return what + again + (f"; it ended last with {state.last_exit}" if state.last_exit else "")
