"""`splitinfer doctor`: what this machine has, whether RDMA over Thunderbolt can work, and how quick the links are.

Commands are asked (``commands``), what they say is read (``reading``, pure) and judged (``rdma``, pure); links are
opened and measured (``links``) and advised on (``advice``, pure); all of it is shown (``report``).
"""
