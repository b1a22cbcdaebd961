"""The built-in demo pair: two small language models of fairy tales, shipped with the package.

``TARGET`` is the model that layouts call "demo", ``DRAFT`` the smaller one that they call "demo-draft"; both share one
tokenizer, so the draft can speculate for the target. In a clone, ``scripts/train_demo_model`` makes such a pair from
any folder of text.
"""

from pathlib import Path

TARGET = Path(__file__).parent / "target"
DRAFT = Path(__file__).parent / "draft"
DEMO_MODELS = {"demo": TARGET, "demo-draft": DRAFT}
