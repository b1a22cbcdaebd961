#!/usr/bin/env bash
# litellm 1.110.2: `ollama_chat/` and `ollama/` send their JSON without a Content-Type, so that a server which takes only
# declared JSON answers each request with 415. The provider `openai/` of the same version declares it.
source "$(dirname "$0")/_python" litellm==1.110.2
LITELLM_LOCAL_MODEL_COST_MAP=True "$folder/bin/python" - <<'PYTHON'
import contextlib, sys, threading
from http.server import BaseHTTPRequestHandler, HTTPServer

seen = {}


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        seen[self.path] = self.headers.get("Content-Type")
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(503)
        self.end_headers()

    do_GET = do_POST
    def log_message(self, *_): pass


server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
at = f"http://127.0.0.1:{server.server_port}"
import litellm

litellm.suppress_debug_info = True
for model, base in (("ollama_chat/m", at), ("ollama/m", at), ("openai/m", f"{at}/v1")):
    with contextlib.suppress(Exception):  # the server has no answer
        litellm.completion(model=model, api_base=base, api_key="k", messages=[{"role": "user", "content": "hi"}], num_retries=0)
seen = {path: kind for path, kind in seen.items() if path != "/api/show"}
print(f"expected: application/json for all of them\nseen:     {seen}")
sys.exit(seen != {"/api/chat": None, "/api/generate": None, "/v1/chat/completions": "application/json"})
PYTHON
