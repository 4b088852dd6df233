"""Become a program that dies with its launcher: `python child.py LAUNCHER PROGRAM ARGUMENTS`.

A launcher that is killed with SIGKILL can clean nothing up. So the kernel does it: with
PR_SET_PDEATHSIG a process gets a signal when its parent ends. The setting survives `exec` and not
`fork`, so it is set here, between both. Run as a file, this needs nothing of plurax.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def become(launcher: int, program: list[str]) -> None:
    """Replace this process by the program, which gets SIGKILL once `launcher` has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it ended before the setting
        sys.exit(128 + signal.SIGKILL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and `exec` keeps that
    # Who starts a launcher may have blocked or ignored these, as in the background of a shell.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.execvp(program[0], program)


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
