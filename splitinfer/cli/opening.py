"""Opens the pipeline that options name, for every command that runs one, and closes it when a signal arrives.

    options ──▶ settings; local workers start ──▶ a layout: named, planned, or all layers here ──▶ LLM

SIGTERM drains a coordinator: the running answer may end, no request is admitted, then everything is closed and every
worker gets a goodbye. A second SIGTERM, or Ctrl-C, does not wait; neither does SIGTERM while the stages load.
"""

import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from splitinfer.cli.options import PipelineOptions
from splitinfer.errors import SplitinferError
from splitinfer.settings import Settings
from splitinfer.shutdown import Closing, shutdown

if TYPE_CHECKING:
    from splitinfer.llm import LLM
    from splitinfer.llm.automatic import Chosen
    from splitinfer.server.running import Server
    from splitinfer.server.several import Several

DRAIN_SECONDS = 5.0
"""Seconds that an answer may still take after SIGTERM: enough for the end of a paragraph. With the seconds of sending
and closing, the sum stays below the 10 s after which container runtimes send SIGKILL."""

_NO_TURNS = (
    "This model has no chat template: it was trained to continue texts, not to chat. The messages of a chat are joined "
    "by blank lines, and the model goes on from there. To have a text continued, use /v1/completions of a server, or: "
    "splitinfer coord --raw --prompt TEXT"
)
_LEAVE = 0.5  # seconds to print the end of a drained answer; a reader that waits for input does not set ``left``
_SEND = 2.0  # seconds to send the ends of all answers: a thousand of them take one
_CLOSE_SECONDS = 4.0  # twice the longest time of closing without KV to save
_SAVE_SECONDS = 20.0  # the longest time of saving KV; on an idle machine it takes a moment


_COMMENT = 118  # characters of a line of a layout's comment


@contextmanager
def open_llm(
    options: PipelineOptions,
    chosen: "Chosen | None" = None,
    *,
    servers: "Sequence[Server] | None" = None,
    drain_seconds: float = DRAIN_SECONDS,
    chats: bool = True,
) -> "Iterator[LLM]":
    """Open an LLM, with its loading shown on standard error. A signal drains and closes it.

    chosen: a finished plan. servers: the open servers, for an LLM that serves and so takes the context that its stages
    have room for; the caller may add to them. drain_seconds: for running answers. chats: whether it is for chats; then
    a note says once if the model was not trained to chat.

    Raises:
        SplitinferError: as ``layout_of`` and ``LLM``.
    """
    if options.layout is not None:
        _start_workers(options.layout, options.settings)  # they come up while this process does
    from splitinfer.console import load_llm, say

    layout = chosen or layout_of(options)
    settings = options.settings if servers is None else replace(options.settings, grows_context=True)
    llm, left = load_llm(layout, options.model if chosen is None else None, settings), threading.Event()
    with shutdown.closed_by(closing_of(llm, left, () if servers is None else servers, drain_seconds, settings)), llm:
        if chats and llm.has_tokenizer and not llm.tokenizer.writes_turns:
            say(_NO_TURNS)
        try:
            yield llm
        finally:
            left.set()


def _start_workers(layout: str, settings: Settings) -> None:
    """Start a layout's local workers; an invalid layout is reported later."""
    from splitinfer.config import find_layout
    from splitinfer.engine.fleet.local_workers import start_early

    with suppress(SplitinferError, OSError):
        start_early(find_layout(layout), settings.disk)


def closing_of(
    llm: "LLM | Several", left: threading.Event, servers: "Sequence[Server]", seconds: float, settings: Settings
) -> Closing:
    """Return how a signal closes an LLM. ``left``: set once the answers have been read and printed. ``seconds``: the
    most that draining takes."""
    close_seconds = _CLOSE_SECONDS + (_SAVE_SECONDS if settings.disk else 0.0)

    def drain() -> None:
        for server in servers:
            server.begin_draining()
        llm.drain(seconds)
        if servers:
            give_up = time.monotonic() + _SEND
            while not all(server.is_idle for server in servers) and time.monotonic() < give_up:
                time.sleep(0.01)
        else:
            left.wait(_LEAVE)
        llm.close()

    return Closing(llm.close, close_seconds, drain, seconds + _SEND + close_seconds)


# -- the layout --------------------------------------------------------------------------------------------------------


def layout_of(options: PipelineOptions) -> "str | Chosen":
    """Return the layout's name, or a new plan. Print the plan, with its reasons, on standard error.

    Raises:
        SplitinferError: a machine cannot be measured, or no cut fits.
    """
    if options.layout is not None:
        return options.layout
    from splitinfer.console import say
    from splitinfer.llm.automatic import alone, named

    assert options.model is not None
    if options.workers is not None:
        return planned(options, options.model, named(options.workers))
    chosen = None if options.auto else alone(options.model, options.settings)  # before seconds are spent on looking
    workers = paired_workers()
    if options.auto and workers:
        found = planned(options, options.model, workers)
        return replace(found, layout=found.layout.to_be_found())  # so that a new search finds them if they move
    if options.auto:
        say("No paired worker was found, so this machine is used alone; `splitinfer discover` shows what there is.")
    chosen = chosen or alone(options.model, options.settings)
    names = " and ".join(each["name"] for each in workers)
    if workers:
        say(f"Found and paired: {names}; --auto uses {'it' if len(workers) == 1 else 'them'}.")
    return chosen


def paired_workers() -> list[dict[str, str]]:
    """Return the paired workers that announce themselves now."""
    from splitinfer.discovery.discover import paired
    from splitinfer.engine.versions import own_versions
    from splitinfer.keyring import Keyring

    return paired(Keyring().known(), own_versions())


def planned(options: PipelineOptions, model: str, workers: Sequence[str | Mapping[str, Any]]) -> "Chosen":
    """Measure the machines, choose a cut, and print it with its reasons. Raises SplitinferError, as ``layout_of``."""
    from rich.text import Text

    from splitinfer.chat.formatting import comparison
    from splitinfer.console import errors, measuring, say
    from splitinfer.llm.automatic import choose_layout

    with measuring() as notice:
        chosen = choose_layout(
            model, workers, options.settings, notice, aim=options.aim, again=options.measure, uses_all=options.use_all
        )
    if chosen.beside is not None:
        errors.print(Text(comparison(chosen.beside, errors.width)))
    layout = chosen.layout
    unused = layout.has_own_stage + len(layout.workers) <= len(workers)
    hint = " With --use-all every machine gets layers." if unused else ""
    say(chosen.text + hint)
    return chosen


def write_planned(
    options: PipelineOptions,
    model: str,
    workers: Sequence[Mapping[str, str]],
    out: Path,
    notice: Callable[[str, str], None] = lambda _name, _text: None,
) -> "Chosen":
    """Plan for ``workers``, each at its best address (ssh may use Wi-Fi although there is a cable, too), and write the
    layout to a file. ``notice``: called with a worker's name and a phrase about its better address.

    Raises:
        SplitinferError: as ``layout_of``; or the file cannot be written.
    """
    from splitinfer.console import errors
    from splitinfer.discovery.discover import best_addresses
    from splitinfer.placement.document import text_of
    from splitinfer.places import write

    with errors.status("looking for the best way to each worker"):
        found = best_addresses([(each["name"], each["key"], each["address"]) for each in workers], notice=notice)
    chosen = planned(options, model, [{**each, "address": found[each["name"]]} for each in workers])
    about = [*textwrap.wrap(chosen.text, _COMMENT), *(() if chosen.beside is None else chosen.beside.lines())]
    write(out, text_of(chosen.layout, about))
    return chosen
