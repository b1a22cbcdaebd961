"""A command of `splitinfer` that the system keeps running: `splitinfer service`.

What is installed is one file, a pure function of a ``Definition``: which service, which program, with which options.

    options ──▶ Definition ──▶ launchd.plist / systemd.unit ──▶ the file's text        pure, tested as text
    the file's text ──▶ what is installed ──▶ how it differs from what is asked for     pure
    launchctl's, systemctl's output ──▶ State, or one sentence about what is wrong      pure
    install, remove, status ──▶ Manager ──▶ launchctl, systemctl, the file               thin

A LaunchAgent on macOS and a user unit of systemd on Linux: both belong to the user who installs them, whose keys,
models and stored KV they use, and neither needs root. No key and no token is written into the file or the command line;
the keys are where ``splitinfer.keyring`` has them.
"""
