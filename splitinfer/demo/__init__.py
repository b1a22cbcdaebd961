"""The built-in demo models: two small language models of fairy tales and a drafter, shipped with the package.

``TARGET`` is the model that layouts call "demo", ``DRAFT`` the smaller one that they call "demo-draft"; both share one
tokenizer, so the draft can speculate for the target. ``DRAFTER``, "demo-drafter", was trained on the target's hidden
states (EAGLE-3). In a clone, ``scripts/train_demo_model`` makes such models from any folder of text.
"""

from pathlib import Path

TARGET = Path(__file__).parent / "target"
DRAFT = Path(__file__).parent / "draft"
DRAFTER = Path(__file__).parent / "drafter"
DEMO_MODELS = {"demo": TARGET, "demo-draft": DRAFT, "demo-drafter": DRAFTER}
