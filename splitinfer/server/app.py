"""The server as an ASGI application: all routes, behind the guard."""

from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from splitinfer.server.anthropic.routes import anthropic_routes
from splitinfer.server.dial_routes import dial_routes
from splitinfer.server.guard import Guard
from splitinfer.server.meters.routes import meter_routes
from splitinfer.server.openai.responses_routes import responses_routes
from splitinfer.server.openai.routes import openai_routes
from splitinfer.server.own_routes import own_routes
from splitinfer.server.page.routes import page_routes
from splitinfer.server.problem import Problem
from splitinfer.server.service import Service


def make_app(service: Service) -> Guard:
    """The application of one service."""
    apis = [*openai_routes(service), *responses_routes(service), *anthropic_routes(service)]
    routes = [*own_routes(service), *dial_routes(service), *meter_routes(service), *apis, *page_routes(service)]
    router = Router(routes, default=_not_found, redirect_slashes=False)
    return Guard(
        router,
        service.gate,
        service.sessions,
        failure=lambda: service.llm.health().failure,
        ended=service.meters.responded,
    )


async def _not_found(scope: Scope, _receive: Receive, _send: Send) -> None:
    raise Problem(404, f"there is no {scope['method']:.20} {scope['path']:.80} here")
