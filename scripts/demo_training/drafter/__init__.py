"""Trains an EAGLE-3 drafter on the hidden states of a trained target.

    training text --sampling, with the target--> its own continuations, and their hidden states --> CACHE
                                                                                                     |
    OUT/drafter <--saving-- weights <--training, drafts further and further from a known hidden state-+

PyTorch computes it, one thread in bfloat16: on an x86 processor its products were over 50 times as fast as MLX's.
"""
