"""The REPL: a conversation in a terminal, or over the lines of a pipe.

commands        parses what is typed                        pure
conversation    turns, which of them to drop, their JSON    pure
formatting      status line and tables                      pure
markdown        wraps and draws answers while they stream; lists: rich's, with dots behind numbers
chat            carries out inputs on an LLM until the user leaves
screens         input and output: a terminal, or plain lines
"""
