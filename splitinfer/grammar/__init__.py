"""Enforces the form of answers: which tokens may come next, by llguidance (https://github.com/guidance-ai/llguidance).

    vocabulary    a model's tokens as llguidance needs them
    compiling     a grammar as a matcher, within bounds of time and size
    schemas       JSON schemas such that they are enforced wholly
    rules         one answer: reasoning, the grammar, budgets; forced tokens and masks
    masks         masks on their way to the last stage, as differences
    calls         calls of tools in the form of a model's own syntax

All but ``masks`` are used on the coordinator alone, which knows every token first.
"""
