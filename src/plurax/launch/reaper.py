"""Kill process groups whose launcher has ended: `python reaper.py`, which reads its input.

The kernel kills the processes that a launcher started when it dies (`plurax.launch.child`), but not
what those started in turn, such as the workers of a data loader. They are in the group of their
process. A line `+ID` on the standard input adds a group and `-ID` removes one; at the end of the
input, which comes when the launcher ends in whatever way, every group left gets SIGKILL. Run as a
file, this needs nothing of plurax.
"""

import contextlib
import os
import signal
import sys
from typing import TextIO


def reap(lines: TextIO) -> None:
    """Read groups until the input ends, then kill those left."""
    groups = set()
    for line in lines:
        group = int(line[1:])
        if line[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the input's end is what ends it
    reap(sys.stdin)
