"""What a server holds, as it is asked in the middle of a campaign; and `splitinfer serve` in a process that tells it:
each line on its standard input is answered by a line of JSON on standard output.
"""

import sys
import threading
from dataclasses import asdict
from typing import Any

from splitinfer.core.json_text import dumps
from splitinfer.engine.coordinator.loop import Loop
from splitinfer.server.running import Server
from tests.core import invariants

_LOOK_SECONDS = 30.0


def look(server: Server) -> dict[str, Any]:
    """What is held: by the engine, asked on its thread, and by the server, asked on its event loop.

    All of ``held`` is 0 when no request is under way. ``broken``: what must always hold and does not.
    """
    found: dict[str, Any] = {"broken": ""}
    engine, done = server.service.llm._engine, threading.Event()

    def on_engine(loop: Loop) -> None:
        scheduler = loop.scheduler
        try:
            invariants.check(scheduler)
        except AssertionError as error:
            found["broken"] = str(error) or "an invariant of the scheduler does not hold"
        found["held"] = {
            **{f"kv_{name}": count for name, count in asdict(scheduler.kv.used).items()},
            "waiting": len(scheduler.waiting), "running": len(scheduler.running),
            "plans": len(scheduler.in_flight),
            "requests": len(loop.requests), "arriving": len(engine._shared._arriving),
        }  # fmt: skip
        found["stored"] = len(scheduler.prefix_cache.tree)
        done.set()

    engine.call(on_engine)
    assert done.wait(_LOOK_SECONDS), "the engine does not answer"
    service = server.service
    found["held"] |= {
        "under_way": service.num_running, "cancellable": len(service._answers), "connections": server.num_connections,
        "tasks": len(server._server.server_state.tasks),
    }  # fmt: skip
    return found


def main() -> None:
    """The command, and beside it whoever asks."""
    from splitinfer.__main__ import main as command
    from splitinfer.cli import serving

    opened: list[Server] = []

    class Watched(Server):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            opened.append(self)

    serving.Server = Watched  # type: ignore[misc]

    def answer() -> None:
        for _ in sys.stdin:
            sys.stdout.write(f"{dumps(look(opened[0]))}\n")
            sys.stdout.flush()

    threading.Thread(target=answer, name="looking", daemon=True).start()
    command()
