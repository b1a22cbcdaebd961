"""``splitinfer bench --mode speculation``: drafts in flight, beside none and beside their limits."""
