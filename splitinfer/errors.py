"""Every error a person can meet, as one tree.

    SplitinferError
    ├── ConfigError             a setting or a file of ours is wrong
    │   └── LayoutError         a layout that cannot be carried out
    ├── ModelError              the model cannot be used
    │   ├── CannotCut           ... at this layer
    │   └── CannotFit           ... in this machine's memory
    ├── PeerError               another machine
    │   ├── WorkerUnreachable   nobody answers at that address
    │   ├── Refused             it answered, and said no
    │   ├── WorkerLost          it was there, and is gone
    │   └── ProtocolError       it sent what the protocol does not allow
    └── RequestError            one request cannot be carried out
        └── QueueFull           ... now: too many wait already

The text of each is one sentence that a person can act on: it names the numbers, the file or the
address. The command line prints it and nothing else; ``--verbose`` adds the traceback. Errors of
the libraries underneath are translated where they are met, never further up.
"""


class SplitinferError(Exception):
    """Root of the tree; its text is one sentence to act on."""


class ConfigError(SplitinferError):
    """A setting or a file of ours is wrong."""


class LayoutError(ConfigError):
    """A layout that cannot be carried out."""


class ModelError(SplitinferError):
    """The model cannot be used."""


class CannotCut(ModelError):
    """The model cannot be cut at this layer."""


class CannotFit(ModelError):
    """The stage does not fit in this machine's memory."""


class PeerError(SplitinferError):
    """Something is wrong with another machine."""


class WorkerUnreachable(PeerError):
    """Nobody answers at a worker's address."""


class Refused(PeerError):
    """The peer answered, and said no; its reason is the text."""


class WorkerLost(PeerError):
    """A worker was there, and is gone."""


class ProtocolError(PeerError):
    """The peer sent what the protocol does not allow."""


class RequestError(SplitinferError):
    """One request cannot be carried out; the others can."""


class QueueFull(RequestError):
    """As many requests wait as may wait; the same one may be handed in later."""
