"""A real Prometheus scrapes a server under load; every query of the dashboards given must find data there.

    python -m tests.campaigns.prometheus                          # needs prometheus and promtool, Debian's
    python -m tests.campaigns.prometheus --dashboards FOLDER      # and the *.json below a folder, vLLM's say

vLLM's dashboards are in its source distribution, under ``examples/observability``. Variables of Grafana are filled in:
intervals with the time that was scraped, and names of models with the server's. The rules in ``scripts/grafana`` are
checked and tried by promtool, and evaluated by this Prometheus. It asks with a key of the scope ``metrics``. Last, what
a scrape costs is measured. Exit code 1: a query is empty or refused, or a rule cannot be evaluated.
"""

import argparse
import json
import math
import re
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import Request, urlopen

_ROOT = Path(__file__).resolve().parents[2]
from splitinfer.llm import LLM
from splitinfer.server.gate import Gate
from splitinfer.server.keys import ApiKey, ApiKeys, Scope, digest
from splitinfer.server.running import Listen, Server
from splitinfer.server.service import Service

OURS = _ROOT / "scripts" / "grafana"
LAYOUT = {
    "model": "demo",
    "draft": "ngram",
    "stages": [{"name": "front", "layers": 6}, {"name": "back", "layers": 6, "address": "local"}],
}
MODEL = "demo"
AT_MOST = 60.0  # seconds for an answer of Prometheus
_LABEL_VALUES = re.compile(r"label_values\((?:(.*),)?\s*(\w+)\)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dashboards", type=Path, action="append", default=[])
    parser.add_argument("--seconds", type=int, default=90)
    parser.add_argument("--scrapes", type=int, default=200)
    given = parser.parse_args()
    subprocess.run(["promtool", "check", "rules", OURS / "rules.yaml"], check=True)
    subprocess.run(["promtool", "test", "rules", OURS / "rules_test.yaml"], check=True)
    keys = [ApiKey("all", digest("user")), ApiKey("prometheus", digest("figures"), frozenset({Scope.METRICS}))]
    with (
        LLM(LAYOUT) as llm,
        closing(Server(Service(llm, MODEL, Gate(keys=ApiKeys(keys))), Listen(port=0))) as server,
        scraping(server.port) as prometheus,
    ):
        ends = threading.Event()
        clients = [threading.Thread(target=keep_asking, args=(server.port, i, ends)) for i in range(3)]
        for client in clients:
            client.start()
        time.sleep(given.seconds)
        wrong = [*wrong_queries(prometheus, [OURS, *given.dashboards], given.seconds), *wrong_rules(prometheus)]
        tell_scrapes(prometheus)
        measure(server, given.scrapes, "while three streams decode")
        ends.set()
        for client in clients:
            client.join()
        measure(server, given.scrapes, "while nothing is asked")
    print("\n".join(wrong) or "nothing is wrong")
    return int(bool(wrong))


# -- what is scraped -------------------------------------------------------------------------------


def keep_asking(port: int, number: int, ends: threading.Event) -> None:
    """Ask again and again; of each four requests one is given up, and one is for two answers."""
    turn = number
    while not ends.is_set():
        turn += 1
        body = {
            "prompt": f"Once upon a time, a wolf and a wolf, {number} {turn // 4}",
            "max_tokens": 24,
            "stream": True,
            "n": 2 if turn % 4 == 1 else 1,
        }
        request = Request(
            f"http://127.0.0.1:{port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "X-Api-Key": "user"},
        )
        with suppress(OSError), urlopen(request, timeout=AT_MOST) as answer:
            if turn % 4 == 0:
                answer.readline()
            else:
                answer.read()


@contextmanager
def scraping(port: int) -> Iterator[str]:
    """A Prometheus that scrapes the server each second; its address."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        own = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "prometheus.yaml"
        config.write_text(
            f"global: {{scrape_interval: 1s, evaluation_interval: 5s}}\n"
            f"rule_files: [{OURS / 'rules.yaml'}]\n"
            f"scrape_configs:\n"
            f"  - job_name: splitinfer\n"
            f"    authorization: {{credentials: figures}}\n"
            f"    static_configs: [{{targets: ['127.0.0.1:{port}']}}]\n"
        )
        command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder}/data"]
        with open(Path(folder) / "log", "w+") as log:
            process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{own}"], stderr=log)
            try:
                yield f"http://127.0.0.1:{own}"
            finally:
                process.terminate()
                process.wait(AT_MOST)


def asked(prometheus: str, path: str, **parameters: str) -> Any:
    """What Prometheus' API answers; refusals too."""
    with suppress_status(urlopen, f"{prometheus}/api/v1/{path}?{urlencode(parameters)}") as answer:
        return json.load(answer)


