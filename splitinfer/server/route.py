"""A route whose refusal of a method has the form of its API."""

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from splitinfer.server.problem import Problem


class ApiRoute(Route):
    """A route for some methods."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Carry out a request, whose ``scope["state"]`` gets the ``route``: its pattern.

        Raises:
            Problem: 405, the method is another.
        """
        if self.methods and scope["method"] not in self.methods:
            takes = tuple(sorted(self.methods))
            sentence = f"{scope['path']:.80} takes {' and '.join(takes)}, not {scope['method']:.20}"
            raise Problem(405, sentence, allow=takes)
        scope.setdefault("state", {})["route"] = self.path
        await self.app(scope, receive, send)
