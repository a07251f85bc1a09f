"""The end of one process of several: a parent of each, which uses no device, says what happened.

A process that is lost leaves the others inside a program that waits for it, and the runtime
aborts them when it notices, with no more than a stack trace.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

LOST = 75  # exit code: a process was lost, start all of them again (EX_TEMPFAIL of sysexits.h)
_PIPE = "FASTGRPO_JAX_SUPERVISOR"  # of a supervised process: where it learns of its parent's end
_PASSED = (signal.SIGINT, signal.SIGTERM)  # signals that the child gets too
_GRACE_S = 10  # for the others to come to the same end


def supervised() -> bool:
    """Say whether a supervisor started this process."""
    return _PIPE in os.environ


def supervise(command: Sequence[str], name: str, timeout_s: int) -> int:
    """Run a command in a process of its own, pass signals on, and explain its end.

    Returns its exit code, or LOST where the runtime or the system ended it.
    """
    read, write = os.pipe()
    env = {**os.environ, _PIPE: str(read)}
    # A session of its own: a terminal's Ctrl-C comes here alone, and is passed on once.
    child = subprocess.Popen(command, env=env, pass_fds=(read,), start_new_session=True)
    os.close(read)
    for number in _PASSED:
        signal.signal(number, lambda n, _: child.send_signal(n))
    code = child.wait()
    os.close(write)
    if -code in _PASSED:  # it came before the child could note it
        return 128 - code
    if code >= 0 and code != LOST:
        return code
    how = (
        f"another process of the run was lost, or one did not come or answer for {timeout_s} s "
        "(hosts.timeout_s)"
    )
    if code == -signal.SIGKILL:
        how = "it was killed (by the system, it may be, for want of memory)"
    print(
        f"error: {name} has ended: {how}. Saved steps are kept; "
        "start all processes again to go on.",
        file=sys.stderr,
        flush=True,
    )
    return LOST


def follow() -> None:
    """End this process when its supervisor is gone, so that none is left behind."""
    if not supervised():
        return
    pipe = int(os.environ.pop(_PIPE))

    def wait() -> None:
        os.read(pipe, 1)  # nothing is ever written: it returns when the other end is closed
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def leave(code: int) -> None:
    """End this process of several: in order where the others end too, else at once.

    The usual way out would wait for them, who may wait for this process inside of a program.
    """
    import jax

    sys.stdout.flush()
    sys.stderr.flush()
    if code != LOST and jax.distributed.is_initialized():
        goodbye = threading.Thread(target=jax.distributed.shutdown, daemon=True)
        goodbye.start()
        goodbye.join(_GRACE_S)
    os._exit(code)
