"""The options of serving, and the form of an option's declaration.

An option is declared once, as an annotated field: its type, default, bounds and help. Everything else is made from it:

    the field is in      layout file       command line    Settings    dial of a running server (``LLM.tune``)
    ``ServingOptions``   under 'serving'   yes             yes         yes
    ``Settings``         no                yes             yes         no

The names are the same everywhere. ``None`` leaves an option to the next source: first the command line and
``Settings``, then the layout, then the default. A field without an ``Option`` is for the library only.
"""

import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_args, get_type_hints

from splitinfer.core.scheduler.policy import LEAST_SHARE, PolicyConfig, PolicyName

MAX_RUNNING = 32
SERVING = "Serving: how requests share the stages"
_HOUR = 3_600_000.0  # milliseconds
_MOST = 1_000_000  # tokens in a step, or requests: more than any machine has room for


@dataclass(frozen=True, slots=True)
class Option:
    """An option's declaration in the annotation of a field.

    help: what the option does, in a sentence or two.
    panel: the panel of ``--help``; empty: the first one.
    least, most: bounds of a number. ``choices``: the words allowed. ``unit``: a number's unit, for sentences.
    flag: the option of the command line, if it is not the field's name.
    per: how many of the field's units are in one of the flag's, such as 10^9 bytes in a GB.
    """

    help: str
    panel: str = ""
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    unit: str = ""
    flag: str = ""
    per: float = 1


@dataclass(frozen=True, slots=True)
class Declared:
    """A declared option: its field's name, type (without ``None``) and default, and its ``Option``."""

    name: str
    kind: type
    may_be_none: bool
    default: Any
    option: Option

    @property
    def range(self) -> str:
        """The values allowed, as part of a sentence.

        >>> SERVING_OPTIONS["prefill_share"].range, SERVING_OPTIONS["max_running"].range
        ('a number from 0.01 to 1', 'a whole number from 1 to 1,000,000')
        """
        if self.option.choices:
            return f"one of {', '.join(self.option.choices)}"
        kind = "a whole number" if self.kind is int else "a number"
        unit = f" of {self.option.unit}" if self.option.unit else ""
        least, most = self.option.least, self.option.most
        return f"{kind}{unit} from {least or 0:,g} to {'any finite one' if most is None else f'{most:,.0f}'}"

    def checked(self, value: Any) -> Any:
        """Return ``value`` in the field's type; ``None`` stays. Raise ValueError, with the allowed range, if it is not
        allowed."""
        if value is None and self.may_be_none:
            return None
        option, least, most = self.option, self.option.least, self.option.most
        if option.choices:
            is_right = isinstance(value, str) and value in option.choices
        elif self.kind in (int, float):
            is_right = isinstance(value, int | float) and not isinstance(value, bool)
            is_right = is_right and abs(value) <= sys.float_info.max  # a whole number of 400 digits is larger
            is_right = is_right and (least is None or value >= least) and (most is None or value <= most)
            is_right = is_right and (self.kind is float or value == int(value))
        else:
            return value
        if not is_right:
            raise ValueError(f"{self.name} must be {self.range}, not {value!r:.40}")
        return self.kind(value)


