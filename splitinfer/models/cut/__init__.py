"""Cuts a model: its structure, the layers of one stage, a half of each layer, rows of pictures."""
