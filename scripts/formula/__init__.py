"""Makes a Homebrew formula of a lock: `scripts/make_formula`.

    pylock.toml (PEP 751) ──lock.py──▶ resources ──ruby.py──▶ splitinfer.rb, for a tap

A formula names every source archive by address and digest, so it is made at release time, from a lock that is made
then, and neither is kept in this repository.

How it deals with MLX, whose builds on PyPI are wheels only (`mlx`, `mlx-metal`): homebrew-core has a formula `mlx`,
built from source for Homebrew's own Python, and its `mlx-lm.rb` depends on that one and takes all else as source
archives, in a virtual environment that sees Homebrew's site-packages. This formula does the same; ZeroMQ comes from
Homebrew as in its `jupyterlab.rb`, pydantic as in other formulae. Taps that install wheels do so after Homebrew has
rewritten the load commands of the libraries in a formula, which wheels have no room for (`mlx-manager.rb` of
tumma72/mlx-manager says so). What follows: the version of MLX is Homebrew's, not the lock's, and the machines of one
pipeline must all be installed in the same way. *Assumed*, as no Mac has installed it yet: that everything builds from
source with the tools that are named here; Rust alone will need minutes.
"""
