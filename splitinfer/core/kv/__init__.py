"""KV as counts and block ids: budgets, formats, the tree of blocks, the prefix cache."""
