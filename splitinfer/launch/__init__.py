"""Starts workers for a pipeline on other machines, over ssh: `splitinfer up`, `down`, `status`.

    words, a hostfile, the last `up` ──▶ Host                                        pure    hosts
    show, start ──▶ a worker waits there, or one sentence                            thin    steps
       `splitinfer worker --detach --json` there, at any place of the program        thin    ssh
       one line of JSON back                                                         pure    answer
    on the other machine: workers in the background, shown, started, stopped         thin    background, processes
    this machine, and the line that installs its version elsewhere                   thin    own
    two machines without ssh: `splitinfer init`                                      thin    pairing

ssh does the login: nothing here knows a password, and a host key is never accepted without a person. Over ssh both ends
exchange their public keys, so the started worker admits this machine, and this machine recognises the worker. The
worker has a session of its own, which outlives ssh's. A machine's answer is a stranger's text: bounded, checked field
by field, and made printable.
"""
