"""Drafters on the last stage, trained on the target's hidden states: one module for each kind."""
