"""Sixty faults, each a line or two of one file: what goes wrong when code is moved, and a user would be hurt by it.

`planted.py` plants them, one at a time, and asks whether a test notices. A fault names no test, and was chosen by
reading the program alone. `before` stands once in its file; it is short, so that a fault survives most changes around
it. Where the code of a fault has gone, the same fault is planted where its work is done now.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    name: str  # what goes wrong
    path: str  # from the root
    before: str
    after: str

    @property
    def room(self) -> str:
        """Of "engine", "transports" or "server"; to the engine belongs all that a cluster shows."""
        folder = self.path.removeprefix("splitinfer/").split("/")[0]
        return folder if folder in ("transports", "server") else "engine"


_ENGINE = "splitinfer/engine"
_COORDINATOR, _STAGE, _WORKER = f"{_ENGINE}/coordinator", f"{_ENGINE}/stage", f"{_ENGINE}/worker"
_SERVER = "splitinfer/server"

# The engine: what shows only after a loss, a restart, or in the next session.
_RECOVERY = (
    Fault(
        "dropped steps are completed after all",
        f"{_ENGINE}/device/steps.py",
        "return steps is not self._steps",
        "return False",
    ),
    Fault(
        "what is on disk is forgotten when a stage was lost",
        f"{_COORDINATOR}/reopening.py",
        "scheduler.requeue_all(pipeline.kept())",
        "scheduler.requeue_all()",
    ),
    Fault(
        "a pipeline that has recovered says that it waits",
        f"{_COORDINATOR}/reopening.py",
        "        self._shared.lost_stage = None\n        return None\n",
        "        return None\n",
    ),
    Fault(
        "three losses in all end a pipeline, however many tokens came between them",
        f"{_COORDINATOR}/reopening.py",
        "another(self._figures.generated_tokens)",
        "another(0)",
    ),
    Fault(
        "a local worker whose engine hangs is not replaced",
        f"{_COORDINATOR}/pipeline.py",
        "if handle.hangs or handle.is_silent",
        "if handle.is_silent",
    ),
    Fault(
        "the worker that reports a loss is blamed for it",
        f"{_COORDINATOR}/pipeline.py",
        "handle if is_sure else self._also_lost(handle)",
        "handle",
    ),
    Fault(
        "the KV of the last answers is not saved at the end",
        f"{_COORDINATOR}/engine.py",
        "loop.empty(_SAVE)",
        "pass",
    ),
    Fault(
        "a worker stays taken by a coordinator that is gone",
        f"{_WORKER}/handshake.py",
        "busy = self._owner is not None and self._owner.link.closed is None",
        "busy = self._owner is not None",
    ),
    Fault(
        "a block that cannot be read from disk counts as fetched",
        f"{_STAGE}/commands.py",
        "if not is_here)",
        "if is_here is None)",
    ),
    Fault(
        "a failure of the device comes again after recovery",
        f"{_STAGE}/runner.py",
        "        self._failure = None\n",
        "",
    ),
    Fault(
        "blocks on disk are looked for outside their group",
        "splitinfer/kvstore/files.py",
        "return self.path / group / str(name)",
        'return self.path / "any" / str(name)',
    ),
)

_RUNNING = (
    Fault(
        "of several tokens that wait for their readers one is told",
        f"{_COORDINATOR}/open_requests.py",
        "while self._untold:",
        "if self._untold:",
    ),
    Fault(
        "void steps that were not sent are not reduced",
        f"{_COORDINATOR}/pipeline.py",
        "            leave_out_rejected()\n",
        "            pass\n",
    ),
    Fault(
        "text that was held back for a stop string is lost at the end",
        f"{_COORDINATOR}/requests.py",
        "text + update.text + self._stops.flush()",
        "text + update.text",
    ),
    Fault(
        "the thread of steps does not end",
        f"{_ENGINE}/device/steps.py",
        "self._queue.put(None)",
        "pass",
    ),
    Fault(
        "wrong drafts stay among a sequence's tokens",
        f"{_STAGE}/history.py",
        "            del self.tokens[part.end - part.num_logits + len(accepted) :]\n",
        "",
    ),
    Fault(
        "a row gets the mask of another",
        f"{_STAGE}/checks.py",
        "masks[at * size : (at + 1) * size]",
        "masks[:size]",
    ),
    Fault(
        "rows of answers cross a link in a lossy codec, too",
        f"{_STAGE}/history.py",
        "max(0, min(part.end, limit) - part.start)",
        "len(part.token_ids)",
    ),
    Fault(
        "a draft model takes rolled back tokens for computed ones",
        f"{_ENGINE}/drafts/draft_model.py",
        "            del entry.tokens[shared:]\n",
        "            pass\n",
    ),
    Fault(
        "readers of weights are counted for ever",
        f"{_ENGINE}/files/answering.py",
        "self._answers.pop(id(connection), None)",
        "pass",
    ),
    Fault(
        "the checksum of copied weights is not compared",
        f"{_ENGINE}/files/copying.py",
        "if checksum(data) != message.check:",
        "if data.nbytes != asked.nbytes:",
    ),
    Fault(
        "a worker is told the coordinator's key for that of the stage before it",
        f"{_ENGINE}/links/keys.py",
        "return before.key or own().public",
        "return own().public",
    ),
    Fault(
        "the stage before may connect after its session",
        f"{_WORKER}/handshake.py",
        "                self._access.begin()\n",
        "",
    ),
    Fault(
        "a worker's heartbeats do not tell its progress",
        f"{_WORKER}/worker.py",
        "owner.link.set_progress(done.plan.step + 1)",
        "pass",
    ),
    Fault(
        "a stranger that says nothing is never dropped by a worker",
        f"{_WORKER}/handshake.py",
        'pending.link.abort("no message came in time")',
        "pass",
    ),
    Fault(
        "SIGTERM does not wait for answers",
        "splitinfer/shutdown.py",
        "self._close(closing.patiently, closing.patiently_within)",
        "self._close(closing.at_once, closing.within)",
    ),
)

_TRANSPORTS = (
    Fault(
        "missing frames are not noticed",
        "transports/framing.py",
        "if packet.seq != self._next_seq:",
        "if packet.seq < self._next_seq:",
    ),
    Fault(
        "silence does not add up",
        "transports/framing.py",
        "self._silence += min(",
        "self._silence = min(",
    ),
    Fault(
        "the bounds of a received frame are not checked",
        "transports/framing.py",
        "    check_bounds(header_len, [part.nbytes for part in parts], options)\n",
        "",
    ),
    Fault(
        "a part that is not of bytes is passed on as it is",
        "transports/framing.py",
        'if view.format == "B" and view.ndim == 1',
        "if view.ndim == 1",
    ),
    Fault(
        "a sink is called for the first frames only",
        "transports/inbox.py",
        "            self._is_pumping = False\n            return None",
        "            return None",
    ),
    Fault(
        "frames that were read count as waiting",
        "transports/inbox.py",
        "        self._num_bytes -= num_bytes\n",
        "",
    ),
    Fault(
        "the last reason for an end counts, not the first",
        "transports/inbox.py",
        "            if is_first:\n                self._ended = reason",
        "            self._ended = reason",
    ),
    Fault(
        "a connection that says nothing is never shut",
        "transports/listener_hub.py",
        "shut_at = time.monotonic() + OPEN_SECONDS",
        "shut_at = math.inf",
    ),
    Fault(
        "an address in use is an error of another class",
        "transports/tcp.py",
        "raise AddressInUse(",
        "raise AddressError(",
    ),
    Fault(
        "all listeners of a process admit the keys of the last one",
        "transports/security.py",
        'f"splitinfer-{next(_domains)}"',
        '"splitinfer"',
    ),
    Fault(
        "an rdma link on which all has arrived counts as dead",
        "transports/rdma/link.py",
        "self._bytes_acked >= self._bytes_posted",
        "self._bytes_acked > self._bytes_posted",
    ),
    Fault(
        "messages that were consumed keep their room",
        "transports/rdma/segment.py",
        "        self._num_used -= 1\n",
        "",
    ),
    Fault(
        "a link does not wait for the end of the one before on its device",
        "transports/rdma/child_process.py",
        "acquire(timeout=_DEVICE_SECONDS)",
        "acquire(timeout=0)",
    ),
    Fault(
        "no line says who hung in a receive and was killed",
        "transports/rdma/child_process.py",
        "            if self.job.device:\n",
        "            if not self.job.device:\n",
    ),
)

_OF_SERVER = (
    Fault(
        "one request more than the most is admitted",
        f"{_SERVER}/service.py",
        "if self.num_running >= self._most:",
        "if self.num_running > self._most:",
    ),
    Fault(
        "a session outlives its key",
        f"{_SERVER}/gate.py",
        "return bought_by if bought_by is not None and self.keys.holds(bought_by) else None",
        "return bought_by",
    ),
    Fault(
        "another server's page on this machine may cause requests",
        f"{_SERVER}/gate.py",
        '("cross-site", "same-site")',
        '("cross-site",)',
    ),
    Fault(
        "a request that finds the server full keeps its key's place",
        f"{_SERVER}/service.py",
        "        finally:\n            self.rates.end(key, num_answers)\n",
        "        else:\n            self.rates.end(key, num_answers)\n",
    ),
    Fault(
        "a stream that is silent once is flooded with pings",
        f"{_SERVER}/stream.py",
        "self._wrote_at, self._is_writing = asyncio.get_running_loop().time(), False",
        "self._is_writing = False",
    ),
    Fault(
        "a stream that is over counts as under way",
        f"{_SERVER}/stream.py",
        "            self._end()\n",
        "            pass\n",
    ),
    Fault(
        "a client that leaves before its whole answer is not noticed",
        f"{_SERVER}/asking.py",
        "asyncio.wait((working, leaving),",
        "asyncio.wait((working,),",
    ),
    Fault(
        "a client is told to try again after 0 seconds",
        f"{_SERVER}/problem.py",
        "max(1, math.ceil(self.retry_after))",
        "int(self.retry_after)",
    ),
    Fault(
        "errors of count_tokens have OpenAI's form",
        f"{_SERVER}/problem.py",
        "if path.startswith(ANTHROPIC)",
        "if path == ANTHROPIC",
    ),
    Fault(
        "the room of bodies is not given back",
        f"{_SERVER}/guard.py",
        '            self._bodies.held -= state["size"]\n',
        "",
    ),
    Fault(
        "a request's id may have anything behind a plain word",
        f"{_SERVER}/guard.py",
        "_REQUEST_ID.fullmatch(given)",
        "_REQUEST_ID.match(given)",
    ),
    Fault(
        "a prompt's tokens count once for each choice",
        f"{_SERVER}/answer.py",
        "prompts = outputs[:: self.num_choices]",
        "prompts = outputs",
    ),
    Fault(
        "an answer that ends with its one call says that it just stopped",
        f"{_SERVER}/answer.py",
        'reason in (None, "stop")',
        'reason == "stop"',
    ),
    Fault(
        "an answer that its client has cancelled becomes an error",
        f"{_SERVER}/answer.py",
        "piece.error is None and not self.is_cancelled",
        "piece.error is None",
    ),
    Fault(
        "all calls of a chat have the same index",
        f"{_SERVER}/openai/chat_writer.py",
        "self._num_calls[choice] = index + 1",
        "self._num_calls[choice] = index",
    ),
    Fault(
        "cached tokens count as input tokens, too",
        f"{_SERVER}/anthropic/writer.py",
        "usage.prompt - usage.cached",
        "usage.prompt",
    ),
    Fault(
        "the page's figures need no key",
        f"{_SERVER}/page/routes.py",
        "        service.caller(request)\n        if request.method",
        "        if request.method",
    ),
    Fault(
        "who has looked at the figures is counted for ever",
        f"{_SERVER}/page/feed.py",
        "            self.num_watching -= 1\n",
        "",
    ),
)

FAULTS = (*_RECOVERY, *_RUNNING, *_TRANSPORTS, *_OF_SERVER)
