"""Whether a server may be opened as asked: who can reach it, and what they need. Pure.

On loopback only this machine's programs reach it, so no key is needed unless some are given. Beyond, a server without
keys serves everybody on the network, which has to be said: `--no-auth`. So does letting every page of the web use a
server without keys, because a browser on this machine reaches it whatever it listens on.
"""

from collections.abc import Iterable

from splitinfer.errors import ConfigError
from splitinfer.server.gate import is_loopback, name_of

_EVERYWHERE = ("0.0.0.0", "::")


def check_exposure(host: str, *, has_keys: bool, no_auth: bool, origins: Iterable[str] = ()) -> None:
    """Check that a server is open to no more than was said.

    Raises:
        ConfigError: it would be, or what was said contradicts itself.
    """
    if no_auth and has_keys:
        raise ConfigError("keys are given, and --no-auth says that none is needed; leave one of them out")
    if has_keys or no_auth:
        return
    if not is_loopback(host):
        raise ConfigError(
            f"whoever reaches {host} could use this server: give keys (--api-key, --api-keys; `splitinfer keys add` "
            "makes them), or say --no-auth"
        )
    if "*" in origins:
        raise ConfigError("--cors '*' lets every page of the web use a server without keys: name pages, or give keys")


def names_of(host: str, own_names: Iterable[str], allowed: Iterable[str]) -> frozenset[str]:
    """The names under which a server that listens on ``host`` may be addressed.

    own_names: the machine's, its addresses included; they count where the server listens everywhere.
    allowed: others.

    >>> sorted(names_of("0.0.0.0", ["Mini.local", "192.168.0.2"], ["ai.example:443"]))
    ['192.168.0.2', 'ai.example', 'mini.local']
    >>> sorted(names_of("192.168.0.2", ["mini.local"], []))
    ['192.168.0.2']
    """
    reached = own_names if host in _EVERYWHERE else [host]
    return frozenset([*(name.lower().rstrip(".") for name in reached), *map(name_of, allowed)])
