"""Starts what a pipeline needs on other machines, over ssh: `splitinfer up`, `down`, `status`.

    words, a hostfile, the last time ──▶ Host                                        pure    hosts, remembered
    Host ──▶ Looking ──▶ Starting ──▶ Up, or Failed with one sentence                pure    steps, install
       a Request ──▶ a script for /bin/sh ──▶ ssh ──▶ Ended ──▶ what was heard       pure    script, answers, ssh_errors
       OpenSSH's program runs it; all hosts at the same time                         thin    ssh, carry
    on the other machine: `splitinfer on-host` looks, starts or stops                thin    on_host, processes
       what runs there, from a list of processes                                     pure    workers
    what a person reads                                                              pure    words

The workers that are up are measured, the model is cut for them, and what they lack is copied, as for any pipeline
(``placement``, ``store``).

ssh carries the login: nothing here knows a password, and a host key is never accepted without a person. Over it the
public keys of both ends are exchanged, so what is started admits this machine, and this machine knows whom it talks to.
The worker has a session of its own: when ssh ends, or drops, it goes on, and the pipeline's links are not ssh's.

What a machine answers is taken for text of a stranger: bounded, checked field by field, printable before it is shown.
"""
