"""How much memory a piece of work takes, as the operating system counts it. Linux only.

Standard library only: the peers' Python runs it too.
"""

import ctypes
import gc
import re
import time
from collections.abc import Callable
from pathlib import Path

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
SMALL, LARGE = 2**16, 2**25
SETTLE = 0.2


def growth(work: Callable[[], object]) -> int | None:
    """By how many bytes the process grows at most while it works; None where nothing tells.

    The work is done twice, and the second time counts: what is set up once is not among it. What it
    returns is kept until it is done.
    """
    libc = ctypes.CDLL(None)
    if not (RESET.exists() and hasattr(libc, "mallopt")):
        return None
    # Of what is freed, the allocator keeps large pieces for later; now it shall not.
    libc.mallopt(MMAP_THRESHOLD, SMALL)
    libc.mallopt(TRIM_THRESHOLD, SMALL)
    work()
    gc.collect()
    time.sleep(SETTLE)  # devices free what they used a little after they are done
    libc.malloc_trim(0)
    RESET.write_text("5")  # the peak starts anew
    before = _read("VmRSS")
    kept = work()
    peak = _read("VmHWM")
    del kept
    # Where it gets by itself in a process that frees large pieces.
    libc.mallopt(MMAP_THRESHOLD, LARGE)
    libc.mallopt(TRIM_THRESHOLD, 2 * LARGE)
    return peak - before


def _read(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    assert found is not None, field
    return 1024 * int(found[1])
