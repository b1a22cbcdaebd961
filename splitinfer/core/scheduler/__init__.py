"""Decides what the stages do next: admission, KV allocation, micro-batches, policies, the cost model of steps."""
