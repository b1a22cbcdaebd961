"""Figures for Prometheus, at ``/metrics``.

    LLM.stats, LLM.request_figures, HttpMeters ──> Readings ──> families ──> text
             (what was counted)                  (one moment)    (prometheus-client)

``vllm`` has vLLM's names, so that its dashboards show this server; ``pipeline`` has what vLLM knows nothing of. Labels
come from the layout, the routes and lists of words here, never from a request: the number of series is bounded,
whatever clients send.
"""
