"""Everything that acts: the loops of coordinator and worker, and what they run.

Threads, by the names that a debugger shows:

engine          the loop of a coordinator or a worker; it owns all that is not named below
waiter          waits for the device and sends what is done, where the device computes while Python goes on
transports …    one for each port that listens, and for each link that was opened: receives, and sends heartbeats
masks           which tokens may come (``loop.loop``)
acceptor        answers who connects to a worker's port
weights         sends weights to one reader (``weights.answering``)

Requests wait for the threads of links as they do for the engine's own, so both are scheduled alike (``system.qos``).
"""

from splitinfer.system.qos import serve_requests
from transports import at_thread_start

at_thread_start(serve_requests)
