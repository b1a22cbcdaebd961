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
_STAGE, _WORKER = f"{_ENGINE}/stage", f"{_ENGINE}/worker"
_SERVER = "splitinfer/server"

# By file: what goes wrong, and the code before and after. Of the engine many show only after a loss, a restart, or in
# the next session.
_CHANGES: dict[str, dict[str, tuple[str, str]]] = {
    f"{_ENGINE}/device/steps.py": {
        "dropped steps are completed after all": ("return steps is not self._steps", "return False"),
        "the thread of steps does not end": ("self._queue.put(None)", "pass"),
    },
    "splitinfer/engine/loop/reopening.py": {
        "what is on disk is forgotten when a stage was lost": (
            "scheduler.requeue_all(pipeline.kept())",
            "scheduler.requeue_all()",
        ),
        "a pipeline that has recovered says that it waits": (
            "        self._shared.lost_stage = None\n        return None\n",
            "        return None\n",
        ),
        "three losses in all end a pipeline, however many tokens came between them": (
            "another(self._figures.generated_tokens)",
            "another(0)",
        ),
    },
    "splitinfer/engine/fleet/pipeline.py": {
        "a local worker whose engine hangs is not replaced": (
            "if handle.hangs or handle.is_silent",
            "if handle.is_silent",
        ),
        "the worker that reports a loss is blamed for it": ("handle if is_sure else self._also_lost(handle)", "handle"),
    },
    "splitinfer/engine/loop/engine.py": {
        "the KV of the last answers is not saved at the end": ("loop.empty(_SAVE)", "pass"),
    },
    f"{_WORKER}/handshake.py": {
        "a worker stays taken by a coordinator that is gone": (
            "owner = None if self._owner is None or self._owner.link.closed is not None else self._owner",
            "owner = self._owner",
        ),
        "the stage before may connect after its session": ("                self._access.begin()\n", ""),
        "a stranger that says nothing is never dropped by a worker": ('link.abort("no message came in time")', "pass"),
    },
    f"{_STAGE}/commands.py": {
        "a block that cannot be read from disk counts as fetched": ("if not is_here)", "if is_here is None)"),
    },
    f"{_STAGE}/runner.py": {
        "a failure of the device comes again after recovery": ("        self._failure = None\n", ""),
    },
    "splitinfer/kvstore/files.py": {
        "blocks on disk are looked for outside their group": (
            "return self.path / group / str(name)",
            'return self.path / "any" / str(name)',
        ),
    },
    "splitinfer/engine/loop/open_requests.py": {
        "of several tokens that wait for their readers one is told": ("while self._untold:", "if self._untold:"),
    },
    "splitinfer/engine/loop/requests.py": {
        "text that was held back for a stop string is lost at the end": (
            "                found.append(self._told.finish(is_cut=is_cut))\n",
            "                pass\n",
        ),
    },
    f"{_STAGE}/history.py": {
        "wrong drafts stay among a sequence's tokens": (
            "            del self.tokens[part.end - part.num_logits + len(accepted) :]\n",
            "",
        ),
        "rows of answers cross a link in a lossy codec, too": (
            "max(0, min(part.end, limit) - part.start)",
            "len(part.token_ids)",
        ),
    },
    f"{_ENGINE}/drafts/draft_model.py": {
        "a draft model takes rolled back tokens for computed ones": (
            "            del entry.tokens[shared:]\n",
            "            pass\n",
        ),
    },
    "splitinfer/engine/weights/answering.py": {
        "readers of weights are counted for ever": ("self._answers.pop(id(connection), None)", "pass"),
    },
    "splitinfer/engine/weights/copying.py": {
        "the checksum of copied weights is not compared": (
            "if checksum(data) != message.check:",
            "if data.nbytes != asked.nbytes:",
        ),
    },
    f"{_ENGINE}/links/connection.py": {
        "a worker is told the coordinator's key for that of the stage before it": (
            "return before.key or own().public",
            "return own().public",
        ),
        "a row gets the mask of another": ("masks[at * size : (at + 1) * size]", "masks[:size]"),
    },
    f"{_WORKER}/worker.py": {
        "a worker's heartbeats do not tell its progress": ("owner.link.set_progress(done.plan.step + 1)", "pass"),
    },
    "splitinfer/shutdown.py": {
        "SIGTERM does not wait for answers": (
            "self._close(closing.patiently, closing.patiently_within)",
            "self._close(closing.at_once, closing.within)",
        ),
    },
    "transports/framing.py": {
        "missing frames are not noticed": ("if packet.seq != next_seq:", "if packet.seq < next_seq:"),
        "silence does not add up": ("self._silence += min(", "self._silence = min("),
        "the bounds of a received frame are not checked": ("    check_bounds(header_len, lengths, options)\n", ""),
        "a part that is not of bytes is passed on as it is": (
            'if view.format == "B" and view.ndim == 1',
            "if view.ndim == 1",
        ),
    },
    "transports/inbox.py": {
        "a sink is called for the first frames only": (
            "            self._is_pumping = False\n            return None",
            "            return None",
        ),
        "frames that were read count as waiting": ("        self._num_bytes -= num_bytes\n", ""),
        "the last reason for an end counts, not the first": (
            "            if self._ended is None:\n                self._ended = reason",
            "            self._ended = reason",
        ),
    },
    "transports/listener_hub.py": {
        "a connection that says nothing is never shut": (
            "shut_at = time.monotonic() + OPEN_SECONDS",
            "shut_at = math.inf",
        ),
    },
    "transports/tcp.py": {
        "an address in use is an error of another class": ("raise AddressInUse(", "raise AddressError("),
    },
    "transports/security.py": {
        "all listeners of a process admit the keys of the last one": ('f"splitinfer-{next(_domains)}"', '"splitinfer"'),
    },
    "transports/rdma/link.py": {
        "an rdma link on which all has arrived counts as dead": (
            "self._bytes_acked >= self._bytes_posted",
            "self._bytes_acked > self._bytes_posted",
        ),
    },
    "transports/rdma/channel.py": {
        "messages that were consumed keep their room": ("        self._num_used -= 1\n", ""),
    },
    "transports/rdma/child_process.py": {
        "a link does not wait for the end of the one before on its device": (
            "acquire(timeout=_DEVICE_SECONDS)",
            "acquire(timeout=0)",
        ),
        "no line says who hung in a receive and was killed": (
            "            if self.job.device:\n",
            "            if not self.job.device:\n",
        ),
    },
    f"{_SERVER}/service.py": {
        "one request more than the most is admitted": (
            "if self.num_running >= self._most:",
            "if self.num_running > self._most:",
        ),
        "a request that finds the server full keeps its key's place": (
            "        finally:\n            self.rates.end(key, num_answers)\n",
            "        else:\n            self.rates.end(key, num_answers)\n",
        ),
    },
    f"{_SERVER}/gate.py": {
        "a session outlives its key": (
            "return bought_by if bought_by is not None and self.keys.holds(bought_by) else None",
            "return bought_by",
        ),
        "another server's page on this machine may cause requests": ('("cross-site", "same-site")', '("cross-site",)'),
    },
    f"{_SERVER}/stream.py": {
        "a stream that is silent once is flooded with pings": (
            "self._wrote_at, self._is_writing = asyncio.get_running_loop().time(), False",
            "self._is_writing = False",
        ),
        "a stream that is over counts as under way": ("            self._end()\n", "            pass\n"),
    },
    f"{_SERVER}/asking.py": {
        "a client that leaves before its whole answer is not noticed": (
            "asyncio.wait((working, leaving),",
            "asyncio.wait((working,),",
        ),
    },
    f"{_SERVER}/problem.py": {
        "a client is told to try again after 0 seconds": (
            "max(1, math.ceil(self.retry_after))",
            "int(self.retry_after)",
        ),
        "errors of count_tokens have OpenAI's form": ("if path.startswith(ANTHROPIC)", "if path == ANTHROPIC"),
    },
    f"{_SERVER}/guard.py": {
        "the room of bodies is not given back": ('            self._bodies.held -= state["size"]\n', ""),
        "a request's id may have anything behind a plain word": (
            "_REQUEST_ID.fullmatch(given)",
            "_REQUEST_ID.match(given)",
        ),
    },
    f"{_SERVER}/answer.py": {
        "a prompt's tokens count once for each choice": ("prompts = outputs[:: self.num_choices]", "prompts = outputs"),
        "an answer that ends with its one call says that it just stopped": (
            'reason in (None, "stop")',
            'reason == "stop"',
        ),
        "an answer that its client has cancelled becomes an error": (
            "piece.error is None and not self.is_cancelled",
            "piece.error is None",
        ),
    },
    f"{_SERVER}/openai/chat_writer.py": {
        "all calls of a chat have the same index": (
            "self._num_calls[choice] = index + 1",
            "self._num_calls[choice] = index",
        ),
    },
    f"{_SERVER}/anthropic/writer.py": {
        "cached tokens count as input tokens, too": ("usage.prompt - usage.cached", "usage.prompt"),
    },
    f"{_SERVER}/page/routes.py": {
        "the page's figures need no key": (
            "        service.caller(request)\n        if request.method",
            "        if request.method",
        ),
    },
    f"{_SERVER}/page/feed.py": {
        "who has looked at the figures is counted for ever": ("            self.num_watching -= 1\n", ""),
    },
}

FAULTS = tuple(Fault(name, path, *change) for path, named in _CHANGES.items() for name, change in named.items())
