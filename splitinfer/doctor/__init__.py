"""`splitinfer doctor`: reports what this machine has, whether RDMA over Thunderbolt can work, and how fast links are.

The system's commands are run (``commands``), their output is parsed (``parsing``, pure) and judged (``rdma``, pure).
Links are opened and measured (``links``), with advice on each (``advice``, pure). ``report`` shows the result.
"""
