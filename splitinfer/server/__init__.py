"""`splitinfer serve`: pipelines for clients that speak OpenAI's, Anthropic's or Ollama's API. Above `llm`, below `cli`.

    HTTP     | admission: key, origin, rate                   `gate`, `keys`
             | which model, of several                        `several`
    request  | one API's words -> an `Ask`                    `openai`, `anthropic`, `ollama`
             | an answer, requested and read without waits    `llm.asubmit`
    answer   | its parts -> that API's words                  `openai`, `anthropic`, `ollama`
    HTTP     | a stream that is never silent for long         `stream`

Everything that decides or translates is pure. Only the routes of each API and the HTTP layer know the web framework.
The event loop never waits for MLX: slow work (templates, tokenizing) runs in threads, and the engine's thread wakes the
loop once a step. The engine never waits for a client: a slow reader's tokens wait in its queue.
"""
