"""The coordinator's stages: its own, workers on links, workers that it starts itself, and ranks."""
