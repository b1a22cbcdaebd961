"""Every class that can be halved, by ``shard`` of mlx-lm or mlx-vlm or by inspection: two processes get the tokens of
one, and where mlx-lm has ``shard`` those of its own tensor parallel on the same weights."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from splitinfer.errors import CannotCut
from splitinfer.models.cut.pretended import PretendedRank, alone
from splitinfer.models.folder.checkpoint import open_folder
from splitinfer.models.load.halves import Pair
from splitinfer.models.load.loader import survey
from tests.matrix.compare import save
from tests.matrix.configs import configurations
from tests.matrix.halves import VLM
from tests.matrix.vlm_configs import CONFIGS

SECONDS = 3000.0
HERE = Path(__file__).parent
PLACES = os.pathsep.join(map(str, (HERE, HERE.parent, HERE.parents[1])))
NUM = 12
CANNOT = {
    "muse_spark": "No Metal back-end",
    "prism_hadamard_qwen35": "Hadamard signs",
    "step3p5": "num_kv_heads of self_attn is 1",
    **dict.fromkeys(
        ("bitnet", "llama4", "mamba", "mamba2", "rwkv7", f"{VLM}deepseek_v41", f"{VLM}molmo"), "a rank would still hold"
    ),
}
"""What cannot be halved here, and why: for want of a GPU, of a real checkpoint's numbers, of more heads than a tiny
configuration has; or because too little of its layers can be."""


def both_ranks(folder: Path, num: int, which: list[str], seconds: float) -> list[dict[str, Any]]:
    """What the first rank says of these configurations; both must say the same."""
    for name in which:
        if not name.startswith(VLM):
            (where := folder / name.replace("/", "-")).mkdir()
            save(where, configurations()[name])
    places = list[str]()
    for _ in range(2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            places.append(f"127.0.0.1:{free.getsockname()[1]}")
    (hosts := folder / "hosts.json").write_text(json.dumps([[place] for place in places]))
    both = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.matrix.halves", str(rank), str(hosts), str(folder), str(num), *which],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": PLACES},
        )
        for rank in range(2)
    ]  # fmt: skip
    said = []
    for one in both:
        try:
            out, err = one.communicate(timeout=seconds)
        finally:
            one.kill()
        said.append([json.loads(line) for line in out.splitlines()])
        assert [each["name"] for each in said[-1]] == which, err[-2000:]
    assert said[0] == said[1], "both ranks compute the same"
    return said[0]


def check(said: list[dict[str, Any]]) -> None:
    refused = {each["name"]: each["error"] for each in said if "error" in each}
    assert [name for name in refused if CANNOT.get(name, "?") not in refused[name]] == [], refused
    wrong = [
        each
        for each in said
        if "error" not in each and (each["ours"] != each["whole"] or each.get("plain", each["ours"]) != each["ours"])
    ]
    assert wrong == []


@pytest.mark.parametrize("name", ["gemma4", pytest.param("vlm glm5_next", marks=pytest.mark.nightly)])
def test_tokens_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    check(both_ranks(tmp_path, NUM, [name], 200.0))


def test_a_cut_that_keys_and_values_cross_is_refused(tmp_path: Path) -> None:
    """They would cross whole, and each half has its own."""
    save(tmp_path, configurations()["gemma4"])
    checkpoint = open_folder(tmp_path)
    with alone():
        for part in ((0, 5), (5, 7)):
            with pytest.raises(CannotCut, match="gemma4 cannot be divided over machines there: keys and values cross"):
                survey(checkpoint, *part, "float32", group=Pair(0, PretendedRank(add=lambda x: 2 * x)))
        survey(checkpoint, 0, 7, "float32", group=Pair(0, PretendedRank(add=lambda x: 2 * x)))


@pytest.mark.nightly
def test_tokens_of_every_class(tmp_path: Path) -> None:
    said = both_ranks(tmp_path, NUM, [*configurations(), *(f"{VLM}{name}" for name in CONFIGS)], SECONDS)
    check(said)
