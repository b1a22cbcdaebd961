"""Loads a stage: what it needs, its model's class, its weights, tables on disk, a trained drafter."""
