"""Ollama's API (its docs/api.md and api/types.go, 0.12), for editors and clients that look for Ollama: the same models,
asked and answered in its words. What concerns Ollama's own way to run a model (``num_ctx``, ``keep_alive``) has no
effect, and is named in `X-Splitinfer-Ignored`."""
