"""What a person sees while the stages load, and the few words around it.

One line per stage: what it needs and what is free, then how far it is. On a terminal it is live; elsewhere
each phase is one line on standard error.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TaskID, TextColumn

from splitinfer.llm import LLM, Settings
from splitinfer.wire import messages

_WORDS = {"survey": "", "download": "downloading", "load": "reading"}

errors = Console(stderr=True, highlight=False)


@contextmanager
def open_llm(layout: str, model: str | None, settings: Settings) -> Iterator[LLM]:
    """An LLM whose loading is shown on standard error."""
    board = _Board()
    with board.live():
        llm = LLM(layout, model=model, settings=settings, notice=board.notice)
    with llm:
        yield llm


class _Board:
    """Progress of all stages. ``notice`` is called from several threads."""

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

    @contextmanager
    def live(self) -> Iterator[None]:
        with self._progress:
            yield

    def notice(self, stage: str, progress: messages.Progress) -> None:
        with self._lock:
            if progress.phase == "survey":
                errors.print(f"stage {stage} {progress.text}", soft_wrap=True)
            if not errors.is_terminal:
                return
            if stage not in self._tasks:
                self._tasks[stage] = self._progress.add_task(stage, total=None)
            words = " ".join(filter(None, (stage, _WORDS.get(progress.phase, progress.phase), progress.text)))
            description = stage if progress.phase == "survey" else words
            self._progress.update(
                self._tasks[stage], description=description, completed=progress.done, total=progress.total
            )
