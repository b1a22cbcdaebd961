"""Carries plans out: the loops of coordinator and worker, and everything that they run.

Threads, by the names that a debugger shows:

engine          the loop of a coordinator or a worker; it owns everything that no other thread below owns
waiter          waits for the device and sends finished steps, if the device computes while Python continues
transports …    one for each listening port and each opened link: receives, and sends heartbeats
masks           computes which tokens the rules of an answer allow (``loop.loop``)
acceptor        answers the peers that connect to a worker's port
search          looks for workers that are left out (``loop.absent``), once one was
weights         sends weights to one reader (``weights.answering``)

Requests wait for the links' threads as they do for the engine's, so both get the same priority (``system.qos``).
"""

from splitinfer.system.qos import serve_requests
from transports import at_thread_start

at_thread_start(serve_requests)
