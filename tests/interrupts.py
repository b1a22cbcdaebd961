"""Ctrl-C for processes that tests start."""

import signal


def let_children_hear_them() -> None:
    """A shell that runs this process in the background has it ignore Ctrl-C, and its children would inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
