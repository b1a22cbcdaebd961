"""``splitinfer bench --mode server``: what a client over HTTP loses to one of the library.

streams     many streams at once on one pipeline: by ``LLM``, as chat completions, and as messages; in turns, the
            same tokens, by a client that reads raw sockets in a process of its own. Tokens a second, and processor
            seconds a token: of the server's event loop, and of the whole process beyond what it takes without HTTP
alone       one request at a time, by ``LLM`` and as a chat completion in turns: seconds to the first token

"""

import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from splitinfer.bench.server.client import Arrival, arrivals_of, chat_text, message_text, token_times
from splitinfer.bench.shared import machine
from splitinfer.bench.shared.child_process import ChildProcess
from splitinfer.bench.shared.inputs import check_context
from splitinfer.bench.shared.measure import quantile
from splitinfer.bench.shared.options import Options
from splitinfer.bench.shared.printing import say
from splitinfer.bench.shared.systems import open_stages, plain_layout, whole
from splitinfer.bench.shared.throughput import BatchRun
from splitinfer.core.sequence import SamplingParams
from splitinfer.errors import ConfigError, ModelError
from splitinfer.llm import LLM
from splitinfer.server.running import Listen, Server
from splitinfer.server.service import Service

_LIBRARY, _CHAT, _MESSAGES = "LLM", "chat completions", "messages"
_PATHS = {_CHAT: "/v1/chat/completions", _MESSAGES: "/v1/messages"}
_TEXT_OF = {_CHAT: chat_text, _MESSAGES: message_text}
_STREAMS = 16  # at once, by default
_ALONE = 10  # requests alone of each kind in a trial
_ALONE_TOKENS = 4
_MORE = 2  # times as many prompts are tried as are needed: messages cannot be told to go on behind an end token
_LETTERS = "etaoinshrdlu "


def measure(options: Options) -> dict[str, Any]:
    """Measure, and return the document.

    Raises:
        SplitinferError: something cannot be measured.
    """
    context = options.stream_prompt_tokens + options.stream_tokens + 64
    check_context(options.checkpoint, context, f"a prompt of {options.stream_prompt_tokens:,} tokens and its answer")
    on = machine.describe()
    with ExitStack() as stack:
        llm = open_stages(stack, options, options.settings(context))
        if not llm.has_tokenizer:
            raise ConfigError("--mode server needs a model with a tokenizer")
        server = stack.enter_context(closing(Server(Service(llm, "bench"), Listen(port=0))))
        client = stack.enter_context(closing(ChildProcess("splitinfer.bench.server.client")))
        pinned = machine.pin_stages(llm.layout.stages)
        trials = _Trials(options, llm, server, client)
        trials.prepare()
        streams, alone = [], []
        for number in range(options.trials):
            say(f"trial {number + 1} of {options.trials}")
            streams.append(trials.streams())
            alone.append(trials.alone())
        return {
            "measured_on": {**on, "pinned": pinned},
            "layout": plain_layout(llm),
            "streams": trials.num_streams,
            "prompt_tokens": [len(llm.tokenizer.encode_chat(each)) for each in trials.prompts],
            "answer_tokens": options.stream_tokens,
            "trials": streams,
            "alone": alone,
            "medians": _medians(streams, alone),
        }


@dataclass(slots=True)
class _Outcome:
    """Streams that were read: what each gave when, and what it took. ``loop``, ``process``: processor seconds of the
    server's event loop, and of this process."""

    sent: list[float]
    arrivals: list[list[Arrival]]
    loop: float
    process: float


