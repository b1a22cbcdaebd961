"""mlx-lm's model files without its package: nothing heavy is imported, and nothing exists twice."""

import subprocess
import sys
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import mlx_lm.utils
import pytest

from splitinfer.models import mlx_lm as light

HEAVY = {"transformers", "huggingface_hub", "tokenizers"}
NOT_ALONE = {"muse_spark", "olmo"}  # kernels outside mlx_lm.models; a package that is no dependency of mlx-lm

SAME = """
import sys
generate = sys.modules["mlx_lm.generate"]
for name in ("base", "cache"):
    assert getattr(light, name) is sys.modules[f"mlx_lm.models.{name}"] is getattr(mlx_lm.models, name)
assert mlx_lm.models is sys.modules["mlx_lm.models"]
assert light.apply_top_p is mlx_lm.sample_utils.apply_top_p is sys.modules["mlx_lm.sample_utils"].apply_top_p
assert mlx_lm.generate is generate.generate  # a function and a module have that name
assert mlx_lm.load is mlx_lm.utils.load and mlx_lm.__version__
config = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8,
          "num_attention_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 8}
model, args = mlx_lm.utils._get_classes(config)
assert (model, args) == light.utils._get_classes(config)
caches = generate.make_prompt_cache(model(args.from_dict(config)))
assert [type(each) for each in caches] == [light.KVCache]
"""


def python(code: str) -> set[str]:
    """Run code in a process of its own; the outermost modules that it has imported."""
    code += "\nimport sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.nightly
@pytest.mark.parametrize(
    "imports",
    [
        "import splitinfer.models.mlx_lm as light; from mlx_lm.generate import generate; import mlx_lm",
        "import splitinfer.models.mlx_lm as light; import mlx_lm.models.llama",
        "import mlx_lm.models.cache; import splitinfer.models.mlx_lm as light",
    ],
)
def test_modules_are_the_packages_own_whichever_comes_first(imports: str) -> None:
    python(f"{imports}\n{SAME}")


def test_model_files_come_without_the_package() -> None:
    """Each of them, as ``load_model`` imports it."""
    folder = Path(mlx_lm.utils.__file__).parent / "models"
    names = [info.name for info in iter_modules([str(folder)]) if info.name not in NOT_ALONE]
    assert len(names) > 100
    code = "import importlib, splitinfer.models.mlx_lm\n"
    code += f"for name in {names}: importlib.import_module('mlx_lm.models.' + name)\n"
    assert not python(f"{code}import sys; assert 'mlx_lm' not in sys.modules") & HEAVY


@pytest.mark.nightly
def test_a_model_file_that_needs_the_package_gets_it() -> None:
    code = "import splitinfer.models.mlx_lm as light, sys\n"
    code += "light.utils._get_classes({'model_type': 'muse_spark'})\n"
    python(f"{code}import mlx_lm.models.muse_spark\n{SAME}")


def test_model_types_are_found_as_mlx_lm_finds_them() -> None:
    assert light.utils.MODEL_REMAPPING == mlx_lm.utils.MODEL_REMAPPING
    assert light.utils.MODEL_ARCHITECTURE_REMAPPING == mlx_lm.utils.MODEL_ARCHITECTURE_REMAPPING
    folder = Path(mlx_lm.utils.__file__).parent / "models"
    types = {info.name for info in iter_modules([str(folder)])} | set(mlx_lm.utils.MODEL_REMAPPING)
    configs: list[dict[str, Any]] = [{"model_type": name} for name in sorted(types)]
    for name, architecture in mlx_lm.utils.MODEL_ARCHITECTURE_REMAPPING:
        configs += [{"model_type": name, "architectures": each} for each in ([architecture], architecture, ["X"])]
    found = [_classes(mlx_lm.utils, config) for config in configs]
    assert [_classes(light.utils, config) for config in configs] == found
    assert sum(each is not None for each in found) > 100


def _classes(utils: Any, config: dict[str, Any]) -> object:
    """The model's classes, or ``None`` for what is no model, or ends the process for want of a package."""
    try:
        return utils._get_classes(config)
    except (ValueError, AttributeError, SystemExit):
        return None
