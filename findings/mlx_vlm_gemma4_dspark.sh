#!/usr/bin/env bash
# mlx-vlm 0.7.10: `gemma4_dspark`, the DSpark drafter for Gemma 4, drafts nothing with the configuration of published drafters
# (`attention_k_eq_v`, its default): the layers then have no `v_proj`, and the method that it inherits asks each for one
# (AttributeError: 'Gemma4DSparkAttention' object has no attribute 'v_proj').
source "$(dirname "$0")/_python" --no-deps mlx-vlm==0.7.10
"$folder/bin/python" - <<'PYTHON'
import ast, sys
from pathlib import Path

drafters = next(Path(sys.prefix).rglob("mlx_vlm/speculative/drafters"))  # read only: an import would need all of MLX


def classes(file):
    return {node.name: node for node in ast.parse((drafters / file).read_text()).body if isinstance(node, ast.ClassDef)}


def methods(node):
    return {one.name: ast.unparse(one) for one in node.body if isinstance(one, ast.FunctionDef)}


config = ast.unparse(classes("gemma4_dspark/config.py")["Gemma4DsparkConfig"])
own = classes("gemma4_dspark/gemma4_dspark.py")
inherited = methods(classes("qwen3_dflash/dflash.py")["DFlashDraftModel"])
by_default = "attention_k_eq_v: bool = True" in config
lacks = "if not self.use_k_eq_v:\n        self.v_proj =" in methods(own["Gemma4DSparkAttention"])["__init__"]
asks = "layer.self_attn.v_proj" in inherited["_project_context_kv"] and "_project_context_kv" in inherited["_hidden"]
overrides = "_project_context_kv" in methods(own["Gemma4DSparkDraftModel"]) or "_hidden" in methods(own["Gemma4DSparkDraftModel"])
print("expected: every draft asks for projections that the layers have")
print(f"seen:     by default keys are values ({by_default}), so there is no v_proj ({lacks}), which is asked for ({asks})")
sys.exit(not (by_default and lacks and asks and not overrides))
PYTHON