@dataclass(slots=True)
class _Trials:
    options: Options
    llm: LLM
    server: Server
    client: ChildProcess
    prompts: list[list[dict[str, str]]] = field(default_factory=list)
    _answers: list[tuple[str, list[int]]] = field(default_factory=list)  # text, and its length at each token
    _systems: list[str] = field(default_factory=lambda: [_LIBRARY, _CHAT])

    @property
    def num_streams(self) -> int:
        """The number of streams at once."""
        return (self.options.streams or (_STREAMS,))[0]

    def prepare(self) -> None:
        """Choose prompts whose answers do not end early, and warm up."""
        say("warming up")
        every = [_prompt(self.options, i) for i in range(_MORE * self.num_streams)]
        params = SamplingParams(max_tokens=self.options.stream_tokens)
        answers = self.llm.generate([self.llm.tokenizer.encode_chat(prompt) for prompt in every], params)
        unended = [p for p, answer in zip(every, answers, strict=True) if answer.finish_reason == "length"]
        if len(unended) >= self.num_streams:
            self._systems.append(_MESSAGES)
        else:
            say("messages are left out: too many answers of this model end early")
        self.prompts = (unended if len(unended) >= self.num_streams else every)[: self.num_streams]
        self._answers = [self._lengths(prompt) for prompt in self.prompts]
        for system in self._systems:
            self._run(system, self.prompts, self.options.stream_tokens)

    def streams(self) -> dict[str, Any]:
        """Every system once, with all streams at once."""
        return {system: self._figures(system) for system in self._systems}

    def _figures(self, system: str) -> dict[str, Any]:
        outcome = self._run(system, self.prompts, self.options.stream_tokens)
        texts = ["".join(text for _, text in arrivals) for arrivals in outcome.arrivals]
        if texts != [text for text, _ in self._answers]:
            raise ModelError(f"the same requests gave other texts as {system} than before")
        pairs = zip(outcome.arrivals, self._answers, strict=True)
        times = tuple(token_times(arrivals, lengths) for arrivals, (_, lengths) in pairs)
        start, num_tokens = min(outcome.sent), sum(map(len, times))
        run = BatchRun(tuple(() for _ in times), tuple(tuple(at - start for at in each) for each in times))
        run.check()
        ttft = sorted(each[0] - sent for each, sent in zip(times, outcome.sent, strict=True))
        return {
            "tokens_per_second": run.tokens_per_second,
            "ttft_p50": quantile(ttft, 0.5),
            "itl_p50": quantile(run.itl, 0.5),
            "itl_p99": quantile(run.itl, 0.99),
            "seconds": run.seconds,
            "loop_seconds_per_token": outcome.loop / num_tokens,
            "process_seconds_per_token": outcome.process / num_tokens,
        }

    def alone(self) -> dict[str, list[float]]:
        """Requests one after the other, by each system in turn: seconds to the first text of each."""
        found: dict[str, list[float]] = {system: [] for system in self._systems}
        for i in range(_ALONE):
            for system, seconds in found.items():
                outcome = self._run(system, [self.prompts[i % len(self.prompts)]], _ALONE_TOKENS)
                if not outcome.arrivals[0]:
                    raise ModelError(f"the first {_ALONE_TOKENS} tokens of an answer have no text")
                seconds.append(outcome.arrivals[0][0][0] - outcome.sent[0])
        return found

    def _run(self, system: str, prompts: Sequence[list[dict[str, str]]], num_tokens: int) -> _Outcome:
        loop, process = self.server.loop_seconds(), time.process_time()
        read = self._by_library if system == _LIBRARY else self._by_http
        sent, arrivals = read(system, prompts, num_tokens)
        return _Outcome(sent, arrivals, self.server.loop_seconds() - loop, time.process_time() - process)

    def _by_library(
        self, _system: str, prompts: Sequence[list[dict[str, str]]], num_tokens: int
    ) -> tuple[list[float], list[list[Arrival]]]:
        params, sent = SamplingParams(max_tokens=num_tokens, ignore_eos=True), list[float]()
        encoded, requests = [self.llm.tokenizer.encode_chat(prompt) for prompt in prompts], []
        for tokens in encoded:
            sent.append(time.monotonic())
            requests.append(self.llm.submit(tokens, params))

        def read(request: Any) -> list[Arrival]:
            found = [(time.monotonic(), event.text) for event in request if event.text]
            whole(request.output)
            return found

        with ThreadPoolExecutor(len(requests)) as readers:
            try:
                return sent, list(readers.map(read, requests))
            except BaseException:
                for request in requests:
                    request.abort()
                raise

    def _by_http(
        self, system: str, prompts: Sequence[list[dict[str, str]]], num_tokens: int
    ) -> tuple[list[float], list[list[Arrival]]]:
        more = {"ignore_eos": True} if system == _CHAT else {}
        bodies = [
            {"model": "bench", "messages": prompt, "max_tokens": num_tokens, "temperature": 0, "stream": True, **more}
            for prompt in prompts
        ]
        requests = [_request(_PATHS[system], body) for body in bodies]
        answer = self.client.ask({"port": self.server.port, "requests": requests})
        reads = [[(at, text.encode("utf-8", "surrogateescape")) for at, text in each] for each in answer["reads"]]
        return answer["sent"], [arrivals_of(each, _TEXT_OF[system]) for each in reads]

    def _lengths(self, prompt: list[dict[str, str]]) -> tuple[str, list[int]]:
        """The library's answer to a prompt, and the length of its text at each token."""
        params = SamplingParams(max_tokens=self.options.stream_tokens, ignore_eos=True)
        text, lengths = "", list[int]()
        for event in self.llm.submit(self.llm.tokenizer.encode_chat(prompt), params):
            text += event.text
            lengths += [len(text)] * len(event.token_ids)
        return text, [min(length, len(text)) for length in lengths]


