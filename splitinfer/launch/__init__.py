"""Starts what a pipeline needs on other machines, over ssh: `splitinfer up`, `down`, `status`.

    words, a hostfile, the last time ──▶ Host                                        pure    hosts
    look, start ──▶ a worker waits there, or one sentence                            thin    steps
       a Request ──▶ a script for /bin/sh ──▶ ssh ──▶ what was heard                 pure    script, answers
       OpenSSH's program runs it; what its failures mean                             thin    ssh
    on the other machine: `splitinfer on-host` looks, starts or stops                thin    on_host, processes
    this machine; where `up` remembers things                                        thin    own, place

The workers that are up are measured, the model is cut for them, and what they lack is copied, as for any pipeline
(``placement``, ``store``).

ssh carries the login: nothing here knows a password, and a host key is never accepted without a person. Over it the
public keys of both ends are exchanged, so what is started admits this machine, and this machine knows whom it talks to.
The worker has a session of its own: when ssh ends, or drops, it goes on, and the pipeline's links are not ssh's.

What a machine answers is a stranger's text: it is bounded, checked field by field, and made printable before it is
shown.
"""
