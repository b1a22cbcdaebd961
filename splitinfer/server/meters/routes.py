"""The route ``/metrics``: written beside the event loop, one reading at a time, so that whoever asks on and on takes no
thread from others.
"""

import asyncio
from copy import deepcopy
from importlib.util import find_spec

from starlette.requests import Request
from starlette.responses import Response

from splitinfer.engine.versions import own_versions
from splitinfer.server.keys import Scope
from splitinfer.server.meters.http import HttpMeters
from splitinfer.server.problem import Problem
from splitinfer.server.service import ApiRoute, Service

_MISSING = "figures for Prometheus need prometheus-client: install splitinfer with the extra server"


def meter_routes(service: Service) -> list[ApiRoute]:
    one_at_a_time = asyncio.Lock()

    async def metrics(request: Request) -> Response:
        service.caller(request, Scope.METRICS)
        if find_spec("prometheus_client") is None:
            raise Problem(501, _MISSING)
        async with one_at_a_time:
            http, running = deepcopy(service.meters), service.num_running  # on the event loop, where they are counted
            return await asyncio.to_thread(_answer, service, http, running)

    return [ApiRoute("/metrics", metrics, methods=["GET"])]


def _answer(service: Service, http: HttpMeters, running: int) -> Response:
    from prometheus_client.exposition import generate_latest

    from splitinfer.server.meters.collector import CONTENT_TYPE, Readings

    llm = service.llm
    readings = Readings(
        model=service.model,
        context=llm.context_length,
        version=own_versions().splitinfer,
        layout=llm.layout.name or "",
        stats=llm.stats(),
        requests=llm.request_figures(),
        http=http,
        health=llm.health(),
        running=running,
        is_draining=service.is_draining,
    )
    return Response(generate_latest(readings), headers={"Content-Type": CONTENT_TYPE})
