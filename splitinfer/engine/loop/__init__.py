"""The coordinator's loop: requests, steps, drafts, and going on after a loss."""
