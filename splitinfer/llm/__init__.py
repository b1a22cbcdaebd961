"""The library: a model on several machines, as one object (``LLM``), and how it is run (``Settings``)."""

from splitinfer.llm.llm import LLM
from splitinfer.llm.request import Prompt, Request
from splitinfer.llm.setup import DRAFT, MakeDrafter, Notice
from splitinfer.settings import NO_DRAFT, Settings

__all__ = ["DRAFT", "LLM", "NO_DRAFT", "MakeDrafter", "Notice", "Prompt", "Request", "Settings"]
