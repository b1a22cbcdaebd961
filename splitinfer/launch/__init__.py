"""Starts what a pipeline needs on other machines, over ssh: `splitinfer up`, `down`, `status`.

    words, a hostfile, the last time ──▶ Host                                        pure    hosts
    show, start ──▶ a worker waits there, or one sentence                            thin    steps
       `splitinfer worker --detach --json` there, wherever the program is            thin    ssh
       one line of JSON back                                                         pure    answer
    on the other machine: workers in the background, shown, started, stopped         thin    background, processes
    this machine, and the line that installs its version elsewhere                   thin    own
    two machines without ssh: `splitinfer init`                                      thin    pairing

ssh carries the login: nothing here knows a password, and a host key is never accepted without a person. Over it the
public keys of both ends are exchanged, so what is started admits this machine, and this machine knows whom it talks to.
The worker has a session of its own, which outlives ssh's. What a machine answers is a stranger's text: bounded, checked
field by field, and made printable.
"""
