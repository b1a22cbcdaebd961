"""Tokens by one way through a pipeline: greedy and sampled, without drafts and with them, several answers at once, and
from KV kept across a restart; and of a stage across two processes. Plain mlx-lm in the same process judges them
(``plain``).
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import psutil
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.utils import load_model

from splitinfer.common.json_text import dumps
from splitinfer.core.grammar import Grammar
from splitinfer.core.kv.budget import BLOCK
from splitinfer.core.layout import LOCAL
from splitinfer.core.link_transport import JACCL, RDMA, RING
from splitinfer.core.sequence import SamplingParams
from splitinfer.core.speculation.flight import OFF, Flight
from splitinfer.demo import TARGET
from splitinfer.engine.loop.requests import RequestOutput
from splitinfer.engine.worker.handshake import AccessControl
from splitinfer.engine.worker.worker import Worker
from splitinfer.keyring import Keyring
from splitinfer.llm import LLM, Request, Settings
from splitinfer.llm.prompts import tokenizer_of
from splitinfer.llm.request import AsyncRequest
from splitinfer.models.folder.checkpoint import read_config
from splitinfer.models.folder.hub import open_model
from splitinfer.models.load.loader import resolve_dtype
from splitinfer.probes.child import ProbeReport
from splitinfer.probes.finding import SEND, STOP, Blame, Finding, Outcome, failed, passed
from splitinfer.probes.machine import DEMO_LAYERS
from splitinfer.probes.plain import GREEDY, RIGHT, WRONG, gaps, rounding, tolerance, verdict
from splitinfer.server.running import Listen, Server
from splitinfer.server.service import Service
from transports import LinkOptions, TransportUnavailable, listen
from transports.rdma.probe import device_for

PROMPT = "Once upon a time there was a poor woodcutter who"
CASES = {"greedy": GREEDY, "sampled": SamplingParams(temperature=0.8, seed=7)}
_LAYERS = (5, 7)  # here, and on the worker
_SCALE = 0.18  # of random weights, so that layers matter and tokens vary
_DRAFTS = Flight(first=3, further=2, in_flight=2)
_KEPT_PROMPT, _KEPT_TOKENS = BLOCK + 40, 4
_TOGETHER = (6, 8, 11, 15)  # tokens of the prompts of answers at once: unequal
_STOP_SECONDS, _REJOIN_SECONDS, _HTTP_SECONDS = 2.0, 30.0, 30.0
_FORMS, _FORM_TOKENS = ("(wolf|bear|fox){4}", "(cat|dog|owl){4}"), 48


class Plain(NamedTuple):
    """A model as mlx-lm loads it, in the dtype that "auto" gives a stage here, and the demo's tokenizer."""

    model: Any
    vocab_size: int
    prompt: list[int]


def plain_model(folder: Path = TARGET) -> Plain:
    model, _ = load_model(folder)
    if (dtype := resolve_dtype("auto")) is not None:
        model.set_dtype(getattr(mx, dtype))
    tokenizer = tokenizer_of(open_model("demo"))
    assert tokenizer is not None
    return Plain(model, tokenizer.vocab_size, tokenizer.encode(PROMPT))


