"""Where `up` remembers things: a folder of the user's, on every machine.

last.json           hosts and model of the last `up` from here
layout.yaml         the layout that it made
worker-PORT.json    a worker that some `up` has started here
worker-PORT.log     what it says
"""

from pathlib import Path

from splitinfer.places import state


def state_folder() -> Path:
    """The folder, which may not exist yet."""
    return state() / "up"
