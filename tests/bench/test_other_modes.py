"""The modes of the benchmark that measure one part each: every one runs on a tiny model and prints its document."""

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from splitinfer.bench.modes import measure
from splitinfer.bench.shared.options import Options

STREAMS = {"streams": (3,), "stream_prompt_tokens": 8, "stream_tokens": 12}
# What each is asked, the constants that make it short, and a figure of its document.
MODES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "speculation": (
        {"decode_tokens": 30, "acceptances": (0.8,)},
        {"speculation.trials._CROWD": 4, "speculation.trials.SETTLE": 8, "speculation.trials._WARM_UP": 12},
        "cases",
    ),
    "server": ({**STREAMS, "connect_timeout": 20.0}, {"server.run._ALONE": 1}, "medians"),
    "exact": (
        {"prompt_tokens": 20, "decode_tokens": 16},
        {"exact._TOGETHER": (2,), "exact._CHUNKS": (7,)},
        "roads",
    ),
    "wire": (
        {"prompt_tokens": 40, "texts": 1},
        {"wire._LENGTH": 80, "wire._SYSTEMS": (("as it is", "none"), ("slow", "none"), ("slow", "int8"))},
        "fidelity",
    ),
    "prefix": ({"prompt_tokens": 64, "decode_tokens": 8}, {}, "one_prompt"),
    "kv": ({"prompt_tokens": 64, "decode_tokens": 6}, {"kv._TEXTS": 3, "kv._LENGTH": 120}, "formats"),
}


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_prints_its_tables_and_its_document(
    mode: str,
    tiny_folder: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options, constants, figure = MODES[mode]
    for dotted, value in constants.items():
        module, _, name = f"splitinfer.bench.{dotted}".rpartition(".")
        monkeypatch.setattr(import_module(module), name, value)
    half = 6 if mode == "server" else 2  # over HTTP a model needs a tokenizer
    stages: list[dict[str, Any]] = [{"name": "a", "layers": 2 * half}]
    if mode != "exact":
        stages = [{"name": "a", "layers": half}, {"name": "b", "layers": half, "address": "local"}]
    tiny = tiny_folder("llama", head_dim=64, vocab_size=160, max_position_embeddings=4096)
    model = "demo" if mode == "server" else str(tiny)
    layout = str(tmp_path / "layout.yaml")
    Path(layout).write_text(yaml.safe_dump({"model": model, "stages": stages}))
    assert measure(mode, Options(layout, trials=1, **options)) == 0
    *tables, document = capsys.readouterr().out.splitlines()
    assert json.loads(document)[figure]
    assert tables
