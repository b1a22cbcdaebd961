"""How a process was started, from the environments that terminals, ssh and launchd give it."""

from splitinfer.system.origin import ProcessOrigin, Start, origin_of

ITERM = ProcessOrigin(Start.PROGRAM, "iTerm")


def test_origins():
    def of(environment: dict[str, str], parent: int = 50, user: int = 501, session: str = "Aqua") -> ProcessOrigin:
        return origin_of(environment, parent=parent, user=user, session=session)

    terminal = {"TERM_PROGRAM": "Apple_Terminal", "XPC_SERVICE_NAME": "0"}
    assert of(terminal) == ProcessOrigin(Start.TERMINAL)
    assert of(terminal, parent=1) == ProcessOrigin(Start.DETACHED)
    assert of(terminal, user=0) == ProcessOrigin(Start.ROOT)
    assert of({"TERM_PROGRAM": "iTerm.app", "XPC_SERVICE_NAME": "application.com.googlecode.iterm2.1.2"}) == ITERM
    assert of({"TERM_PROGRAM": "vscode"}) == ProcessOrigin(Start.PROGRAM, "Visual Studio Code")
    assert of({"SSH_CONNECTION": "10.0.0.1 5 10.0.0.2 22", "XPC_SERVICE_NAME": "0"}) == ProcessOrigin(Start.SSH)
    job = {"XPC_SERVICE_NAME": "io.splitinfer.worker"}
    assert of(job, parent=1) == ProcessOrigin(Start.AGENT, "io.splitinfer.worker")
    assert of(job, parent=1, session="Background").start is Start.AGENT
    assert of(job, parent=1, session="System").start is Start.DAEMON
    assert of(job, parent=1, session="").start is Start.AGENT  # the one that needs permission
    assert of({}) == ProcessOrigin(Start.UNKNOWN)
    assert str(ITERM) == "iTerm"
    assert str(of(job)) == "agent io.splitinfer.worker"
