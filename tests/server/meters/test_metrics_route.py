"""`/metrics` of a server that answers: what it says is what was counted, under the names that dashboards ask for."""

import time
from collections import Counter
from collections.abc import Callable

import httpx2 as httpx
import pytest
from asgi import InMemory
from prometheus_client.parser import text_string_to_metric_families

from splitinfer.llm import LLM
from splitinfer.server.gate import Gate
from splitinfer.server.keys import ApiKey, ApiKeys, Scope, digest
from splitinfer.server.meters.http import HttpMeters
from splitinfer.server.running import make_app
from splitinfer.server.service import Service

AT_MOST = 60.0  # seconds
ACCEPTS = {  # what a Prometheus sends: 2.42 and, with names in UTF-8, 3
    "2": "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "3": "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
    "none": "*/*",
}
OF_DASHBOARDS = [  # of vLLM 0.33.0's distribution
    "e2e_request_latency_seconds", "generation_tokens", "inter_token_latency_seconds", "iteration_tokens_total",
    "kv_cache_usage_perc", "num_requests_running", "num_requests_waiting", "prompt_tokens",
    "request_decode_time_seconds", "request_generation_tokens", "request_max_num_generation_tokens",
    "request_prefill_time_seconds", "request_prompt_tokens", "request_queue_time_seconds", "request_success",
    "request_time_per_output_token_seconds", "time_to_first_token_seconds",
]  # fmt: skip
LAST = (  # what is counted last, on the event loop and on the engine's thread
    ("splitinfer:http_responses_total", {"route": "/v1/completions", "status": "200"}),
    ("vllm:e2e_request_latency_seconds_count", {}),
)

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(scope="module")
def service(llm: LLM) -> Service:
    keys = [ApiKey("laptop", digest("user")), ApiKey("prometheus", digest("figures"), frozenset({Scope.METRICS}))]
    return Service(llm, "demo", Gate(keys=ApiKeys(keys)))


def scrape(http: httpx.Client, accept: str = ACCEPTS["2"]) -> httpx.Response:
    return http.get("/metrics", headers={"Authorization": "Bearer figures", "Accept": accept})


def samples_in(answer: httpx.Response) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            at = sample.name, frozenset(sample.labels.items())
            assert at not in found, "a series twice"
            found[at] = sample.value
    return found


def of(samples: Samples, name: str, **labels: str) -> float:
    return sum(
        value for (each, found), value in samples.items() if each == name and labels.items() <= dict(found).items()
    )


def when(http: httpx.Client, is_there: Callable[[Samples], bool]) -> Samples:
    """The samples, once they have what is counted after the answer was sent."""
    give_up = time.monotonic() + AT_MOST
    while not is_there(found := samples_in(scrape(http))):
        assert time.monotonic() < give_up
    return found


def test_what_is_told_is_what_was_counted(http: httpx.Client, llm: LLM):
    before = samples_in(scrape(http))
    asked = {"prompt": "Once upon a time", "max_tokens": 6, "n": 2, "ignore_eos": True}
    answer = http.post("/v1/completions", headers={"X-Api-Key": "user"}, json=asked).json()

    def is_over(now: Samples) -> bool:
        answered, ended = (of(now, name, **labels) - of(before, name, **labels) for name, labels in LAST)
        return (answered, ended) == (1, 2)

    after = when(http, is_over)

    def grown(name: str, **labels: str) -> float:
        return of(after, name, **labels) - of(before, name, **labels)

    assert grown("vllm:generation_tokens_total", model_name="demo", engine="0") == 12
    assert grown("vllm:request_success_total", finished_reason="length") == 2
    assert grown("vllm:prompt_tokens_total") == 2 * answer["usage"]["prompt_tokens"]
    assert grown("vllm:prompt_tokens_by_source_total") == grown("vllm:prompt_tokens_total")
    for name in ("e2e_request_latency_seconds", "request_queue_time_seconds", "time_to_first_token_seconds"):
        assert grown(f"vllm:{name}_count") == 2
    assert grown("vllm:inter_token_latency_seconds_count") == 10
    assert grown("vllm:request_generation_tokens_bucket", le="10.0") == 2
    assert grown("vllm:request_generation_tokens_bucket", le="5.0") == 0
    assert grown("vllm:request_generation_tokens_sum") == 12
    assert grown("vllm:request_params_n_bucket", le="1.0") == 0
    assert grown("vllm:request_params_n_bucket", le="2.0") == 1
    assert grown("vllm:request_max_num_generation_tokens_sum") == 6
    assert 6 <= of(after, "splitinfer:stage_steps_total", stage="s0") <= llm.stats()["stages"][0]["steps"]
    assert grown("splitinfer:link_sent_bytes_total", stage="s0", next="s1") > 0
    assert of(after, "splitinfer:stage_up", stage="s1") == 1


def test_all_models_in_memory_are_told_each_with_its_name(llm: LLM):
    """And no series comes twice; responses are of no model."""
    front = Service(llm, "", meters=HttpMeters(Counter({("/v1/models", 200): 3})))
    loaded = [front.beside(llm, name) for name in ("a", "b")]
    loaded[0].meters.answered([5])
    front.loaded = lambda: loaded
    with httpx.Client(transport=InMemory(make_app(front)), base_url="http://localhost") as http:
        found = samples_in(scrape(http))
    assert [of(found, "vllm:request_params_n_count", model_name=name) for name in ("a", "b")] == [1, 0]
    assert of(found, "splitinfer:stage_up", model_name="b", stage="s1") == 1
    assert of(found, "splitinfer:http_responses_total", model_name="", route="/v1/models") == 3
    assert of(found, "splitinfer:http_responses_total") == 3


@pytest.mark.parametrize("accept", ACCEPTS)
def test_names_keep_their_colons_for_every_prometheus(http: httpx.Client, accept: str):
    answer = scrape(http, ACCEPTS[accept])
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    names = {name for name, _ in samples_in(answer)}
    assert names
    assert [name for name in names if not name.startswith(("vllm:", "splitinfer:"))] == []


def test_all_that_vllms_dashboards_ask_for_is_there(http: httpx.Client):
    names = {name.removeprefix("vllm:") for name, _ in samples_in(scrape(http))}
    endings = ("", "_total", "_bucket")
    assert [name for name in OF_DASHBOARDS if not any(name + ending in names for ending in endings)] == []
