"""What a worker process imports until its layers are loaded."""

import json
import signal

from peers import Peer, hello, load
from processes import Running

from splitinfer.wire.messages import Ready, Welcome

WORKER = """
import os, sys

from splitinfer.__main__ import main
from splitinfer.shutdown import shutdown

def tell(code):
    print("imported", *sys.modules, flush=True)
    os._exit(code)

shutdown._leave = tell
main()
"""
NOT_NEEDED = {"asyncio", "huggingface_hub", "jinja2", "prompt_toolkit", "rich", "tokenizers", "transformers", "yaml"}


def test_a_loaded_worker_has_no_tokenizers_and_no_client_of_the_hub() -> None:
    with Running("worker", "--child", "--name", "back", "--kv-dir", "none", code=WORKER) as running:
        address = json.loads(running.prints(r"\{.*\}")[0])["address"]
        with Peer(address) as peer:
            assert isinstance(peer.say(hello()).hear(), Welcome)
            assert isinstance(peer.say(load()).hear(), Ready)
        running.signal(signal.SIGTERM)
        modules = set(running.prints(r"imported .*\n")[0].split())
    assert "mlx_lm.models.llama" in modules
    assert not modules & NOT_NEEDED
