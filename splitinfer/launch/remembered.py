"""What the last `up` was about, so that the next needs no words. Pure: values and text."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import pydantic

from splitinfer.errors import ConfigError
from splitinfer.launch.hosts import MOST_HOSTS, Host


@dataclass(frozen=True, slots=True)
class Last:
    """The hosts of an `up`, and its model."""

    hosts: tuple[Host, ...]
    model: str | None

    def encode(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


_LAST = pydantic.TypeAdapter(Last)


def decode(text: str | None, where: str) -> Last:
    """What a file remembers; ``None``: there is no file. Raises ConfigError: it holds something else."""
    if text is None:
        return Last((), None)
    try:
        last = _LAST.validate_json(text, strict=True)
    except ValueError as error:
        raise ConfigError(f"{where} is not what `splitinfer up` writes; remove it, and name the hosts again") from error
    return Last(last.hosts[:MOST_HOSTS], last.model)


def choose(last: Last, hosts: Sequence[Host], model: str | None) -> Last:
    """What is meant by hosts and a model, of which both may be left out.

    Raises:
        ConfigError: they are left out, and nothing is remembered.
    """
    if not hosts and not last.hosts:
        raise ConfigError("no host is known yet: name one, such as `splitinfer up mini.local --model OWNER/MODEL`")
    chosen = model or last.model
    if chosen is None:
        raise ConfigError("no model is known yet: name one with --model, once; it is remembered")
    return Last(tuple(hosts) or last.hosts, chosen)


def hosts_of(last: Last, hosts: Sequence[Host]) -> tuple[Host, ...]:
    """The hosts that `down` and `status` are about. A host is as it was remembered, if it is.

    Raises:
        ConfigError: none is named, and none remembered.
    """
    if not hosts and not last.hosts:
        raise ConfigError("no host is known yet: `splitinfer up` remembers those that it was given; name one")
    known = {each.ssh: each for each in last.hosts}
    return tuple(known.get(each.ssh, each) for each in hosts) or last.hosts
