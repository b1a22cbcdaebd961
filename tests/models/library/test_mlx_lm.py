"""mlx-lm's model files without its package: nothing heavy is imported, and nothing exists twice."""

import subprocess
import sys
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import mlx_lm.utils

from splitinfer.models.library import mlx_lm as light

HEAVY = {"transformers", "huggingface_hub", "tokenizers"}
NOT_ALONE = {"olmo"}  # it imports a package that is no dependency of mlx-lm


def python(code: str) -> set[str]:
    """Run code in a process of its own; the outermost modules that it has imported."""
    code += "\nimport sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_model_files_come_without_the_package() -> None:
    """Each of them, as ``load_model`` imports it."""
    folder = Path(mlx_lm.utils.__file__).parent / "models"
    names = [info.name for info in iter_modules([str(folder)]) if info.name not in NOT_ALONE]
    assert len(names) > 100
    code = "import importlib, splitinfer.models.library.mlx_lm\n"
    code += f"for name in {names}: importlib.import_module('mlx_lm.models.' + name)\n"
    code += "import os; assert os.environ['TRANSFORMERS_NO_ADVISORY_WARNINGS'], 'or it writes of PyTorch'"
    assert not python(code) & HEAVY


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