def declared(owner: type) -> Mapping[str, Declared]:
    """Return the options that a dataclass declares in its fields, by name."""
    hints = get_type_hints(owner, include_extras=True)
    found = {}
    for each in fields(owner):
        option = next((one for one in getattr(hints[each.name], "__metadata__", ()) if isinstance(one, Option)), None)
        if option is not None:
            kinds = get_args(hints[each.name].__origin__) or (hints[each.name].__origin__,)
            kind = str if str in kinds else kinds[0]
            found[each.name] = Declared(each.name, kind, types.NoneType in kinds, each.default, option)
    return found


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """How requests share the stages. ``None``: the option is not set. ``core.scheduler.policy`` describes the policies.

    Raises:
        ValueError: a value is out of its range; the error names the range.
    """

    policy: Annotated[
        str | None,
        Option(
            "Whether prompts or answers go first. stall_free: answers never wait for prompts. prefill_first: prompts "
            "go first. watermark: prompts go first until KV memory is nearly full, then answers. decode_first: a "
            "new request waits until all running ones are answered.",
            SERVING,
            choices=tuple(map(str, PolicyName)),
        ),
    ] = None
    prefill_share: Annotated[
        float | None,
        Option(
            "The share of a step that prompts get, of what answers leave. 1 reads prompts soonest; less keeps answers "
            "steadier. Default: 1.",
            SERVING,
            least=LEAST_SHARE,
            most=1,
        ),
    ] = None
    itl_slo_ms: Annotated[
        float | None,
        Option(
            "The most milliseconds between two tokens of an answer; prompts are read in chunks that keep it.",
            SERVING,
            least=0.001,
            most=_HOUR,
            unit="milliseconds",
        ),
    ] = None
    token_budget: Annotated[
        int | None,
        Option(
            "Tokens in one step, prompts and answers together. More reads prompts faster; less shortens the longest "
            "gap of an answer. Default: 512 on a GPU, otherwise 128.",
            SERVING,
            least=1,
            most=_MOST,
        ),
    ] = None
    max_running: Annotated[
        int | None,
        Option(
            "Requests that share the stages at a time: more throughput, longer gaps. Default: 32.",
            SERVING,
            least=1,
            most=_MOST,
        ),
    ] = None
    max_partial_prefills: Annotated[
        int | None,
        Option(
            "Prompts that are read side by side; with more than 1, short ones overtake long ones. Default: 1.",
            SERVING,
            least=1,
            most=_MOST,
        ),
    ] = None
    max_decode_gap_ms: Annotated[
        float | None,
        Option(
            "The most milliseconds for which prefill_first and watermark may keep an answer waiting.",
            SERVING,
            least=0.001,
            most=_HOUR,
            unit="milliseconds",
        ),
    ] = None
    kv_high: Annotated[
        float | None,
        Option("The share of KV memory at which watermark turns to answers. Default: 0.9.", SERVING, least=0, most=1),
    ] = None
    kv_low: Annotated[
        float | None,
        Option(
            "The share of KV memory at which watermark turns back to prompts. Default: 0.7.", SERVING, least=0, most=1
        ),
    ] = None
    min_dwell: Annotated[
        int | None,
        Option("The least steps between two such turns of watermark. Default: 16.", SERVING, least=1, most=_MOST),
    ] = None

    def __post_init__(self) -> None:
        for name, each in declared(type(self)).items():
            object.__setattr__(self, name, each.checked(getattr(self, name)))
        self.policy_config  # noqa: B018 - raises for values that contradict each other

    @property
    def policy_config(self) -> PolicyConfig:
        """These options in the scheduler's form: in seconds, with defaults."""
        options = {name: value for name, value in self.as_dict().items() if name not in ("token_budget", "max_running")}
        for name in ("itl_slo", "max_decode_gap"):
            if f"{name}_ms" in options:
                options[name] = options.pop(f"{name}_ms") / 1000
        if "policy" in options:
            options["policy"] = PolicyName(options["policy"])
        return PolicyConfig(**options)

    def as_dict(self) -> dict[str, Any]:
        """Return the options that are set."""
        values = {name: getattr(self, name) for name in SERVING_OPTIONS}
        return {name: value for name, value in values.items() if value is not None}

    def over(self, other: "ServingOptions") -> "ServingOptions":
        """Return these options, and for each that is not set the value of ``other``."""
        return ServingOptions(**{**other.as_dict(), **self.as_dict()})


def usual_token_budget(*, on_gpu: bool) -> int:
    """Return the default tokens in a step. Short chunks fill the stages sooner, but would leave a GPU idle."""
    return 512 if on_gpu else 128


SERVING_OPTIONS = declared(ServingOptions)
