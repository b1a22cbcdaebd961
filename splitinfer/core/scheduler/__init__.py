"""Decides what the stages do next: admission, allocation of KV, micro-batches, policies, what steps cost."""
