"""Enforces the form of answers: which tokens may come next, by llguidance (https://github.com/guidance-ai/llguidance).

    vocabulary    a model's tokens as llguidance needs them
    compiling     a grammar as a matcher, within bounds of time and size
    trial         the process that compiles a stranger's grammar first
    schemas       JSON schemas such that they are enforced wholly
    answer_rules  one answer: reasoning, the grammar, budgets; forced tokens and masks
    whole_words   which of the tokens that a form admits a model would write
    calls, tags   calls of tools in the form of a model's own syntax, and their values between tags

The coordinator alone uses them: it knows every token first.
"""
