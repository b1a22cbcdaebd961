"""A coordinator in a process of its own that serves many clients, by lines of JSON; it can be killed under them.

    to it     {"ask": "answer 3", "tokens": [..], "params": {..}, "flight": [3, 4, 2]}     {"know": [[..], [..]]}
              {"look": "look 4"}
    from it   ["answer 3", {"at": t, "tokens": [..], "end": ""}], the last with its end
              ["look 4", {..}]   ["ready", {"at": t}]   ["noticed", {"at": t}]   ["back", {"at": t}]

Times are of the monotonic clock, which all processes of a machine share. The drafter knows what it was told
(``know``), and is wrong about three of ten tokens: so blocks of drafts are in flight, and some of them are void.
"""

import itertools
import json
import logging
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
from processes import START_SECONDS, Running, until

from splitinfer.common.json_text import dumps
from splitinfer.core.sequence import SamplingParams
from splitinfer.core.speculation.flight import Flight
from splitinfer.llm import LLM, Request, Settings
from splitinfer.models import memory
from tests.emulation.replay import Replay

from .looking import LOOK_SECONDS, looked

WRONG = 0.3  # of the drafts
_END_SECONDS = 10.0
_HEARD = {
    "noticed": "waiting up to", "back": "all stages are back", "left": "part again when", "returned": "part again:",
    "missing": "of memory are missing",
}  # fmt: skip
_PROGRAM = "from tests.campaigns.coordinating import main; main()"

# -- the process's side ----------------------------------------------------------------------------


class _Mouth(logging.Handler):
    """Says lines, from any thread; and what the engine's log says of losses and of their end."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._saying = threading.Lock()

    def say(self, what: str, **told: Any) -> None:
        with self._saying:
            print(dumps([what, {"at": time.monotonic(), **told}]), flush=True)

    def emit(self, record: logging.LogRecord) -> None:
        for what, words in _HEARD.items():
            if words in record.getMessage():
                self.say(what)


def main() -> None:
    """Serve until standard input ends. The argument is the layout, the settings and the vocabulary."""
    order, mouth = json.loads(sys.argv[1]), _Mouth()
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    logging.getLogger("splitinfer.engine.loop").addHandler(mouth)
    if (free := order["free_bytes"]) is not None:
        memory.free_bytes = lambda _patience=None: max(0, free - mx.get_active_memory())
    replay = Replay(order["vocab_size"])
    replay.error = WRONG
    drafter = None if "draft" in order["layout"] else lambda: replay
    with LLM(order["layout"], settings=Settings(**order["settings"]), drafter=drafter) as llm:
        mouth.say("ready")
        for line in sys.stdin:
            _obey(json.loads(line), llm, replay, mouth)


def _obey(order: dict[str, Any], llm: LLM, replay: Replay, mouth: _Mouth) -> None:
    if "ask" in order:
        flight = None if order["flight"] is None else Flight(*order["flight"])
        request = llm.submit(order["tokens"], SamplingParams(**order["params"]), flight=flight)
        threading.Thread(target=_answer, args=(order["ask"], request, mouth), daemon=True).start()
    elif "know" in order:
        replay.know(*order["know"])
    else:
        held = looked(llm, lambda loop: {"idle": loop.scheduler.is_idle, "used": asdict(loop.scheduler.kv.used)})
        mouth.say(order["look"], stats=llm.stats(), **held)


def _answer(name: str, request: Request, mouth: _Mouth) -> None:
    for event in request:
        if event.token_ids:
            mouth.say(name, tokens=list(event.token_ids), end="")
    mouth.say(name, tokens=[], end=str(request.output.finish_reason))


# -- the clients' side -----------------------------------------------------------------------------


class Coordinator(Running):
    """The process, and what it has said so far."""

    def __init__(self, order: Mapping[str, Any], env: Mapping[str, str]) -> None:
        super().__init__(dumps(order), code=_PROGRAM, env=env)
        self._heard, self._read, self._numbers = defaultdict[str, list[dict[str, Any]]](list), 0, itertools.count()
        self.prints('"ready"', 2 * START_SECONDS)

    def heard(self, what: str) -> list[dict[str, Any]]:
        """What was said of this, line by line; half a line is none."""
        text = self.out
        end = text.rfind("\n") + 1
        for line in filter(None, text[self._read : end].split("\n")):
            about, told = json.loads(line)
            self._heard[about].append(told)
        self._read = end
        return self._heard[what]

    def ask(self, tokens: Sequence[int], params: Mapping[str, Any], flight: Sequence[int] | None = None) -> "Answer":
        """One more client."""
        answer = Answer(self, f"answer {next(self._numbers)}")
        self._say(ask=answer.name, tokens=tokens, params=params, flight=flight)
        return answer

    def know(self, tokens: Sequence[int], answer: Sequence[int]) -> None:
        """Tell the drafter."""
        self._say(know=[tokens, answer])

    def look(self) -> dict[str, Any]:
        """What it holds."""
        name = f"look {next(self._numbers)}"
        self._say(look=name)
        until(lambda: self.heard(name) or not self.is_alive, "the coordinator looks", LOOK_SECONDS)
        return next(iter(self.heard(name)), {"broken": "the coordinator is gone"})

    def kill(self) -> float:
        """As kill -9 does; when. All that it said is heard on return."""
        struck = self.signal(signal.SIGKILL)
        self.wait(_END_SECONDS)
        return struck

    def close(self) -> int:
        """Let it end, and say how it did."""
        self._popen.stdin.close()
        return self.wait(_END_SECONDS)

    def _say(self, **what: Any) -> None:
        with suppress(BrokenPipeError, ValueError):  # it is gone, and so are its answers
            self.types(f"{dumps(what)}\n")


@dataclass(frozen=True, slots=True)
class Answer:
    """What has come of one request so far."""

    coordinator: Coordinator
    name: str

    @property
    def _events(self) -> list[dict[str, Any]]:
        return self.coordinator.heard(self.name)

    @property
    def token_ids(self) -> list[int]:
        return [token for event in self._events for token in event["tokens"]]

    @property
    def times(self) -> list[float]:
        """When each token came."""
        return [event["at"] for event in self._events for _ in event["tokens"]]

    @property
    def ending(self) -> str:
        """Why it ended; "lost": its coordinator is gone; "": it goes on."""
        is_alive = self.coordinator.is_alive  # first, as it may end meanwhile
        return "".join(event["end"] for event in self._events) or ("" if is_alive else "lost")
