"""Every class of mlx-lm's that can be halved: a stage across two machines gets the tokens of mlx-lm's own tensor
parallel on the same weights."""

import json
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.matrix.compare import save
from tests.matrix.configs import architecture, configurations

SECONDS = 500.0
CANNOT = {
    "muse_spark": "No Metal back-end",
    "prism_hadamard_qwen35": "Hadamard signs",
    "step3p5": "num_kv_heads of self_attn is 1",
}
"""What plain mlx-lm cannot run as halves here, and why: for want of a GPU, of a real checkpoint's numbers, of more
heads than a tiny configuration has."""


def names() -> list[str]:
    """The configurations whose class can be halved."""
    return [
        name
        for name in sorted(configurations())
        if hasattr(import_module(f"mlx_lm.models.{architecture(name)}").Model, "shard")
    ]


@pytest.mark.nightly
def test_tokens_are_those_of_mlx_lms_tensor_parallel(tmp_path: Path) -> None:
    which, places = names(), list[str]()
    for name in which:
        (folder := tmp_path / name.replace("/", "-")).mkdir()
        save(folder, configurations()[name])
    for _ in range(2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            places.append(f"127.0.0.1:{free.getsockname()[1]}")
    (hosts := tmp_path / "hosts.json").write_text(json.dumps([[place] for place in places]))
    both = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.matrix.halves", str(rank), str(hosts), str(tmp_path), *which],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = []
    for one in both:
        try:
            out, err = one.communicate(timeout=SECONDS)
        finally:
            one.kill()
        said.append([json.loads(line) for line in out.splitlines()])
        assert [each["name"] for each in said[-1]] == which, err[-2000:]
    assert said[0] == said[1], "both ranks compute the same"
    right = [each["name"] for each in said[0] if each.get("plain") and each["plain"] == each["ours"]]
    refused = {each["name"]: each["error"] for each in said[0] if "error" in each}
    wrong = [each for each in said[0] if each["name"] not in right and each["name"] not in refused]
    assert wrong == []
    assert [name for name in refused if CANNOT.get(name, "?") not in refused[name]] == [], refused
    assert len({architecture(name) for name in right}) >= 25
