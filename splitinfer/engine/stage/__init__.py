"""One stage, the same on the coordinator and on every worker: loading, running plans, sampling, KV on disk."""
