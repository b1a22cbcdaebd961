"""One stage, the same on the coordinator and on every worker: loading it, running plans on it, sampling, its KV on
disk."""
