"""`splitinfer doctor`: reports what this machine has, what is wrong with it, and how fast links are.

The system's commands are run (``commands``), their output is parsed (``parsing``, pure) and judged (``findings``,
pure); what else is needed is looked at (``looking``). Links are opened and measured (``links``), with advice on each
(``advice``, pure). ``report`` shows the result, the worst first.
"""
