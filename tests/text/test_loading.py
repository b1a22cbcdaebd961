"""A tokenizer is loaded with the modules of its own class, and all of transformers is there for what needs more."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

import splitinfer.demo
from splitinfer.text.loading import _PLACES

LOADING = """
import sys, types
from pathlib import Path
from splitinfer.text.tokenizer import Tokenizer

tokenizer = Tokenizer.from_folder(Path(sys.argv[1]))
light = sys.modules["transformers"]
assert type(light) is types.ModuleType and "transformers.models.auto.modeling_auto" not in sys.modules
own = type(tokenizer._wrapper._tokenizer)
import transformers
assert issubclass(own, transformers.PreTrainedTokenizerBase)
assert sys.modules["transformers"] is not light and light.AutoProcessor is sys.modules["transformers"].AutoProcessor
"""


def test_a_tokenizer_is_loaded_without_the_list_of_all_models() -> None:
    folder = Path(splitinfer.demo.__file__).parent / "target"
    subprocess.run([sys.executable, "-c", LOADING, str(folder)], check=True, timeout=100)


@pytest.mark.parametrize("name", _PLACES)
def test_names_of_transformers_are_where_its_tokenizers_look_for_them(name: str) -> None:
    assert getattr(transformers, "AutoProcessor", None) is not None  # all of transformers, not its stand-in
    place = importlib.import_module(f"transformers.{_PLACES[name]}")
    assert getattr(sys.modules["transformers"], name) is getattr(place, name)
