"""The coordinator's loop: requests, steps, drafts, and recovery after a loss."""
