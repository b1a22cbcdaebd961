"""LiteLLM's router before two pipelines, by the page's recipe: a drain, a killed worker, a killed coordinator.

    python -m tests.campaigns.router --litellm VENV/bin/litellm       # pip install 'litellm[proxy]'

The file of `docs/last/routers.md` is used as it stands, with other addresses. Every scene asks for streams through the
router, by one client for each, and says what the client saw. 1 if an answer differs from the undisturbed one without an
error, if a stream is silent at its end, or if a scene went otherwise than the page says.
"""

import argparse
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import requests
import yaml
from processes import environment, until

from .serving import RestartedWorker, Serving, restarted_worker, serving

PAGE = Path(__file__).resolve().parents[2] / "docs/last/routers.md"
_STREAMS, _TOKENS, _EARLY = 8, 800, 50
_BODY = {
    "model": "mine", "messages": [{"role": "user", "content": "Tell me about a wolf."}], "temperature": 0,
    "max_tokens": _TOKENS, "stream": True,
}  # fmt: skip


def recipe(urls: list[str]) -> str:
    """The page's file, with these servers."""
    found = yaml.safe_load(re.search(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)[1])  # type: ignore[index]
    for entry, url in zip(found["model_list"], urls, strict=True):
        entry["litellm_params"] |= {"api_base": f"{url}/v1"}
    return yaml.safe_dump(found)


@contextmanager
def router(program: str, urls: list[str]) -> Iterator[str]:
    """LiteLLM's proxy; its address."""
    with tempfile.TemporaryDirectory() as folder:
        port, file = _free_port(), Path(folder, "router.yaml")
        file.write_text(recipe(urls))
        words = [program, "--config", str(file), "--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen(
            words,
            env=environment({"LITELLM_LOCAL_MODEL_COST_MAP": "True"}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            until(lambda: _is_up(f"http://127.0.0.1:{port}"), "the router is up", 240.0)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def _is_up(url: str) -> bool:
    try:
        return requests.get(f"{url}/health/liveliness", timeout=5).ok
    except requests.RequestException:
        return False


@dataclass
class Stream:
    """What a client has seen: pieces of text, how it ended, and the longest silence in seconds."""

    pieces: list[str] = field(default_factory=list)
    ended: str = "silence"
    silence: float = 0.0

    def read(self, url: str) -> None:
        """Ask, and read to the end."""
        try:
            heard = time.monotonic()
            with requests.post(f"{url}/v1/chat/completions", json=_BODY, stream=True, timeout=120) as answer:
                if answer.status_code != 200:
                    self.ended = f"status {answer.status_code}: {answer.text[:200]}"
                    return
                for line in answer.iter_lines():
                    now = time.monotonic()
                    self.silence, heard = max(self.silence, now - heard), now
                    if line.startswith(b"data: {"):
                        self._take(json.loads(line[6:]))
        except requests.RequestException as error:
            self.ended = f"cut: {error}"

    def _take(self, event: dict[str, object]) -> None:
        if "error" in event:
            self.ended = f"error: {str(event['error'])[:200]}"
            return
        (choice,) = event["choices"] or ({},)  # type: ignore[misc]
        self.pieces.append(choice.get("delta", {}).get("content") or "")
        self.ended = choice.get("finish_reason") or self.ended

    def told(self, wanted: str) -> str:
        """In a few words."""
        if self.ended not in ("length", "stop"):
            return self.ended
        return "whole" if "".join(self.pieces) == wanted else "another text"


def streams(url: str, count: int, meanwhile: Callable[[], object] = lambda: None) -> list[Stream]:
    """So many at once; ``meanwhile`` once all of them have some text."""
    made = [Stream() for _ in range(count)]
    threads = [threading.Thread(target=each.read, args=(url,)) for each in made]
    for thread in threads:
        thread.start()
    until(lambda: all(len(each.pieces) > _EARLY or each.ended != "silence" for each in made), "all have begun", 120.0)
    meanwhile()
    for thread in threads:
        thread.join()
    return made


@dataclass(frozen=True)
class Pipelines:
    """Two servers, the first with a worker that can be killed."""

    worker: RestartedWorker
    servers: Sequence[Serving]

    def worker_killed(self) -> None:
        """A worker is killed, and started again after 3 s."""
        self.worker.kill()
        time.sleep(3)
        self.worker.start_again()

    def coordinator_killed(self) -> None:
        """A coordinator is killed."""
        self.servers[0].running.signal(signal.SIGKILL)

    def drained(self) -> None:
        """A server gets SIGTERM."""
        self.servers[0].running.signal(signal.SIGTERM)


def scene(program: str, disturb: Callable[[Pipelines], None], may_err: bool) -> list[str]:
    """What was wrong."""
    with ExitStack() as stack:
        worker = stack.enter_context(restarted_worker())
        drains = ("--drain-seconds", "60")
        servers = [
            stack.enter_context(serving(*drains, workers=[worker.address])),
            stack.enter_context(serving(*drains)),
        ]
        url = stack.enter_context(router(program, [f"http://127.0.0.1:{each.port}" for each in servers]))
        wanted = "".join(streams(url, 1)[0].pieces)
        under_way = streams(url, _STREAMS, lambda: disturb(Pipelines(worker, servers)))
        after = streams(url, _STREAMS)
    wrong = list[str]()
    for when, found, errs in (("under way", under_way, may_err), ("asked afterwards", after, False)):
        told = Counter(each.told(wanted) for each in found)
        print(f"  {when}, longest silence {max(each.silence for each in found):.1f} s:")
        for words, count in told.items():
            print(f"    {count} x {words}")
        wrong += [words for words in told if words in ("another text", "silence") or (words != "whole" and not errs)]
        if errs and "whole" in told and len(told) == 1:
            wrong.append("no stream was on the killed server")
    return wrong


SCENES = ((Pipelines.drained, False), (Pipelines.worker_killed, False), (Pipelines.coordinator_killed, True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--litellm", default="litellm", help="LiteLLM's program")
    parser.add_argument("--only", choices=[each.__name__ for each, _ in SCENES])
    options = parser.parse_args()
    wrong = list[str]()
    for disturb, may_err in SCENES:
        if options.only in (None, disturb.__name__):
            print(disturb.__doc__, flush=True)
            wrong += scene(options.litellm, disturb, may_err)
    print("\n".join(wrong) or "all as the page says")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