@contextmanager
def suppress_status(open_url: Any, url: str) -> Iterator[Any]:
    """An answer of any status, as Prometheus gives the reason of a refusal in JSON."""
    try:
        answer = open_url(url, timeout=AT_MOST)
    except OSError as error:  # urllib's HTTPError is an answer, too
        if not hasattr(error, "read"):
            raise
        answer = error
    with closing(answer):
        yield answer


# -- queries ---------------------------------------------------------------------------------------


def queries_in(folder: Path) -> Iterator[tuple[str, str]]:
    """Each query of the dashboards below a folder, with the file's name."""
    for file in sorted(folder.rglob("*.json")):
        yield from ((file.name, query) for query in dict.fromkeys(_queries(json.loads(file.read_text()))))


def _queries(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if node.get("type") == "query" and node.get("query"):
            query = node["query"]
            yield query["query"] if isinstance(query, dict) else query
        elif isinstance(node.get("expr"), str):
            yield node["expr"]
        for below in node.values():
            yield from _queries(below)
    elif isinstance(node, list):
        for below in node:
            yield from _queries(below)


def filled_in(query: str, seconds: int) -> str:
    """A query with Grafana's variables filled in."""
    for name in ("$__rate_interval", "$__interval", "$__range"):
        query = query.replace(name, f"{seconds}s")
    return query.replace("$stage", "front").replace("$model_name", MODEL).replace("$Deployment_id", MODEL)


def wrong_queries(prometheus: str, folders: list[Path], seconds: int) -> Iterator[str]:
    """The queries without data."""
    for folder in folders:
        found = list(queries_in(folder))
        empty = [(name, query, why) for name, query in found if (why := wrong_with(prometheus, query, seconds))]
        print(f"{folder}: {len(found)} queries, {len(empty)} without data")
        yield from (f"{name}: {why}: {' '.join(query.split())}" for name, query, why in empty)


def wrong_with(prometheus: str, query: str, seconds: int) -> str | None:
    """What is wrong with a query: refused, or without a value."""
    query = filled_in(query, seconds)
    if (values := _LABEL_VALUES.fullmatch(query)) is not None:
        match = {} if values[1] is None else {"match[]": values[1]}
        answer = asked(prometheus, f"label/{values[2]}/values", **match)
        return None if answer["status"] == "success" and answer["data"] else f"no values ({answer})"
    answer = asked(prometheus, "query", query=query)
    if answer["status"] != "success":
        return str(answer.get("error"))
    values_found = [float(each["value"][1]) for each in answer["data"]["result"]]
    return None if any(math.isfinite(value) for value in values_found) else f"no data ({values_found})"


def wrong_rules(prometheus: str) -> Iterator[str]:
    """The rules that could not be evaluated, or that fire although all is well."""
    rules = [rule for group in asked(prometheus, "rules")["data"]["groups"] for rule in group["rules"]]
    print(f"{len(rules)} rules")
    for rule in rules:
        if rule["health"] != "ok" or rule["state"] == "firing":
            yield f"{rule['name']}: {rule['health']}, {rule['state']}, {rule.get('lastError')}"


# -- what it costs ---------------------------------------------------------------------------------


def tell_scrapes(prometheus: str) -> None:
    for name in ("scrape_samples_scraped", "max_over_time(scrape_duration_seconds[5m])", "min_over_time(up[5m])"):
        (found,) = asked(prometheus, "query", query=name)["data"]["result"]
        print(f"{name}: {found['value'][1]}")


def measure(server: Server, count: int, when: str) -> None:
    """Scrape on and on: seconds and processor time for each, and how much of it is the event loop's."""
    request = Request(f"http://127.0.0.1:{server.port}/metrics", headers={"X-Api-Key": "figures"})
    began, used, loop, size = time.monotonic(), time.process_time(), server.loop_seconds(), 0
    for _ in range(count):
        with urlopen(request, timeout=AT_MOST) as answer:
            size = len(answer.read())
    each = [1000 * (now - before) / count for now, before in (
        (time.monotonic(), began), (time.process_time(), used), (server.loop_seconds(), loop)
    )]  # fmt: skip
    print(f"{when}, for each scrape of {size:,} bytes: {each[0]:.1f} ms, {each[1]:.1f} of processor (all that this")
    print(f"process does, the asking included), {each[2]:.2f} of that on the event loop")


if __name__ == "__main__":
    raise SystemExit(main())