def _prompt(options: Options, number: int) -> list[dict[str, str]]:
    """A conversation of one message, of about so many tokens: letters, of which a tokenizer makes one each or fewer."""
    rng = random.Random(f"{options.seed} server {number}")
    return [{"role": "user", "content": "".join(rng.choice(_LETTERS) for _ in range(options.stream_prompt_tokens))}]


def _request(path: str, body: Mapping[str, Any]) -> str:
    content = json.dumps(body)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n{content}"


def _medians(streams: Sequence[Mapping[str, Any]], alone: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Any]:
    """Each system's figures, and how they compare with the library's, trial by trial."""
    found: dict[str, Any] = {}
    for system in streams[0]:
        figures = {name: statistics.median(trial[system][name] for trial in streams) for name in streams[0][system]}
        figures["ttft_alone_p50"] = statistics.median(each for trial in alone for each in trial[system])
        if system != _LIBRARY:
            figures |= _compared(system, streams, alone)
        found[system] = figures
    return found


def _compared(
    system: str, streams: Sequence[Mapping[str, Any]], alone: Sequence[Mapping[str, Sequence[float]]]
) -> dict[str, float]:
    def of(make: Callable[[Mapping[str, Any], Mapping[str, Any]], float]) -> float:
        return statistics.median(make(trial[system], trial[_LIBRARY]) for trial in streams)

    return {
        "rate_to_library": of(lambda ours, theirs: ours["tokens_per_second"] / theirs["tokens_per_second"]),
        "ttft_p50_more": of(lambda ours, theirs: ours["ttft_p50"] - theirs["ttft_p50"]),
        "ttft_alone_p50_more": statistics.median(
            statistics.median(trial[system]) - statistics.median(trial[_LIBRARY]) for trial in alone
        ),
        "process_seconds_per_token_more": of(
            lambda ours, theirs: ours["process_seconds_per_token"] - theirs["process_seconds_per_token"]
        ),
    }


def tables(found: Mapping[str, Any]) -> list[Table]:
    """One table of all systems."""
    title = f"{found['streams']} streams over HTTP, {found['layout']['name']}, medians of {len(found['trials'])} trials"
    columns = ("tokens/s", "of LLM", "TTFT p50, ms", "more", "alone, ms", "more", "loop, µs a token", "process", "more")
    table = Table("", *columns, title=title, title_justify="left")
    for system, one in found["medians"].items():
        table.add_row(
            system, f"{one['tokens_per_second']:.1f}", _or_dash(one, "rate_to_library", 1, ".3f"),
            f"{1e3 * one['ttft_p50']:.1f}", _or_dash(one, "ttft_p50_more", 1e3, "+.1f"),
            f"{1e3 * one['ttft_alone_p50']:.1f}", _or_dash(one, "ttft_alone_p50_more", 1e3, "+.1f"),
            f"{1e6 * one['loop_seconds_per_token']:.0f}", f"{1e6 * one['process_seconds_per_token']:.0f}",
            _or_dash(one, "process_seconds_per_token_more", 1e6, "+.0f"),
        )  # fmt: skip
    return [table]


def _or_dash(figures: Mapping[str, float], name: str, factor: float, form: str) -> str:
    return format(factor * figures[name], form) if name in figures else "-"
