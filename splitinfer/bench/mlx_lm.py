"""Runs plain mlx-lm in a process of its own, and sends it tasks."""

from collections.abc import Mapping, Sequence
from typing import Any

from splitinfer.bench.child_process import AskedProcess
from splitinfer.bench.figures import Run
from splitinfer.common.plain_text import size
from splitinfer.console import say
from splitinfer.core.layout import Layout
from splitinfer.engine.drafts.drafters import model_in
from splitinfer.errors import ModelError
from splitinfer.models.folder.checkpoint import Checkpoint
from splitinfer.models.folder.hub import fetch, open_model
from splitinfer.models.load.loader import resolve_dtype
from splitinfer.models.load.trained import is_trained
from splitinfer.models.memory import free_bytes

PROCESS = "splitinfer.bench.mlx_lm_process"


class MlxLm:
    """mlx-lm in a child process that sleeps between tasks: its own loops on the whole model. ``options``: the model's.

    Raises:
        ModelError: mlx-lm cannot run this model here; the text has the reason.
    """

    def __init__(self, child: AskedProcess, options: Mapping[str, Any]) -> None:
        self.has_draft, self._child = options.get("draft") is not None, child
        try:
            self.ask(options)
        except BaseException:
            self.close()
            raise

    def run(self, prompt: Sequence[int], tokens: int, **how: Any) -> Run:
        """Answer one prompt. ``num_draft``: the drafts at a time of mlx-lm's own speculative decoding. ``then``: the
        new tokens of a second turn, which keeps the KV of prompt and answer; its run is returned."""
        answer = self.ask({"prompt": list(prompt), "max_tokens": tokens, **how})
        return Run(tuple(answer["token_ids"]), tuple(answer["token_times"]))

    def run_batch(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[Run]:
        """Answer many prompts at once in the batch generator."""
        answer = self.ask({"prompts": prompts, "max_tokens": tokens})
        return [Run(*map(tuple, each)) for each in zip(answer["token_ids"], answer["token_times"], strict=True)]

    def ask(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to one line.

        Raises:
            ModelError: the process has ended.
        """
        self._child.send(options)
        try:
            return self._child.receive()
        except ModelError as error:
            raise ModelError(f"plain mlx-lm cannot run this model here ({error})") from None

    def close(self) -> None:
        """End the process."""
        self._child.close()


def plain_mlx_lm(layout: Layout, checkpoint: Checkpoint, process: str = PROCESS) -> MlxLm:
    """Open the whole model of a pipeline in a process of its own, with the layout's draft model.

    ``process``: the module to run.

    Raises:
        ModelError: its weights do not fit into this machine's free memory.
    """
    needed, free = sum(info.end - info.begin for info in checkpoint.tensors.values()), free_bytes()
    if needed > free:
        raise ModelError(f"its {size(needed)} of weights do not fit into the {size(free)} free here")
    say("loading the whole model in plain mlx-lm")
    return alone(*fetched(layout), _draft_folder(layout), process)


def alone(folder: str, dtype: str | None, draft: str | None = None, process: str = PROCESS) -> MlxLm:
    """Open the model of a folder in a process of its own."""
    return MlxLm(AskedProcess(process), {"folder": folder, "dtype": dtype, "draft": draft})


def _draft_folder(layout: Layout) -> str | None:
    """Return the folder of a layout's draft model. Return None if it has none that mlx-lm can run."""
    name = None if layout.draft is None else model_in(layout.draft)
    draft = None if name is None else open_model(name)
    return None if draft is None or is_trained(draft) else str(draft.folder.resolve())


def fetched(layout: Layout) -> tuple[str, str | None]:
    """Download the parts of a pipeline's model that this machine lacks. Return its folder and dtype."""
    name = str(layout.model)
    checkpoint = open_model(name)
    fetch(name, checkpoint, checkpoint.tensors, lambda _done, _total, _file: None)
    return str(checkpoint.folder.resolve()), resolve_dtype(layout.dtype)
