"""What a person sees on standard error: messages, and the stages while they load.

One line per stage: what it needs and what is free, then how far it is. On a terminal it is live; elsewhere
each phase is one line.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TaskID, TextColumn

from splitinfer.llm import DRAFT, LLM, Settings
from splitinfer.wire import messages

_WORDS = {"survey": "", "download": "downloading", "load": "reading"}

errors = Console(stderr=True, highlight=False)


def load_llm(layout: str, model: str | None, settings: Settings) -> LLM:
    """An LLM whose loading was shown.

    Raises:
        SplitinferError: as ``LLM`` does.
    """
    board = _Board()
    with board.live():
        llm = LLM(layout, model=model, settings=settings, notice=board.notice)
    board.is_over = True
    return llm


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
