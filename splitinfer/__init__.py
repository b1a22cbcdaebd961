"""Run one large language model across two or more Macs, cut by layers.

with splitinfer.LLM("demo.yaml") as llm:
    print(llm.generate("Once upon a time", splitinfer.SamplingParams(max_tokens=64))[0].text)
"""

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from splitinfer.config import Layout
    from splitinfer.core.grammar import Grammar
    from splitinfer.core.sequence import SamplingParams
    from splitinfer.core.speculation.flight import Flight
    from splitinfer.engine.loop.requests import RequestOutput, StreamEvent, TokenLogprobs
    from splitinfer.errors import QueueFull, RequestError, SplitinferError
    from splitinfer.llm import LLM, Request, Settings

    __version__: str

if sys.platform == "darwin":  # MLX reads these when it opens the device, so this comes before any import of it
    from splitinfer.system.apple import chip, command_buffers

    for _name, _value in command_buffers(chip()).items():
        os.environ.setdefault(_name, _value)

_LAZY = {
    "LLM": "splitinfer.llm",
    "Flight": "splitinfer.core.speculation.flight",
    "Grammar": "splitinfer.core.grammar",
    "Layout": "splitinfer.config",
    "QueueFull": "splitinfer.errors",
    "Request": "splitinfer.llm",
    "RequestError": "splitinfer.errors",
    "RequestOutput": "splitinfer.engine.loop.requests",
    "SamplingParams": "splitinfer.core.sequence",
    "Settings": "splitinfer.llm",
    "SplitinferError": "splitinfer.errors",
    "StreamEvent": "splitinfer.engine.loop.requests",
    "TokenLogprobs": "splitinfer.engine.loop.requests",
}


def __getattr__(name: str) -> Any:
    """Import a public name on its first use: some import mlx-lm, which takes a second, and a signal must be able to end
    a command before that."""
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    if name == "__version__":
        from importlib.metadata import version

        return version("splitinfer")
    raise AttributeError(f"module 'splitinfer' has no attribute {name!r}")


__all__ = [
    "LLM",
    "Flight",
    "Grammar",
    "Layout",
    "QueueFull",
    "Request",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "Settings",
    "SplitinferError",
    "StreamEvent",
    "TokenLogprobs",
    "__version__",
]
