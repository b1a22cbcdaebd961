"""Figures for Prometheus, at ``/metrics``.

    LLM.stats, LLM.request_figures, HttpMeters ──> Readings ──> families ──> text
             (counters)                        (one moment)   (prometheus-client)

Names with ``vllm:`` are vLLM's, so its dashboards show this server. Names with ``splitinfer:`` have no counterpart in
vLLM. Labels come from the layout, the routes and lists of words here, never from a request, so the number of series is
bounded whatever clients send.
"""
