"""Everything that acts: the loops of coordinator and worker, and what they run.

coordinator     the engine's loop: receive, draft, plan, launch, take; pipeline, group of workers, requests
worker          the loop on the other machines, the handshake on its port, access by keys, the stage that it holds
mailbox         the inbox of both loops
housekeeping    what both loops do besides acting on events
stage           one stage, the same on coordinator and workers: loading, running a plan, sampling, its KV on disk
device          what computes a step, and when it is done
drafts          drafters: an n-gram index, or a small model
links           connects by rdma, or by tcp where that is unavailable; measures links
files           copying weights between machines: both sides

Threads, by the names that a debugger shows:

engine          the loop of a coordinator or a worker; it owns all that is not named below
waiter          waits for the device and sends what is done, where the device computes while Python goes on
transports …    one for each port that listens, and for each link that was opened: receives, and sends heartbeats
masks           which tokens may come (``coordinator.loop``)
acceptor        answers who connects to a worker's port
weights         sends weights to one reader (``files.answering``)

Requests wait for the threads of links as they do for the engine's own, so both are scheduled alike (``system.qos``).
"""

from splitinfer.system.qos import serve_requests
from transports import at_thread_start

at_thread_start(serve_requests)
