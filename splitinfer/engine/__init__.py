"""Everything that acts: the loops of coordinator and worker, and what they run.

coordinator     the engine's loop: plan, run, update
    engine          what other threads call, and the thread: open, turn for turn, end
    shared          all that threads have in common
    loop            receives, drafts, plans, launches, learns
    open_requests   the requests that the loop has; requests: their text, and events for their readers
    reopening       after a loss, and for another cut
    drafting        has the drafter make the drafts that the scheduler proposes
    masking         which tokens may come at the places of a step, where requests have grammars
    pipeline        all stages: opens them, launches steps and sends them on, closes them
    worker_group    the workers of one session: connects, loads and joins them, measures their links
    local_workers   workers that the coordinator starts itself
    metrics, trace  counters, gaps and latencies; the steps as a trace file
worker          the loop on the other machines
    handshake       authenticates peers that connect to a worker's port, while its engine is busy
    access          which keys may connect
    holder          the stage that it holds: loaded, kept, given up
housekeeping    what both loops do besides acting on events
stage           one stage, the same on coordinator and workers
    loader          a Load command becomes a stage in memory
    runner          takes a StepPlan and hidden states, returns hidden states or sampled tokens
    checks, commands, launched    what is checked of a plan; what it does besides computing; a step on its way
    prepared        graphs built ahead
    history         a sequence's tokens, for penalties and verdicts
    masking         masks of tokens that may come, as they arrive and on logits
    sampler         logits to tokens, keyed by position
    disk            the stage's blocks of KV on disk
device          what computes a step, and when it is done
    device          MLX's: launches and their tickets
    steps           the steps under way, completed in their order
drafts          drafters: an n-gram index, or a small model
links           connects by rdma, or by tcp where that is unavailable; measures links

Threads, by the names that a debugger shows:

engine          the loop of a coordinator or a worker; it owns all that is not named below
waiter          waits for the device and sends what is done, where the device computes while Python goes on
transports …    one for each port that listens, and for each link that was opened: receives, and sends heartbeats
masks           which tokens may come (``coordinator.masking``)
acceptor        answers who connects to a worker's port
weights         sends weights to one reader (``files.answering``)

Requests wait for the threads of links as they do for the engine's own, so both are scheduled alike (``system.qos``).
"""

from splitinfer.system.qos import serve_requests
from transports import at_thread_start

at_thread_start(serve_requests)