def measure(options: Mapping[str, Any], report: ProbeReport) -> None:
    """Report each kind of answer.

    ``options``: ``way``, a name in ``registry``; ``tokens`` of an answer; ``restarts``, whether KV is kept across a
    restart, too; ``worker``, where one is that runs elsewhere.
    """
    if options["way"] == "worker, rdma":
        try:
            device_for("jaccl")
        except TransportUnavailable as problem:
            report(Finding("", Outcome.NOT_AVAILABLE, problem.reason))
            return
    is_halved = options["way"] == "across"
    model = even_model(Path(options["folder"]) / "even") if is_halved else TARGET
    plain, count = plain_model(model), options["tokens"]
    rows = [*plain.prompt, *made_up_prompt(count, plain.vocab_size)]
    moved = rounding(plain.model, rows, (1, len(rows), 7)) | ({"exact": False} if is_halved else {})  # sums of halves
    report(passed("rounding", rounding_in_words(moved), moved))

    def look(name: str, find: Callable[[], Mapping[str, Any]]) -> None:
        report.guarded(name, lambda: judge_answer(name, find(), moved))

    with _second_stage(options) as second:
        patience = {"rejoin_timeout": _REJOIN_SECONDS} if options["way"] == "tcp" else {}
        with pipeline(second, model, draft=None if is_halved else "demo-draft", **patience) as llm:
            report.is_alive()
            for flight, kind in ((OFF, ""),) if is_halved else ((OFF, ""), (_DRAFTS, ", drafts")):
                for name, params in CASES.items():
                    look(f"{name}{kind}", partial(_answered, llm, plain, params, count, flight))
            if options["way"] == "one process":
                look("several at once", partial(_together, llm, plain, count))
                look("the server", partial(_served, llm, plain, count))
            if options["way"] == "tcp":
                look("a form", partial(_in_a_form, llm, plain, count))
                look("a lost worker", partial(_across_a_loss, llm, plain, count))
        if options.get("restarts"):
            kept = Path(options["folder"]) / f"kv of {options['way']}"
            opened = partial(pipeline, second, kv_dir=kept)
            look("kept KV", partial(_across_a_restart, opened, plain, report.is_alive))


# -- pipelines ---------------------------------------------------------------------------------------------------------


@contextmanager
def pipeline(second: Mapping[str, Any] | None, model: Path = TARGET, **settings: Any) -> Iterator[LLM]:
    """Open the demo model, or one like it, on one or two stages. ``second``: a layout's fields of the second stage, or
    of the only one if it is across two machines."""
    stages: list[dict[str, Any]] = [{"name": "first", "layers": DEMO_LAYERS}]
    if second is not None and "across" in second:
        stages = [{**stages[0], **second}]
    elif second is not None:
        stages = [{"name": "first", "layers": _LAYERS[0]}, {"name": "second", "layers": _LAYERS[1], **second}]
    limits = Settings(**{"context": 1024, "connect_timeout": 8.0, "rejoin_timeout": 0.0, **settings})
    with LLM({"model": str(model), "stages": stages}, settings=limits) as llm:
        yield llm


def even_model(folder: Path) -> Path:
    """Return a random model like the demo model, in a new folder; its heads can be halved, as the three of that
    cannot."""
    config = {**read_config(TARGET), "num_attention_heads": 4, "num_key_value_heads": 2}
    weights = dict(tree_flatten(llama.Model(llama.ModelArgs.from_dict(config)).parameters()))
    for number, (name, array) in enumerate(weights.items()):
        if array.ndim > 1:
            weights[name] = mx.random.normal(array.shape, scale=_SCALE, key=mx.random.key(number))
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(dumps(config))
    return folder


@contextmanager
def _second_stage(options: Mapping[str, Any]) -> Iterator[dict[str, Any] | None]:
    """Run the second stage's worker and yield the layout's fields of that stage. Yield None if there is one stage."""
    way = options["way"]
    here = {
        "one process": None,
        "tcp": {"address": LOCAL},
        "across": {"across": [LOCAL, LOCAL]},
        "ring": {"address": LOCAL, "transport": RDMA, "backend": RING},
    }
    with ExitStack() as stack:
        if way in here:
            yield here[way]
        elif way == "inproc":
            yield {"address": stack.enter_context(_worker_here("inproc://selftest"))}
        elif way == "curve":
            yield stack.enter_context(_keyed_worker(Path(options["folder"])))
        else:
            rdma = {"transport": RDMA, "backend": JACCL} if way == "worker, rdma" else {}
            yield {**options["worker"], **rdma}


@contextmanager
def _worker_here(address: str, options: LinkOptions | None = None, **more: Any) -> Iterator[str]:
    """Run a worker on threads of this process and yield its address."""
    listener = listen(address, options=options or LinkOptions())
    worker = Worker(listener, **more)
    try:
        yield listener.address
    finally:
        worker.stop(timeout=_STOP_SECONDS)


@contextmanager
def _keyed_worker(folder: Path) -> Iterator[dict[str, Any]]:
    """Run a worker on loopback that has its own keys and admits this process's. The user's keys are not used."""
    os.environ["XDG_CONFIG_HOME"] = str(folder / "config")
    keys = Keyring(folder / "worker")
    keys.admit(Keyring().own().public, "selftest")
    access = AccessControl(keys)
    with _worker_here("tcp://127.0.0.1:0", access.options, keys=keys, access=access) as address:
        yield {"address": address, "key": keys.own().public}


