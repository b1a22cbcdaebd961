"""A hub in this process: the real client of the hub, with its cache in a folder, over repositories in folders.

``FakeHub.answer`` may be replaced by what answers in the hub's place.
"""

import hashlib
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import _http
from tqdm import tqdm

Answer = Callable[[httpx2.Request], httpx2.Response]


class FakeHub:
    """``repos``: a folder for each repository, by its name. ``asked``: the paths of files that were asked for."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.repos: dict[str, Path] = {}
        self.asked: list[str] = []
        self.answer: Answer = self._answer

    def commit(self, repo: str) -> str:
        """The repository's only commit."""
        return hashlib.sha1(repo.encode()).hexdigest()

    def snapshot(self, repo: str) -> Path:
        """The folder in which the client keeps it."""
        return self.cache / f"models--{repo.replace('/', '--')}" / "snapshots" / self.commit(repo)

    def downloaded(self) -> list[str]:
        """The weight files that were asked for whole, and forget what was asked."""
        asked, self.asked = self.asked, []
        return sorted({path.rpartition("/")[2] for path in asked if path.endswith(".safetensors")})

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        path = request.url.path
        if api := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(?:revision|tree)/[^/]+", path):
            return self._told(api[1], "/tree/" in path)
        if file := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            return self._file(request, file[1], file[2])
        return httpx2.Response(404)

    def _told(self, repo: str, is_tree: bool) -> httpx2.Response:
        if repo not in self.repos:
            return httpx2.Response(401, headers={"X-Error-Code": "RepoNotFound"})
        files = [path for path in sorted(self.repos[repo].rglob("*")) if path.is_file()]
        names = [(str(path.relative_to(self.repos[repo])), path) for path in files]
        if not is_tree:
            told = {"id": repo, "sha": self.commit(repo), "siblings": [{"rfilename": name} for name, _ in names]}
            return httpx2.Response(200, json=told)
        return httpx2.Response(
            200, json=[{"type": "file", "path": n, "size": p.stat().st_size, "oid": _oid(p)} for n, p in names]
        )

    def _file(self, request: httpx2.Request, repo: str, name: str) -> httpx2.Response:
        path = self.repos.get(repo, Path()) / name
        if repo not in self.repos or not path.exists():
            return httpx2.Response(404, headers={"X-Error-Code": "EntryNotFound", "X-Repo-Commit": self.commit(repo)})
        data, head = path.read_bytes(), {"ETag": f'"{_oid(path)}"', "X-Repo-Commit": self.commit(repo)}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
        if request.method == "HEAD":
            return httpx2.Response(200, headers={**head, "Content-Length": str(len(data))})
        if wanted is None:
            self.asked.append(request.url.path)
            return httpx2.Response(200, headers=head, content=data)
        end = min(int(wanted[2] or len(data) - 1), len(data) - 1) + 1
        return httpx2.Response(206, headers=head, content=data[int(wanted[1]) : end])


def _oid(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@contextmanager
def fake_hub(cache: Path) -> Iterator[FakeHub]:
    """A hub without repositories."""
    hub = FakeHub(cache)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
        patch.setattr(tqdm, "monitor_interval", 0)  # no thread that watches progress bars
        patch.setattr(_http, "time", SimpleNamespace(sleep=lambda _: None, time=time.time, monotonic=time.monotonic))
        transport = httpx2.MockTransport(lambda request: hub.answer(request))
        hooks = {"request": [_http.hf_request_event_hook]}  # which keeps it offline
        huggingface_hub.set_client_factory(
            lambda: httpx2.Client(transport=transport, event_hooks=hooks, follow_redirects=True)
        )
        huggingface_hub.close_session()
        try:
            yield hub
        finally:
            huggingface_hub.set_client_factory(_http.default_client_factory)
            huggingface_hub.close_session()
