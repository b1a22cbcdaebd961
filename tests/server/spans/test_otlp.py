"""Spans as a collector receives them: of real requests, by a real server, over HTTP."""

import queue
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx2 as httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from splitinfer.cli.serving import spans_to
from splitinfer.errors import ConfigError
from splitinfer.llm import LLM
from splitinfer.server.otlp import OtlpSpans
from splitinfer.server.running import Listen, Server
from splitinfer.server.service import Service

AT_MOST = 60.0  # seconds
PROMPT, TRACE = "a heron on the shore", "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


@pytest.fixture(scope="module")
def collector() -> Iterator[tuple[str, "queue.Queue[tuple[str, bytes]]"]]:
    sent: queue.Queue[tuple[str, bytes]] = queue.Queue()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent.put((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", sent
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def spans(llm: LLM, collector: tuple[str, Any]) -> tuple[bytes, list[Any]]:
    """The bodies and the spans of two requests: one with a parent, and one that its client has cancelled."""
    address, sent = collector
    made = OtlpSpans(address, seconds=AT_MOST)
    with closing(Server(Service(llm, "demo", spans=made), Listen(port=0))) as server:
        with httpx.Client(base_url=f"http://127.0.0.1:{server.port}/v1", timeout=AT_MOST) as client:
            body = {"prompt": PROMPT, "max_tokens": 3, "ignore_eos": True}
            answer = client.post("/completions", json=body, headers={"traceparent": PARENT, "X-Request-Id": "whole"})
            assert answer.status_code == 200
            long = {"prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/completions", json=long, headers={"X-Request-Id": "cut"}) as stream:
                lines = stream.iter_lines()
                next(lines)
                assert client.delete("/requests/cut").json() == {"cancelled": True}
                for _ in lines:
                    pass
        while not server.is_idle:  # spans are made when a request is over
            threading.Event().wait(0.01)
    made.close()
    raw, found = b"", list[Any]()
    while not sent.empty():  # nothing comes any more
        path, body = sent.get()
        assert path == "/v1/traces"
        received = ExportTraceServiceRequest.FromString(body)
        found += [span for each in received.resource_spans for scope in each.scope_spans for span in scope.spans]
        raw += body
    return raw, found


def values(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


def named(spans: tuple[bytes, list[Any]], request_id: str) -> Any:
    (found,) = [span for span in spans[1] if values(span)["splitinfer.request_id"] == request_id]
    return found


def test_a_span_has_its_phases_and_its_place_in_the_clients_trace(spans: tuple[bytes, list[Any]]):
    whole = named(spans, "whole")
    assert whole.trace_id.hex() == TRACE
    assert whole.name == "POST /v1/completions"
    assert [event.name for event in whole.events] == ["queued", "prefill", "decode"]
    times = [whole.start_time_unix_nano, *(event.time_unix_nano for event in whole.events), whole.end_time_unix_nano]
    assert times == sorted(times)
    found = values(whole)
    assert (found["gen_ai.usage.output_tokens"], found["gen_ai.operation.name"]) == (3, "text_completion")
    assert {f"splitinfer.{phase}_seconds" for phase in ("preparing", "queue", "prefill", "decode")} <= found.keys()


def test_a_request_that_was_cancelled_was_given_up_and_nothing_of_a_prompt_is_sent(spans: tuple[bytes, list[Any]]):
    cut = named(spans, "cut")
    assert cut.events[-1].name == "given up"
    assert values(cut)["gen_ai.usage.output_tokens"] < 4000
    assert (b"demo" in spans[0], b"heron" in spans[0]) == (True, False)


@pytest.mark.parametrize("url", ["collector:4318", "ftp://there", "http://", "http://there:port", "http://[::1"])
def test_what_is_no_address_is_one_sentence(url: str):
    with pytest.raises(ConfigError, match="--otlp takes the address of a collector"):
        spans_to(url)
    assert spans_to(None) is None
