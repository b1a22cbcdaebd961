"""What the loop is asked for when another cut is to be loaded."""

from concurrent.futures import Future

from splitinfer.core.kv.budget import NeverFits
from splitinfer.core.layout import Layout
from splitinfer.errors import RequestError
from splitinfer.models.memory import size


class Recut(Exception):
    """Raised in the loop to have it load another cut. ``paused``: gets the seconds in which nothing was computed."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout.name)
        self.layout, self.paused = layout, Future[float]()


def no_room(error: NeverFits, layout: Layout) -> RequestError:
    """Why a cut cannot be used while a request is under way."""
    name = layout.stages[error.stage].name
    return RequestError(
        f"a request under way has no room in the cut {layout.cut}: {error.num_tokens:,} tokens need "
        f"{size(error.needed)} of KV on stage {name}, which has {size(error.there)}; try again when it has ended"
    )
