"""`splitinfer serve`: pipelines for clients that speak OpenAI's, Anthropic's or Ollama's API. Above `llm`, below `cli`.

    HTTP     | admission: who asks, from where, how much    `gate`, `keys`
             | which model, of several                      `several`
    request  | one API's words -> what is wanted            `openai`, `anthropic`, `ollama`
             | an answer, asked for and read without waits  `llm.asubmit`
    answer   | its parts -> that API's words                `openai`, `anthropic`, `ollama`
    HTTP     | a stream that is never silent for long       `stream`

Everything that decides or translates is pure; the web framework is known to the routes of each API and to what carries
HTTP. The event loop never waits for MLX: what takes time (templates, tokenizing) runs in threads, and what the engine's
thread brings wakes the loop once a step. The engine never waits for a client: a slow reader's tokens wait in its queue.
"""
