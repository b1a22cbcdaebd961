"""A command of `splitinfer` that the system keeps running: `splitinfer service`.

    options ──▶ Definition ──▶ the text of one file        pure    definition; launchd, systemd
    install, remove, status ──▶ launchctl, systemctl       thin    actions

A LaunchAgent on macOS and a user unit of systemd on Linux: both belong to the user who installs them, whose keys,
models and stored KV they use, and neither needs root. No key and no token is written into the file.
"""
