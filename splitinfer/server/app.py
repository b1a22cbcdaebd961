"""The server as an ASGI application: all routes, behind the guard."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from splitinfer.server.anthropic.routes import anthropic_routes
from splitinfer.server.guard import Guard
from splitinfer.server.openai.responses_routes import responses_routes
from splitinfer.server.openai.routes import openai_routes
from splitinfer.server.problem import Problem
from splitinfer.server.route import ApiRoute
from splitinfer.server.service import Service


def make_app(service: Service) -> Guard:
    """The application of one service."""

    async def health(_request: Request) -> Response:
        return JSONResponse({"status": "draining" if service.is_draining else "ok", "running": service.num_running})

    async def cancel(request: Request) -> Response:
        key = service.gate.caller(request.state.facts, service.sessions)
        if not service.cancel(request.path_params["request_id"], key):
            raise Problem(404, "no request of this key with this id is under way")
        return JSONResponse({"cancelled": True})

    routes = [
        ApiRoute("/health", health, methods=["GET"]),
        ApiRoute("/v1/requests/{request_id}", cancel, methods=["DELETE"]),
        *openai_routes(service),
        *responses_routes(service),
        *anthropic_routes(service),
    ]
    return Guard(Router(routes, default=_not_found, redirect_slashes=False), service.gate)


async def _not_found(scope: Scope, _receive: Receive, _send: Send) -> None:
    raise Problem(404, f"there is no {scope['method']} {scope['path']:.80} here")
