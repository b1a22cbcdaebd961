"""A model opened for a person at the command line: what is seen while the stages load, and how a signal ends it.

One line per stage: what it needs and what is free, then how far it is. On a terminal it is live; elsewhere
each phase is one line on standard error.

SIGTERM drains a coordinator: the answer under way may end, nothing new begins, then everything is closed and every
worker hears a goodbye. A second SIGTERM, or Ctrl-C, does not wait. While the stages load, there is nothing to wait for.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TaskID, TextColumn

from splitinfer.llm import DRAFT, LLM, Settings
from splitinfer.shutdown import Closing, Shutdown
from splitinfer.wire import messages

_WORDS = {"survey": "", "download": "downloading", "load": "reading"}

DRAIN_SECONDS = 5.0
"""What an answer may still take after SIGTERM. The end of a paragraph fits in; and with the two seconds of
closing it stays below the ten after which the most impatient of those who send it (containers) kill."""

_LEAVE = 0.5  # seconds to print the end of a drained answer; who waits for input instead does not hear of it
_CLOSE_SECONDS = 4.0  # twice what closing takes at most

errors = Console(stderr=True, highlight=False)


@contextmanager
def open_llm(layout: str, model: str | None, settings: Settings, shutdown: Shutdown | None = None) -> Iterator[LLM]:
    """An LLM whose loading is shown on standard error. ``shutdown`` drains and closes it once it is loaded."""
    board = _Board()
    with board.live():
        llm = LLM(layout, model=model, settings=settings, notice=board.notice)
    board.is_over = True
    left = threading.Event()
    with ExitStack() as stack:
        if shutdown is not None:
            stack.enter_context(shutdown.closed_by(_closing(llm, left)))
        stack.enter_context(llm)
        stack.callback(left.set)
        yield llm


def _closing(llm: LLM, left: threading.Event) -> Closing:
    """How a signal closes an LLM. ``left``: whoever reads the answers has read and printed them."""

    def drain() -> None:
        llm._engine.drain(DRAIN_SECONDS)
        left.wait(_LEAVE)
        llm.close()

    return Closing(llm.close, _CLOSE_SECONDS, drain, DRAIN_SECONDS + _CLOSE_SECONDS)


class _Board:
    """Progress of all stages. ``notice`` is called from several threads.

    ``is_over``: everything was loaded once; what is loaded again, after a loss, must not break into an answer.
    """

    def __init__(self) -> None:
        self._progress = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            DownloadColumn(),
            console=errors,
            disable=not errors.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._lock = threading.Lock()
        self.is_over = False

    @contextmanager
    def live(self) -> Iterator[None]:
        with self._progress:
            yield

    def notice(self, stage: str, progress: messages.Progress) -> None:
        if self.is_over:
            return
        with self._lock:
            if progress.phase == "survey":
                errors.print(f"{stage if stage == DRAFT else f'stage {stage}'} {progress.text}", soft_wrap=True)
            if progress.phase == "link":
                errors.print(f"link to stage {stage}: {progress.text}", soft_wrap=True)
            if progress.phase == "link" or not errors.is_terminal:
                return
            if stage not in self._tasks:
                self._tasks[stage] = self._progress.add_task(stage, total=None)
            words = " ".join(filter(None, (stage, _WORDS.get(progress.phase, progress.phase), progress.text)))
            description = stage if progress.phase == "survey" else words
            self._progress.update(
                self._tasks[stage], description=description, completed=progress.done, total=progress.total
            )
