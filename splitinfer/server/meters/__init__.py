"""Figures for Prometheus, at ``/metrics``.

    LLM.stats, LLM.request_figures, HttpMeters ──> Readings ──> families ──> text
             (what was counted)                  (one moment)   (prometheus-client)

Names with ``vllm:`` are vLLM's, so that its dashboards show this server; those with ``splitinfer:`` are what vLLM knows
nothing of. Labels come from the layout, the routes and lists of words here, never from a request: the number of series
is bounded, whatever clients send.
"""
