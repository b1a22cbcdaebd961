"""A coordinator in a process of its own that serves many clients, by lines of JSON; it can be killed under them.

    to it     {"ask": 3, "tokens": [..], "params": {..}, "flight": [3, 4, 2]}     {"know": [[..], [..]]}     {"look": 1}
    from it   {"ready": t}   {"of": 3, "at": t, "tokens": [..]}   {"of": 3, "end": "length", "cached": 256}
              {"noticed": t}   {"back": t}   {"looked": 1, ..}

Times are of the monotonic clock, which all processes of a machine share. The drafter knows what it was told
(``know``), and is wrong about three of ten tokens: so blocks of drafts are in flight, and some of them are void.
"""

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from processes import ROOT, START_SECONDS, environment, until

from splitinfer.core.json_text import dumps
from splitinfer.core.sequence import SamplingParams
from splitinfer.core.speculation.flight import Flight
from splitinfer.engine.coordinator.loop import Loop
from splitinfer.llm import LLM, Request, Settings
from tests.core import invariants
from tests.emulation.replay import Replay

WRONG = 0.3  # of the drafts
_LOOK_SECONDS = 30.0
_END_SECONDS = 10.0

# -- the process's side ----------------------------------------------------------------------------


class _Mouth(logging.Handler):
    """Says lines, from any thread; and what the engine's log says of losses and of their end."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._saying = threading.Lock()

    def say(self, **what: Any) -> None:
        with self._saying:
            print(dumps(what), flush=True)

    def emit(self, record: logging.LogRecord) -> None:
        said = record.getMessage()
        if "waiting up to" in said:
            self.say(noticed=time.monotonic())
        elif "all stages are back" in said:
            self.say(back=time.monotonic())


def main() -> None:
    """Serve until standard input ends. The argument is a file with the layout, the settings and the vocabulary."""
    order, mouth = json.loads(Path(sys.argv[1]).read_text()), _Mouth()
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    logging.getLogger("splitinfer.engine.coordinator").addHandler(mouth)
    replay = Replay(order["vocab_size"])
    replay.error = WRONG
    drafter = None if "draft" in order["layout"] else lambda: replay
    with LLM(order["layout"], settings=Settings(**order["settings"]), drafter=drafter) as llm:
        mouth.say(ready=time.monotonic())
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
        mouth.say(looked=order["look"], **_look(llm))


def _answer(number: int, request: Request, mouth: _Mouth) -> None:
    for event in request:
        if event.token_ids:
            mouth.say(of=number, at=time.monotonic(), tokens=list(event.token_ids))
    out = request.output
    mouth.say(of=number, end=str(out.finish_reason), cached=out.num_cached_tokens)


def _look(llm: LLM) -> dict[str, Any]:
    held = looked(llm, lambda loop: {"idle": loop.scheduler.is_idle, "used": asdict(loop.scheduler.kv.used)})
    return {"stats": llm.stats(), **held}


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
    assert done.wait(_LOOK_SECONDS), "the engine does not answer"
    return found


# -- the clients' side -----------------------------------------------------------------------------


@dataclass(slots=True)
class Answer:
    """What has come of one request: tokens, when each came, and in the end why it ended."""

    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    ending: str = ""
    num_cached: int = 0
    is_over: threading.Event = field(default_factory=threading.Event)

    def end(self, ending: str, num_cached: int = 0) -> None:
        self.ending, self.num_cached = ending, num_cached
        self.is_over.set()


class Coordinator:
    """The process, and what its clients have heard. ``folder``: for its order and its log."""

    def __init__(self, folder: Path, order: Mapping[str, Any], env: Mapping[str, str]) -> None:
        (folder / "order.json").write_text(dumps(order))
        self.log = folder / "coordinator.log"
        self.noticed: list[float] = []  # when it had lost somebody
        self.back: list[float] = []  # when all stages were there again
        self.ended_at: float | None = None  # when its clients heard that it is gone
        self._ready = threading.Event()
        self._answers: dict[int, Answer] = {}
        self._looked: dict[int, dict[str, Any]] = {}
        self._numbers = 0
        code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import coordinating as c; c.main()"
        with self.log.open("ab") as log:
            self._popen = subprocess.Popen(
                [sys.executable, "-c", code, str(folder / "order.json")], cwd=ROOT, env=environment(env),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        self.process = psutil.Process(self._popen.pid)
        self._thread = threading.Thread(target=self._read, name="clients", daemon=True)
        self._thread.start()

    def await_ready(self) -> None:
        """Until it serves, or has ended."""
        until(lambda: self._ready.is_set() or not self.is_alive, "a coordinator starts", 2 * START_SECONDS)

    @property
    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def ask(self, tokens: Sequence[int], params: Mapping[str, Any], flight: Sequence[int] | None = None) -> Answer:
        """One more client."""
        self._numbers += 1
        answer = self._answers[self._numbers] = Answer()
        self._say(ask=self._numbers, tokens=tokens, params=params, flight=flight)
        return answer

    def know(self, tokens: Sequence[int], answer: Sequence[int]) -> None:
        """Tell the drafter."""
        self._say(know=[tokens, answer])

    def look(self) -> dict[str, Any]:
        """What it holds."""
        self._numbers += 1
        number = self._numbers
        self._say(look=number)
        until(lambda: number in self._looked or not self.is_alive, "the coordinator looks", _LOOK_SECONDS)
        return self._looked.pop(number, {"broken": "the coordinator is gone"})

    def kill(self) -> float:
        """As kill -9 does; when."""
        struck = time.monotonic()
        self._popen.kill()
        self._gone()
        return struck

    def close(self) -> int:
        """Let it end, and say how it did."""
        with suppress(BrokenPipeError):
            assert self._popen.stdin is not None
            self._popen.stdin.close()
        try:
            return self._popen.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            return -9
        finally:
            self._gone()

    def _gone(self) -> None:
        self._popen.wait(_END_SECONDS)
        self._thread.join(_END_SECONDS)
        for pipe in (self._popen.stdin, self._popen.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def _say(self, **what: Any) -> None:
        assert self._popen.stdin is not None
        with suppress(BrokenPipeError, ValueError):  # it is gone, which its clients hear as its output ends
            self._popen.stdin.write(dumps(what).encode() + b"\n")
            self._popen.stdin.flush()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            with suppress(ValueError):  # half a line: it was killed while it said it
                self._hear(json.loads(line))
        self.ended_at = time.monotonic()
        for answer in self._answers.values():
            if not answer.is_over.is_set():
                answer.end("lost")

    def _hear(self, said: dict[str, Any]) -> None:
        if "noticed" in said:
            self.noticed.append(said["noticed"])
        elif "back" in said:
            self.back.append(said["back"])
        elif "ready" in said:
            self._ready.set()
        elif "looked" in said:
            self._looked[said["looked"]] = said
        elif "end" in said:
            self._answers.pop(said["of"]).end(said["end"], said["cached"])
        else:
            answer = self._answers[said["of"]]
            answer.times += [said["at"]] * len(said["tokens"])
            answer.token_ids += said["tokens"]
