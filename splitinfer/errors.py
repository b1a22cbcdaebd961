"""All errors of the library, as one tree.

The text of each is one sentence that a person can act on: it names the numbers, the file or the address. The command
line prints only that; ``--verbose`` adds the traceback. Errors of the libraries below are translated where they are
first caught.
"""


class SplitinferError(Exception):
    """The root of the tree; its text is one sentence to act on."""


class ConfigError(SplitinferError):
    """A setting or a configuration file is wrong."""


class LayoutError(ConfigError):
    """A layout cannot be used."""


class NotInstalled(ConfigError):
    """An optional package is missing; the text says how to install it."""


class ModelError(SplitinferError):
    """The model cannot be used."""


class CannotCut(ModelError):
    """The model cannot be cut at this layer."""


class CannotFit(ModelError):
    """The stage does not fit in this machine's memory."""


class PeerError(SplitinferError):
    """Another machine cannot be used."""


class WorkerUnreachable(PeerError):
    """Nothing answers at a worker's address."""


class Refused(PeerError):
    """The peer refused; its reason is the text."""


class WorkerLost(PeerError):
    """The connection to a worker is lost. ``no_memory_on``: the stage whose device had too little memory, if that is
    the cause; its worker is still there."""

    def __init__(self, text: str, no_memory_on: int | None = None) -> None:
        super().__init__(text)
        self.no_memory_on = no_memory_on


class ProtocolError(PeerError):
    """The peer sent a message that the protocol does not allow."""


class DeviceFailed(SplitinferError):
    """The device that computes a stage failed in a launch or a wait. ``no_memory``: it had too little memory;
    ``lost_rank``: the other rank of its stage went away in a sum."""

    def __init__(self, text: str, no_memory: bool = False, lost_rank: bool = False) -> None:
        super().__init__(text)
        self.no_memory, self.lost_rank = no_memory, lost_rank


class Draining(SplitinferError):
    """The pipeline is ending and takes no new requests."""


class RequestError(SplitinferError):
    """One request cannot be carried out; the others can."""


class ContextExceeded(RequestError):
    """The prompt is longer than the context."""


class QueueFull(RequestError):
    """The waiting queue is full; the same request may be submitted later."""
