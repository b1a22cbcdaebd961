"""Where workers listen: their usual port, and which hosts no other machine reaches."""

from ipaddress import ip_address

WORKER_PORT = 5577


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host, which is a name or a number.

    >>> [is_loopback(host) for host in ("localhost", "127.0.0.2", "[::1]", "::1%lo0", "0.0.0.0", "mini.local", "")]
    [True, True, True, True, False, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return False
