"""What a server holds, as it is asked in the middle of a campaign; and `splitinfer serve` in a process that tells it:
each line on its standard input is answered by a line of JSON on standard output.
"""

import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from splitinfer.common.json_text import dumps
from splitinfer.engine.loop.loop import Loop
from splitinfer.llm import LLM
from splitinfer.server.running import Server
from tests.core import invariants

LOOK_SECONDS = 30.0


def looked(llm: LLM, look: Callable[[Loop], dict[str, Any]]) -> dict[str, Any]:
    """What is found on the engine's thread; ``broken``: what must always hold of the scheduler, and does not."""
    found, done = dict[str, Any](broken=""), threading.Event()

    def on_engine(loop: Loop) -> None:
        try:
            invariants.check(loop.scheduler)
        except AssertionError as error:
            found["broken"] = str(error) or "an invariant of the scheduler does not hold"
        found.update(look(loop))
        done.set()

    llm._engine.call(on_engine)
    assert done.wait(LOOK_SECONDS), "the engine does not answer"
    return found


def look(server: Server) -> dict[str, Any]:
    """What is held: by the engine, asked on its thread, and by the server, asked on its event loop.

    All of ``held`` is 0 when no request is under way. ``broken``: what must always hold and does not.
    """
    service = server.service
    engine = service.llm._engine

    def on_engine(loop: Loop) -> dict[str, Any]:
        scheduler = loop.scheduler
        held = {
            **{f"kv_{name}": count for name, count in asdict(scheduler.kv.used).items()},
            "waiting": len(scheduler.waiting), "running": len(scheduler.running),
            "plans": len(scheduler.in_flight),
            "requests": len(loop.requests), "arriving": len(engine._shared._arriving),
        }  # fmt: skip
        return {"held": held, "stored": len(scheduler.prefix_cache.tree)}

    found = looked(service.llm, on_engine)
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
