"""`splitinfer coord` and `chat`, which are one command: the REPL, or one answer, on the pipeline that options name.
`up` ends here, too."""

import os
import sys
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from splitinfer.cli.opening import open_llm
from splitinfer.cli.options import ChatOptions, PipelineOptions, check_named, sampling, with_options
from splitinfer.cli.running import say, set_up
from splitinfer.core.grammar import Grammar
from splitinfer.core.sampling_defaults import ANSWER_TOKENS, DEMO_TOKENS, NOTHING, SamplingChoice
from splitinfer.errors import ConfigError
from splitinfer.shutdown import shutdown

if TYPE_CHECKING:
    from splitinfer.llm.automatic import Chosen


@with_options
def chat(options: ChatOptions) -> int:
    """Open a chat with a model, or answer one prompt: over a layout's machines, workers, or this machine alone."""
    if options.model is None and options.layout is None and options.workers is None and not options.auto:
        options = _with_demo(options)
    check_named(options)
    choice = sampling(options)
    set_up(options.verbose, info=is_server(options))
    return run_pipeline(options, choice, prompt_of(options))


def is_server(options: ChatOptions) -> bool:
    """Return whether the options ask for a server without a REPL. Its log is then the output."""
    return options.serve is not None and not options.chat and not sys.stdin.isatty()


def run_pipeline(options: ChatOptions, choice: SamplingChoice, text: str | None, chosen: "Chosen | None" = None) -> int:
    """Answer a text, or run the REPL or the server of ``--serve``. Return the exit code. ``chosen``: a finished
    plan."""
    form = None if options.json_schema is None else _grammar_in(options.json_schema)
    with ExitStack() as stack:
        if options.serve is None:
            llm = stack.enter_context(open_llm(options, chosen, chats=not options.raw))
        else:
            from splitinfer.cli.serve import ServeOptions
            from splitinfer.cli.serving import serving, stay_open

            same = {each.name: getattr(options, each.name) for each in fields(PipelineOptions)}
            keys = os.environ.get("SPLITINFER_API_KEY", "").split()
            served = ServeOptions(**same, port=options.serve, api_key=keys)
            llm = stack.enter_context(serving(served, chosen))
            if is_server(options):
                stay_open(llm)
        if llm.layout.model == "demo" and options.max_tokens == ANSWER_TOKENS:
            choice = replace(choice, base=replace(choice.base, max_tokens=DEMO_TOKENS))
        if text is None:
            from splitinfer.chat.repl import run_chat

            return run_chat(llm, choice.over(llm.recommended_sampling), shutdown.offered_to)
        from splitinfer.cli.answer import answer

        recommended = NOTHING if options.raw else llm.recommended_sampling
        params = choice.over(recommended).params
        params = params if form is None else replace(params, grammar=form)
        return answer(llm, text, params, raw=options.raw, as_json=options.as_json, status=options.status)


def prompt_of(options: ChatOptions) -> str | None:
    """Return the prompt to answer. Return None if the options ask for the REPL or a server."""
    stays = options.chat or options.serve is not None
    if options.prompt is not None and stays:
        raise ConfigError("--prompt answers and ends, --chat and --serve stay; give one of them")
    if stays or (options.prompt is None and sys.stdin.isatty()):
        return None
    text = sys.stdin.read() if options.prompt is None else options.prompt
    if not text.strip():
        raise ConfigError("there is no prompt: give --prompt TEXT, text on standard input, or --chat")
    return text


def _with_demo(options: ChatOptions) -> ChatOptions:
    """Tell a person at a terminal about the demo model, and return the options with it if the person agrees."""
    if not sys.stdin.isatty():
        return options  # they will be refused: a script must name a model
    say("No model is named. The built-in demo is a small model that tells tales.")
    if not typer.confirm("Chat with the demo?", default=True, err=True):
        say("Run your own model with: splitinfer chat --model OWNER/MODEL")
        raise typer.Exit
    return replace(options, model="demo")


def _grammar_in(file: Path) -> Grammar:
    try:
        return Grammar.json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is not a JSON schema: {error}") from error
