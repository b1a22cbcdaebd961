"""Whatever a model's files of configuration say, a model opens, or one sentence says why it does not."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny

from splitinfer.demo import TARGET
from splitinfer.errors import SplitinferError
from splitinfer.llm import LLM

ODD = [None, "x", -1, 0, 1.5, [], {}, True, [1, "x"]]
MORE = ("eos_token_id", "architectures", "text_config", "vision_config", "quantization", "rope_scaling", "layer_types",
        "dflash_config", "eagle_config")  # fmt: skip
ALWAYS = ("eos_token_id", "vocab_size")


def opens(folder: Path, target: Path, file: str, **changes: Any) -> None:
    shutil.copytree(folder, target)
    path = target / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    config = json.loads((folder / "config.json").read_text())
    layout = {"model": str(target), "stages": [{"name": "a", "layers": config["num_hidden_layers"]}]}
    said = ""
    try:
        LLM(layout).close()
    except SplitinferError as error:
        said = str(error)
    shutil.rmtree(target)
    assert "\n" not in said, "one sentence"


@pytest.mark.parametrize("key", ALWAYS)
def test_odd_values_of_the_demos_configuration(key: str, tmp_path: Path):
    for odd in ("x", 1.5, {}, [1, "x"]):
        opens(TARGET, tmp_path / "m", "config.json", **{key: odd})


@pytest.mark.nightly
@pytest.mark.parametrize("odd", ODD, ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "qwen3_next", "deepseek_v3"])
def test_every_value_of_other_architectures(name: str, odd: Any, tmp_path: Path):
    folder = tiny.save(tmp_path / name, name)
    for key in (*json.loads((folder / "config.json").read_text()), *MORE):
        opens(folder, tmp_path / "m", "config.json", **{key: odd})
