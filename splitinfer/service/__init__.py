"""Lets the system keep a command of `splitinfer` running: `splitinfer service`.

    options ──▶ Definition ──▶ the text of one file        pure    definition; launchd, systemd
    install, remove, status ──▶ launchctl, systemctl       thin    actions

It is a LaunchAgent on macOS and a user unit of systemd on Linux. Both belong to the user who installs them, use that
user's keys, models and stored KV, and do not need root. No key and no token is written into the file.
"""
