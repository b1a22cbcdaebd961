"""Compares programs and links, for those who choose between them or change them: ``scripts/compare``.

comparison     one table to share: the pipeline, plain mlx-lm, mlx-lm's own ways over several machines, a killed worker,
               kept KV, and whether answers are right (``judge``)
page           that table, and an HTML file with it
peers          mlx-lm in processes of its own, one for each stage or each rank (``mlx_lm_process``)
links          round trips of links, beside bare ZeroMQ
machine        processors and the BLAS, on Linux

What is measured is ``splitinfer bench``'s, and more.
"""
