"""Run one large language model across two or more Macs, cut by layers.

with splitinfer.LLM("demo.yaml") as llm:
    print(llm.generate("Once upon a time", splitinfer.SamplingParams(max_tokens=64))[0].text)
"""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from splitinfer.core.sequence import SamplingParams
from splitinfer.core.speculation.flight import Flight
from splitinfer.errors import QueueFull, RequestError, SplitinferError

if TYPE_CHECKING:
    from splitinfer.config import Layout
    from splitinfer.engine.coordinator.requests import RequestOutput, StreamEvent, TokenLogprobs
    from splitinfer.llm import LLM, Request, Settings

__version__ = version("splitinfer")

_LAZY = {
    "Layout": "splitinfer.config",
    "LLM": "splitinfer.llm",
    "Request": "splitinfer.llm",
    "Settings": "splitinfer.llm",
    "RequestOutput": "splitinfer.engine.coordinator.requests",
    "StreamEvent": "splitinfer.engine.coordinator.requests",
    "TokenLogprobs": "splitinfer.engine.coordinator.requests",
}


def __getattr__(name: str) -> Any:
    """Names that bring pydantic or transformers with them, which take long, come when they are first used."""
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'splitinfer' has no attribute {name!r}")


__all__ = [
    "LLM",
    "Flight",
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
