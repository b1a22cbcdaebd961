"""Everything that acts: the loops of coordinator and worker, and what they run.

stage_runner   a StepPlan and hidden states in, hidden states or sampled tokens out; same on every stage
sampler        logits to tokens, keyed by position
worker         the loop on the other machines
door           who may come in: hello, welcome, refusal, while the engine is busy
admission      whose keys are let in
pipeline       the coordinator's view of all stages: open, submit, close
crew           the workers of one session: reached, ordered, joined, their links measured
carrying       a link by rdma, or by tcp where that is not to be had
link_probe     echoes: how quick a link is
link_codecs    in which form prompts cross which link
local          workers that the coordinator starts itself
engine         the coordinator's loop: plan, run, learn
requests       a request's text side: detokenising, stop strings, events for whoever reads
"""
