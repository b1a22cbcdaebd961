"""Variables that MLX reads when it opens its device: they are set before, and a user's own values win."""

import json
import os
import subprocess
import sys

import pytest

SHOW = """
import json, os, sys
sys.platform = {platform!r}
import {module}
assert "mlx" not in sys.modules, "MLX could have read them before"
print(json.dumps({{name: value for name, value in os.environ.items() if name.startswith("MLX_MAX")}}))
"""
DEFAULTS = {"MLX_MAX_OPS_PER_BUFFER": "200", "MLX_MAX_MB_PER_BUFFER": "100"}  # of a chip that cannot be told


def variables(platform: str, module: str, **own: str) -> dict[str, str]:
    """Those of a process that has imported the package."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MLX_")}
    out = subprocess.run(
        [sys.executable, "-c", SHOW.format(platform=platform, module=module)],
        env=inherited | own,
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, str] = json.loads(out.stdout)
    return found


@pytest.mark.parametrize("module", ["splitinfer", "splitinfer.__main__"])
def test_command_buffers_are_longer_on_a_mac(module: str):
    assert variables("darwin", module) == DEFAULTS


def test_a_value_that_is_set_stays():
    own = {"MLX_MAX_OPS_PER_BUFFER": "50"}
    assert variables("darwin", "splitinfer", **own) == DEFAULTS | own
