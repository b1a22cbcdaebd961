#!/usr/bin/env bash
# mlx-vlm 0.7.10: `glm4_moe_lite_mtp`, the drafter made of GLM-4.7-Flash's prediction heads, has a configuration, a splitter
# and a place in the table of drafters, and no model class: what its splitter writes cannot be loaded.
source "$(dirname "$0")/_python" --no-deps mlx-vlm==0.7.10
"$folder/bin/python" - <<'PYTHON'
import ast, re, sys
from pathlib import Path

drafters = next(Path(sys.prefix).rglob("mlx_vlm/speculative/drafters"))  # read only: an import would need all of MLX
names = sorted(set(re.findall(r"drafters\.(\w+)\.split:", (drafters / "mtp_split.py").read_text())))
known = (drafters / "__init__.py").read_text()
assert all(f'"{name}": "mtp"' in known for name in names)


def exported(name):
    tree = ast.parse((drafters / name / "__init__.py").read_text())
    return {alias.asname or alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}


lacking = [name for name in names if "Model" not in exported(name)]
print(f"expected: a class Model in each of {len(names)} packages of drafters\nseen:     none in {lacking}")
sys.exit(lacking != ["glm4_moe_lite_mtp"])
PYTHON