# -- answers -----------------------------------------------------------------------------------------------------------


def made_up_prompt(length: int, vocab_size: int) -> list[int]:
    """Return token ids that do not repeat soon."""
    return [(i * 37 + 11 + i * i) % vocab_size for i in range(length)]


def _asked(llm: LLM, prompt: Sequence[int], count: int, sampling: SamplingParams, flight: Flight = OFF) -> Request:
    return llm.submit(list(prompt), replace(sampling, max_tokens=count, ignore_eos=True), flight=flight, raw=True)


def _judged(plain: Plain, prompt: Sequence[int], count: int, sampling: SamplingParams, output: RequestOutput) -> Any:
    """Return the gaps of an answer that should have ``count`` tokens, and its figures."""
    times = output.token_times
    rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 and times[-1] > times[0] else None
    return {
        "tokens": count,
        "gaps": gaps(plain.model, prompt, output.token_ids, sampling, plain.vocab_size),
        "ttft_seconds": times[0] if times else None,
        "tokens_per_second": rate,
        "cached_tokens": output.num_cached_tokens,
    }


def _answered(llm: LLM, plain: Plain, sampling: SamplingParams, count: int, flight: Flight) -> dict[str, Any]:
    before = _speculation(llm)
    output = _asked(llm, plain.prompt, count, sampling, flight).result()
    after = _speculation(llm)
    drafts = {} if flight is OFF else {f"drafts_{name}": after[name] - before[name] for name in before}
    return {**_judged(plain, plain.prompt, count, sampling, output), **drafts}


def _speculation(llm: LLM) -> dict[str, int]:
    said = llm.stats()["speculation"] or {}
    return {name: int(said.get(name, 0)) for name in ("sent", "accepted")}


def _together(llm: LLM, plain: Plain, count: int) -> dict[str, Any]:
    """Return several answers that are computed together."""
    prompts = [made_up_prompt(length, plain.vocab_size) for length in _TOGETHER]
    requests = [_asked(llm, prompt, count, GREEDY) for prompt in prompts]
    pairs = [(prompt, request.result()) for prompt, request in zip(prompts, requests, strict=True)]
    return _both(*(_judged(plain, prompt, count, GREEDY, output) for prompt, output in pairs))


def _in_a_form(llm: LLM, plain: Plain, count: int) -> dict[str, Any]:
    """Return an answer that has no form, computed together with two that have each another."""
    params = [SamplingParams(max_tokens=_FORM_TOKENS, grammar=Grammar.regex(form)) for form in _FORMS]
    formed = [llm.submit(plain.prompt, each) for each in params]
    free = _answered(llm, plain, GREEDY, count, OFF)
    have = [re.fullmatch(form, each.result().text) is not None for form, each in zip(_FORMS, formed, strict=True)]
    return {**free, "has_form": all(have)}


