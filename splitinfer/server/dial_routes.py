"""The route of the dials of serving: whoever may ask reads them, and who has the scope `admin` turns them."""

import logging

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from splitinfer.errors import ConfigError
from splitinfer.server.body import read_json
from splitinfer.server.dials import changes_of, dials_document
from splitinfer.server.keys import ApiKey, Scope
from splitinfer.server.problem import Problem
from splitinfer.server.route import ApiRoute
from splitinfer.server.service import Service

log = logging.getLogger(__name__)

_MOST_BYTES = 1 << 16


def dial_routes(service: Service) -> list[ApiRoute]:
    """The route of one service."""
    llm = service.llm

    def document(key: ApiKey) -> Response:
        may_change = key.may(Scope.ADMIN)
        return JSONResponse(
            dials_document(llm.serving_options, llm.token_budget, llm.max_running, may_change=may_change)
        )

    async def dials(request: Request) -> Response:
        scope = Scope.ADMIN if request.method == "PATCH" else Scope.USE
        key = service.gate.caller(request.state.facts, service.sessions, scope)
        if request.method == "PATCH":
            changes = await read_json(request, changes_of, _MOST_BYTES)
            try:
                llm.tune(**changes)
            except ConfigError as error:
                raise Problem(400, str(error)) from error
            log.info("%s has changed the dials: %s", key.name, changes)
        return document(key)

    return [ApiRoute("/v1/splitinfer/dials", dials, methods=["GET", "PATCH"])]
