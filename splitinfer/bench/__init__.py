"""Measures a layout, beside plain mlx-lm doing the same work in one process.

modes          runs a mode: checks its inputs, measures, draws and prints
speed          one stream, long prompts, and the throughput of many sequences
speculation    drafts in flight
prefix         the prefix cache, in memory and on disk
kv             quantised KV
wire           codecs for hidden states
link           links, beside bare ZeroMQ
server         streams over HTTP, beside the library's
compare        one table for an owner: speed, prompts, kept KV, a killed worker, and whether answers are right
exact          the first token at which other ways to compute the same part
gpu            what only a GPU can show, in parts: ``scripts/on_gpu``
shared         options, the systems that are compared, workloads, child processes, and the arithmetic of measurements

The method. All systems do the same tasks, in turns (A B A B ...), so that other load on the machine falls on all of
them; one computes while the others sleep. Every process has its own processor, where the system can pin. Prompts are
random and new for every trial, so nothing is reused. Each system is warmed up first. Decoding is greedy, decode rates
leave the first token out, and an end token ends nothing.
"""