def _served(llm: LLM, plain: Plain, count: int) -> dict[str, Any]:
    """Return an answer that a client of a server on this machine gets, and whether the server has a page."""
    requests, submit = list[AsyncRequest](), llm.asubmit

    async def noting(*given: Any, **how: Any) -> AsyncRequest:
        requests.append(await submit(*given, **how))
        return requests[-1]

    llm.asubmit = noting  # type: ignore[method-assign]
    server = Server(Service(llm, "demo"), Listen(port=0))
    try:
        asked = {"prompt": plain.prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        answer = json.loads(_fetched(server.port, "POST", "/v1/completions", dumps(asked)))
        page = _fetched(server.port, "GET", "/")
    finally:
        server.close()
    output = requests[0].output
    is_whole = answer["choices"][0]["text"] == output.text and b"<html" in page
    return {**_judged(plain, plain.prompt, count, GREEDY, output), "is_whole": is_whole}


def _fetched(port: int, method: str, path: str, body: str | None = None) -> bytes:
    connection = HTTPConnection("127.0.0.1", port, timeout=_HTTP_SECONDS)
    connection.request(method, path, body, {"Content-Type": "application/json", "Accept": "text/html, */*"})
    reply = connection.getresponse()
    found = reply.read()
    connection.close()
    if reply.status != 200:
        raise ConnectionError(f"{method} {path} has status {reply.status}: {found[:200].decode(errors='replace')}")
    return found


def _across_a_loss(llm: LLM, plain: Plain, count: int) -> dict[str, Any]:
    """Return an answer in whose middle the worker's process is killed; another one takes its place."""
    asked = _asked(llm, plain.prompt, count, GREEDY)
    workers = psutil.Process().children()
    for number, _ in enumerate(asked):
        for worker in workers if number == 0 else ():
            worker.kill()
    return {**_judged(plain, plain.prompt, count, GREEDY, asked.output), "killed": len(workers)}


def _both(*found: Mapping[str, Any]) -> dict[str, Any]:
    """Return several answers as one, with the figures of the last."""
    tokens = sum(each["tokens"] for each in found)
    return {**found[-1], "tokens": tokens, "gaps": [gap for each in found for gap in each["gaps"]]}


def _across_a_restart(open_pipeline: Callable[[], Any], plain: Plain, is_alive: Callable[[], None]) -> dict[str, Any]:
    """Return a prompt longer than a block, answered, and answered again by pipelines that start anew."""
    prompt, found = made_up_prompt(_KEPT_PROMPT, plain.vocab_size), list[Any]()
    for _ in range(2):
        with open_pipeline() as llm:
            is_alive()
            output = _asked(llm, prompt, _KEPT_TOKENS, GREEDY).result()
            found.append(_judged(plain, prompt, _KEPT_TOKENS, GREEDY, output))
        is_alive()
    return {**_both(*found), "kept_before": found[0]["cached_tokens"]}


# -- what is right -----------------------------------------------------------------------------------------------------


def rounding_in_words(rounding: Mapping[str, Any]) -> str:
    if rounding["exact"]:
        return "rows do not depend on each other, so every token must equal mlx-lm's"
    return f"mlx-lm's own logits move by {rounding['logits_move']:.2g}; up to {tolerance(rounding):.2g} is rounding"


def judge_answer(name: str, given: Mapping[str, Any], rounding: Mapping[str, Any]) -> Finding:
    """Return whether an answer has the tokens of plain mlx-lm, and shows the feature that it is named after."""
    found, count = verdict(given["gaps"], tolerance(rounding)), len(given["gaps"])
    if found["verdict"] == WRONG:
        return failed(name, Blame.TOKENS, found["said"], STOP, given)
    if count < given["tokens"]:
        return failed(name, Blame.TOKENS, f"token {count + 1} of {given['tokens']} never came", STOP, given)
    if given.get("has_form") is False:
        return failed(name, Blame.TOKENS, "the answer has not the form that was asked for", STOP, given)
    if given.get("is_whole") is False:
        return failed(name, Blame.TRANSPORT, "the client's text is not the answer's, or there is no page", SEND, given)
    if given.get("killed") == 0:
        return failed(name, Blame.TRANSPORT, "there was no worker's process to kill", SEND, given)
    if given.get("drafts_sent") == 0:
        return failed(name, Blame.DEVICE, "the tokens equal mlx-lm's, but no draft was sent", SEND, given)
    if "kept_before" in given and given["cached_tokens"] < _KEPT_PROMPT - 1:
        came = f"{given['cached_tokens']} of {_KEPT_PROMPT - 1} tokens of KV came back from disk after a restart"
        sentence = f"the tokens equal mlx-lm's, but {came}"
        return failed(name, Blame.MEMORY, sentence, f"look at the free disk space; {SEND}", given)
    said = f"{count} tokens equal mlx-lm's" if found["verdict"] == RIGHT else f"{found['said']}, which is rounding"
    return passed(name, f"{said}{_more(given)}", given)


def _more(given: Mapping[str, Any]) -> str:
    if "killed" in given:
        return " although the worker was killed"
    if "drafts_sent" in given:
        return f"; {given['drafts_accepted']} of {given['drafts_sent']} drafts were right"
    if "kept_before" in given:
        return f"; {given['cached_tokens']} tokens of KV came back from disk"
    return "" if not given.get("tokens_per_second") else f", {given['tokens_per_second']:.3g} a second"
