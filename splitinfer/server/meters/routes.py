"""The route ``/metrics``. A thread writes the text, one reading at a time, so that a client that asks without end takes
no thread from others."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
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
            # Copy on the event loop, where they are counted.
            counted = [(one, deepcopy(one.meters), one.num_running) for one in service.loaded()]
            responses = Counter(service.meters.responses)
            return await asyncio.to_thread(_answer, service, counted, responses)

    return [ApiRoute("/metrics", metrics, methods=["GET"])]


def _answer(
    service: Service, counted: Sequence[tuple[Service, HttpMeters, int]], responses: Mapping[tuple[str, int], int]
) -> Response:
    from prometheus_client.exposition import generate_latest

    from splitinfer.server.meters.collector import CONTENT_TYPE, Readings, ServerReadings

    models = [
        Readings(
            model=one.model,
            context=one.llm.context_length,
            version=own_versions().splitinfer,
            layout=one.llm.layout.name or "",
            stats=one.llm.stats(),
            requests=one.llm.request_figures(),
            http=http,
            health=one.llm.health(),
            running=running,
            is_draining=one.is_draining,
        )
        for one, http, running in counted
    ]
    found = generate_latest(ServerReadings(service.model, responses, models))
    return Response(found, headers={"Content-Type": CONTENT_TYPE})
