"""Writes the command line's standard error: messages, and the progress of loading stages.

A stage that needs more than half of the free memory gets a line with both figures; on a terminal, each stage has a
progress bar.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from splitinfer.common.plain_text import wrapped
from splitinfer.engine.profiling.measure import SECONDS
from splitinfer.llm import DRAFT, LLM, Settings
from splitinfer.llm.automatic import Chosen
from splitinfer.wire import messages

_WORDS = {"survey": "", "copy": "copying", "download": "downloading", "load": "reading", "try": "trying"}

_NARROW = 60  # cells of a terminal that has no room for bars

errors = Console(stderr=True, highlight=False)


def say(text: str) -> None:
    """Print a text, wrapped between words if standard error is a terminal."""
    errors.print(Text(wrapped(text, errors.width) if errors.is_terminal else text), soft_wrap=True)


def load_llm(layout: str | Chosen, model: str | None, settings: Settings) -> LLM:
    """Load an LLM and show its progress.

    Raises:
        SplitinferError: as ``LLM``.
    """
    display = _LoadDisplay()
    with display.progress:
        planned = (layout, None) if isinstance(layout, str) else (layout.layout, layout.profiles)
        llm = LLM(planned[0], model=model, settings=settings, notice=display.notice, profiles=planned[1])
        display.end()
    return llm


@contextmanager
def measuring() -> Iterator[Callable[[str, messages.Progress], None]]:
    """Show the machines and links being measured, and the remaining time. Yield a function to call with their
    progress."""
    with errors.status("reaching the workers") as status:
        last, ends = dict[str, str](), 0.0

        def notice(name: str, progress: messages.Progress) -> None:
            nonlocal ends
            if progress.phase == "measure" and not ends:
                ends = time.monotonic() + SECONDS
                say(f"Measuring each machine with this model: at most {SECONDS:.0f} s. Good figures are kept.")
            share = f" {progress.done / progress.total:.0%}" if progress.total else ""
            if progress.phase == "link":
                last.clear()
            last[name] = share
            left = f", at most {max(0.0, ends - time.monotonic()):.0f} s left" if share else ""
            status.update(f"measuring {', '.join(f'{each}{done}' for each, done in last.items())}{left}")

        yield notice


class _LoadDisplay:
    """Shows the progress of all stages. ``notice`` is called from several threads.

    ``is_done``: everything has been loaded once. Loading after a loss is not shown, because that would break into an
    answer.
    """

    def __init__(self) -> None:
        self.progress = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}"),
            *(() if errors.width < _NARROW else (BarColumn(bar_width=24),)),
            DownloadColumn(table_column=Column(no_wrap=True)),
            console=errors,
            disable=not errors.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._lock = threading.Lock()
        self.is_done = False

    def end(self) -> None:
        """Mark each stage as ready."""
        with self._lock:
            self.is_done = True
            for stage, task in self._tasks.items():
                self.progress.update(task, description=stage)

    def notice(self, stage: str, progress: messages.Progress) -> None:
        if self.is_done:
            return
        with self._lock:
            if progress.phase == "survey" and progress.text:
                say(f"{stage if stage == DRAFT else f'stage {stage}'} {progress.text}")
            if progress.phase == "link":
                say(f"link to stage {stage}: {progress.text}")
            if progress.phase == "link" or not errors.is_terminal:
                return
            if stage not in self._tasks:
                self._tasks[stage] = self.progress.add_task(stage, total=None)
            words = " ".join(filter(None, (stage, _WORDS.get(progress.phase, progress.phase), progress.text)))
            description = stage if progress.phase == "survey" else words
            done, total = (progress.done, progress.total) if progress.total else (None, None)  # trials have no total
            self.progress.update(self._tasks[stage], description=description, completed=done, total=total)
