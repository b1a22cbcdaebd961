"""The application firewall: ``socketfilterfw`` with ``--getglobalstate``, ``--getblockall``, ``--listapps`` ..."""

import re


def firewall_state(text: str) -> int | None:
    """0: off, 1: on, 2: on, and all incoming connections are blocked; from ``--getglobalstate``.

    >>> firewall_state("Firewall is blocking all non-essential incoming connections. (State = 2)")
    2
    """
    found = re.search(r"\(State = (\d)\)", text)
    return int(found[1]) if found else None


def is_on(text: str) -> bool | None:
    """Whether a setting is on, from ``--getblockall`` and ``--getstealthmode``, whose words have changed.

    >>> is_on("Firewall has block all state set to disabled."), is_on("Stealth mode enabled"), is_on("")
    (False, True, None)
    """
    words = re.findall(r"[a-z]+", text.lower())
    on, off = {"on", "enabled"} & set(words), {"off", "disabled"} & set(words)
    return None if bool(on) is bool(off) else bool(on)


def listed_apps(text: str) -> dict[str, bool] | None:
    """Whether each program that the firewall knows may receive connections, by its path; from ``--listapps``.

    ``None``: there is no list, as where only an administrator may see it.
    """
    if "number of apps" not in text.lower():
        return None
    form = r"^\s*\d{1,6}\s*:\s*(/[^\n]*?)\s*\n\s*\((Allow|Block) incoming connections\)"
    return {path: word == "Allow" for path, word in re.findall(form, text, re.MULTILINE | re.IGNORECASE)}
