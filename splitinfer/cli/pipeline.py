"""`splitinfer coord`, `chat` and `worker`."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from splitinfer.cli.automatic import layout_of
from splitinfer.cli.options import (
    KVDir,
    KVDirSize,
    MaxTokens,
    ModelsDir,
    ModelsSize,
    PipelineOptions,
    Stop,
    Temp,
    Verbose,
    disk_of,
    sampling,
    settings_of,
    store_of,
    with_pipeline_options,
)
from splitinfer.cli.running import finish, set_up
from splitinfer.core.endpoint import WORKER_PORT
from splitinfer.core.grammar import Grammar
from splitinfer.core.sampling_defaults import ANSWER_TOKENS, NOTHING, SamplingChoice
from splitinfer.errors import ConfigError
from splitinfer.kvstore.paths import DEFAULT_CAP
from splitinfer.shutdown import shutdown

if TYPE_CHECKING:
    from splitinfer.llm import Settings

_YOUR_OWN = "Run your own model with: splitinfer chat --model OWNER/MODEL"


@with_pipeline_options
def coord(
    options: PipelineOptions,
    prompt: Annotated[str | None, typer.Option("--prompt", help="Answer this and end.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Open the REPL, also where there is no terminal.")] = False,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw", help="Continue the prompt as it is, without the chat template and the model's sampling defaults."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as one JSON document.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Show speed and load of the stages, live.")] = False,
    max_tokens: MaxTokens = ANSWER_TOKENS,
    temp: Temp = None,
    stop: Stop = None,
    json_schema: Annotated[
        Path | None,
        typer.Option("--json-schema", help="Hold the answer to the JSON schema in this file.", metavar="FILE"),
    ] = None,
    logprobs: Annotated[
        int | None, typer.Option("--logprobs", help="With --json: log probabilities of the n likeliest.")
    ] = None,
    serve: Annotated[
        int | None,
        typer.Option(
            "--serve", min=0, max=65535, help="Beside the REPL, serve HTTP clients of this machine on this port."
        ),
    ] = None,
) -> None:
    """Hold the first layers, connect to the workers, then chat or answer."""
    if logprobs is not None and not as_json:
        raise typer.BadParameter("--logprobs is printed with --json only; add --json")
    choice = sampling(options, temp, usual_temp=0.0, max_tokens=max_tokens, stop=stop, logprobs=logprobs)
    set_up(options.verbose)
    settings = settings_of(options)
    from splitinfer.chat import run_chat
    from splitinfer.cli.answer import answer
    from splitinfer.cli.draining import open_llm

    def run() -> int:
        text = _prompt_text(prompt, chat)
        if serve is not None:
            if text is not None:
                raise ConfigError("--serve is for beside the REPL; without one, use `splitinfer serve`")
            return _chat_and_serve(options, settings, choice, serve)
        with open_llm(layout_of(options, settings), options.model, settings, shutdown, chats=not raw) as llm:
            if text is None:
                return run_chat(llm, choice.over(llm.recommended_sampling), shutdown.offered_to)
            params = choice.over(NOTHING if raw else llm.recommended_sampling).params
            params = params if json_schema is None else replace(params, grammar=_grammar_in(json_schema))
            return answer(llm, text, params, raw=raw, as_json=as_json, status=status)

    finish(run, options.verbose)


@with_pipeline_options
def chat(options: PipelineOptions, max_tokens: MaxTokens = ANSWER_TOKENS, temp: Temp = None) -> None:
    """Chat in the terminal. A model without layout or workers runs on this machine; without a model, the demo does."""
    if options.model is None and options.layout is None and options.workers is None and not options.auto:
        _offer_demo(asks=sys.stdin.isatty())
        options = replace(options, model="demo")
    choice = sampling(options, temp, usual_temp=0.7, max_tokens=max_tokens)
    set_up(options.verbose)
    settings = settings_of(options)
    from splitinfer.chat import run_chat
    from splitinfer.cli.draining import open_llm

    def run() -> int:
        with open_llm(layout_of(options, settings), options.model, settings, shutdown) as llm:
            return run_chat(llm, choice.over(llm.recommended_sampling), shutdown.offered_to)

    finish(run, options.verbose)


def worker(
    host: Annotated[str, typer.Option("--host", help="Interface to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes a free one.")] = WORKER_PORT,
    model: Annotated[
        str | None,
        typer.Option("--model", help="The model's folder on this machine, if it is not where the coordinator has it."),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="This worker's name; the machine's if not given.")] = None,
    kv_dir: KVDir = None,
    kv_disk_gb: KVDirSize = DEFAULT_CAP / 1e9,
    models_dir: ModelsDir = None,
    models_gb: ModelsSize = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Admit every coordinator and encrypt nothing, also beyond this machine.")
    ] = False,
    announce: Annotated[
        bool | None,
        typer.Option(
            "--announce/--no-announce",
            help="Let `splitinfer discover` find this worker by multicast DNS; so by default if other machines reach "
            "it and it has a key.",
        ),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Run in the background; end when the worker waits, or waits already.")
    ] = False,
    stop: Annotated[bool, typer.Option("--stop", help="Stop the workers that --detach has started.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Show which workers run on this machine.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --detach, --stop or --show: answer with one line of JSON.")
    ] = False,
    by: Annotated[str | None, typer.Option("--by", metavar="KEY:NAME", hidden=True)] = None,
    child: Annotated[bool, typer.Option("--child", hidden=True)] = False,
    verbose: Verbose = False,
) -> None:
    """Wait for a coordinator, hold the layers it names, and serve one coordinator after another."""
    if detach + stop + show > 1 or (as_json and not (detach or stop or show)):
        raise typer.BadParameter("--detach, --stop and --show each say what is to be done; give one, --json beside it")
    if detach or stop or show:
        set_up(verbose)
        finish(lambda: _in_background(by, as_json, detach=detach, stop=stop), verbose)
    set_up(verbose, info=True)
    if child:
        shutdown.follow_parent(sys.stdin.fileno())
    from splitinfer.cli.serve_worker import serve

    disk = disk_of(kv_dir, kv_disk_gb)
    at = ("127.0.0.1", 0) if child else (host, port)
    store = store_of(models_dir, models_gb)

    def run() -> int:
        return serve(
            *at, shutdown, name=name, model=model, child=child, disk=disk, insecure=insecure, store=store,
            announce=announce,
        )  # fmt: skip

    finish(run, verbose)


def _in_background(by: str | None, as_json: bool, *, detach: bool, stop: bool) -> int:
    """Start, stop or show workers in the background of this machine. ``by``: the machine whose `up` asks."""
    from splitinfer.keyring import Known
    from splitinfer.launch import background
    from splitinfer.launch.answer import encode, lines

    key, _, name = (by or "").partition(":")
    asker = Known(key, name) if key else None
    if detach:
        words = [word for word in sys.argv[2:] if word not in ("--detach", "--json") and not word.startswith("--by=")]
        answer = background.start(background.Wanted(tuple(words), asker))
    else:
        answer = background.stop(key) if stop else background.show()
    typer.echo(encode(answer) if as_json else "\n".join(lines(answer)))
    return 0


def _chat_and_serve(options: PipelineOptions, settings: "Settings", choice: SamplingChoice, port: int) -> int:
    """The REPL and the HTTP server on one engine. The server needs a key if the environment has one."""
    from splitinfer.chat import run_chat
    from splitinfer.cli.draining import Draining, open_llm
    from splitinfer.cli.serving import Access, opened_server, service_settings

    access = Access(api_keys=tuple(os.environ.get("SPLITINFER_API_KEY", "").split()))
    gate, servers = access.gate_at(port), list[Draining]()
    with (
        open_llm(layout_of(options, settings), options.model, service_settings(settings), shutdown, servers) as llm,
        opened_server(llm, access, gate, servers, port) as said,
    ):
        typer.echo(said, err=True)
        return run_chat(llm, choice.over(llm.recommended_sampling), shutdown.offered_to)


def _offer_demo(*, asks: bool) -> None:
    """Say what the demo is. Where the command ``asks``, the user may decline, which ends the command."""
    typer.echo("No model is named. The built-in demo is a small model that tells tales.", err=True)
    if asks and not typer.confirm("Chat with the demo?", default=True, err=True):
        typer.echo(_YOUR_OWN, err=True)
        raise typer.Exit
    if not asks:
        typer.echo(_YOUR_OWN, err=True)


def _grammar_in(file: Path) -> Grammar:
    try:
        return Grammar.json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is not a JSON schema: {error}") from error


def _prompt_text(prompt: str | None, chat: bool) -> str | None:
    """The prompt to answer; ``None`` opens the REPL."""
    if prompt is not None:
        if chat:
            raise ConfigError("--prompt answers and ends, --chat opens the REPL; give one of them")
    elif chat or sys.stdin.isatty():
        return None
    text = sys.stdin.read() if prompt is None else prompt
    if not text.strip():
        raise ConfigError("there is no prompt: give --prompt TEXT, text on standard input, or --chat")
    return text
