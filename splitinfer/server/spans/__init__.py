"""Traces for OpenTelemetry: one span for each request that was answered, with its phases.

    Answer, Arrival ──> RequestSpan ──> collector
                 (pure)         (``otlp``, which needs opentelemetry-sdk)

A span says how long, how much and how it ended: nothing of a prompt, an answer, a key or an address.
"""
