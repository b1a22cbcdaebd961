"""The page that `serve` shows in a browser: a chat, and the pipeline while it works.

    browser    ES modules as they lie in `site/`, and libraries in `vendor/`; nothing is built       `routes`
    chat       the page is a client of `/v1/chat/completions` like any other; conversations stay in the browser
    pipeline   figures twice a second while somebody looks, by one route                             `feed`
                 what the engine counted -> the last seconds' figures                                `figures`
                 its last steps          -> coloured spans on one clock                              `timeline`
                 figures                 -> sentences: why a stage idles, and what would help        `words`

The figures are sums over all requests. In `site/`, what decides is in modules without a document (`state/`), which
node's test runner tests; `io/` talks to the server and to the browser's store, `view/` draws.
"""
