"""A worker reads what the hub's client has downloaded: it copies nothing, although the repository has more files."""

import itertools
from pathlib import Path

import tiny
from fake_hub import fake_hub
from stages import layout, plain_greedy, prompt, tokens_of

from splitinfer.engine.worker.worker import Worker
from splitinfer.llm import LLM, Settings
from splitinfer.models.hub import fetch, open_model
from splitinfer.store.models import ModelStore
from transports import listen

_names = itertools.count()


def test_a_worker_finds_what_the_hubs_client_has_downloaded(tmp_path: Path):
    source = tiny.save(tmp_path / "source", "llama")
    (source / "README.md").touch()
    listener, store = listen(f"inproc://hub-copies-{next(_names)}"), ModelStore(tmp_path / "store")
    running = Worker(listener, store=store)
    with fake_hub(tmp_path / "cache") as hub:
        hub.repos["o/readme"] = source
        checkpoint = open_model("o/readme")
        fetch("o/readme", checkpoint, checkpoint.files, lambda *_: None)
        hub.downloaded()
        try:
            with LLM(layout("o/readme", [2, 2], [listener.address]), settings=Settings()) as llm:
                assert tokens_of(llm, prompt(9), max_tokens=4) == plain_greedy(source, prompt(9), 4)
        finally:
            assert running.stop(timeout=10)
        assert store.models() == []
        assert hub.downloaded() == []
