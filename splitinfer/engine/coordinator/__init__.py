"""The coordinator: the engine's loop, the pipeline of stages, the group of workers, requests, metrics."""
