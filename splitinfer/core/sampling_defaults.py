"""The sampling values in force if a caller sets only some of them, and the source of each value.

A model's makers recommend values in its ``generation_config.json``. A user's choice overrides the file, and the file
overrides the caller's fallback. Pure; ``models.folder.checkpoint`` reads the file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from splitinfer.core.sampling_params import SamplingParams, as_number

RECOMMENDABLE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The fields of ``SamplingParams`` that a generation config may set."""

ANSWER_TOKENS = 2048
DEMO_TOKENS = 200  # after that many, the demo's tales are nonsense
"""The default token limit of an answer: on the command line, in the REPL and on the page."""

SETTABLE = (*RECOMMENDABLE, "max_tokens", "thinking_budget")
"""The fields that a user can set in the chat."""

_WHOLE = ("top_k", "max_tokens", "thinking_budget")
_GREATEST_WHOLE = 2**31 - 1
_SAMPLED_TEMPERATURE = 1.0  # the meaning of do_sample without a temperature in the file format


class Origin(StrEnum):
    """Where a sampling value comes from. The values are shown to users."""

    OPTION = "command line"
    MODEL = "generation_config.json"
    DEFAULT = "default"
    CHAT = "set in this chat"


@dataclass(frozen=True, slots=True)
class Recommended:
    """The recommendations of a generation config. ``values``: by field of ``SamplingParams``, each within its range.
    ``problems``: a sentence for each value that cannot be used."""

    values: Mapping[str, Any]
    problems: tuple[str, ...] = ()

    @property
    def params(self) -> SamplingParams:
        """The library's defaults, with these values in their place."""
        return replace(SamplingParams(), **self.values)


NOTHING = Recommended({})


def recommended(config: Mapping[str, Any]) -> Recommended:
    """Return the usable sampling values of a generation config. Fields that are absent or null are left out.

    ``do_sample: false`` means greedy decoding whatever the temperature; ``do_sample: true`` without a temperature means
    a temperature of 1, as in the library that defines the format.

    >>> recommended({"do_sample": True, "top_p": 0.9, "top_k": -1})
    Recommended(values={'top_p': 0.9, 'temperature': 1.0}, problems=('top_k must be 0 (off) or more, not -1',))
    """
    values: dict[str, Any] = {}
    problems = []
    for name in RECOMMENDABLE:
        value = config.get(name)
        if value is None:
            continue
        try:
            values[name] = _checked(name, value)
        except ValueError as error:
            problems.append(str(error))
    if config.get("do_sample") is False:
        values["temperature"] = 0.0
    elif config.get("do_sample") is True and config.get("temperature") is None:
        values["temperature"] = _SAMPLED_TEMPERATURE
    return Recommended(values, tuple(problems))


def _checked(name: str, raw: Any) -> Any:
    """Return one value in the type that ``SamplingParams`` takes. Raise ValueError if it is not a number, or is out of
    range."""
    value: Any = as_number(name, raw)
    if name in _WHOLE:
        if not value.is_integer() or value > _GREATEST_WHOLE:
            raise ValueError(f"{name} must be a whole number up to {_GREATEST_WHOLE:,}, not {raw!r:.40}")
        value = int(value)
    return getattr(SamplingParams(**{name: value}), name)


@dataclass(frozen=True, slots=True)
class ResolvedSampling:
    """The parameters of a request, and the source of each field of ``RECOMMENDABLE``."""

    params: SamplingParams
    origins: Mapping[str, Origin]

    def with_value(self, name: str, text: str) -> "ResolvedSampling":
        """Return the same parameters with one value set in the chat. ``text``: the value as the user typed it. Raise
        ValueError if it is not a number, or is out of range."""
        try:
            number: float = int(text) if name in _WHOLE else float(text)
        except ValueError:
            kind = "whole number" if name in _WHOLE else "number"
            raise ValueError(f"{name} must be a {kind}, not {text!r}") from None
        params = replace(self.params, **{name: _checked(name, number)})
        return ResolvedSampling(params, {**self.origins, name: Origin.CHAT})

    def reset(self, name: str, usual: "ResolvedSampling") -> "ResolvedSampling":
        """Return the same parameters with one value taken from ``usual``."""
        params = replace(self.params, **{name: getattr(usual.params, name)})
        return ResolvedSampling(params, {**self.origins, name: usual.origin_of(name)})

    def origin_of(self, name: str) -> Origin:
        """Return the source of a value of ``SETTABLE``."""
        is_default = name != "max_tokens" or self.params.max_tokens in (ANSWER_TOKENS, DEMO_TOKENS)
        return self.origins.get(name, Origin.DEFAULT if is_default else Origin.OPTION)


@dataclass(frozen=True, slots=True)
class SamplingChoice:
    """A user's choice, made before the model is known.

    chosen: values given on the command line, by field of ``RECOMMENDABLE``.
    base: all other parameters, and the fallback for fields that neither ``chosen`` nor the model sets.

    Raises:
        ValueError: a chosen value is out of its range.
    """

    chosen: Mapping[str, Any]
    base: SamplingParams

    def __post_init__(self) -> None:
        self.over(NOTHING)

    def over(self, model: Recommended) -> ResolvedSampling:
        """Return the parameters in force for a model."""
        params = replace(self.base, **{**model.values, **self.chosen})
        origins = dict.fromkeys(RECOMMENDABLE, Origin.DEFAULT)
        origins |= dict.fromkeys(model.values, Origin.MODEL) | dict.fromkeys(self.chosen, Origin.OPTION)
        return ResolvedSampling(params, origins)
