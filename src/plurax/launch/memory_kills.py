"""How many processes the kernel has killed because this one's cgroup was out of memory.

A process that the kernel kills so ends like any other with SIGKILL; only the counter of its cgroup
says why. Source: the kernel's documentation, cgroup-v2 ("memory.events") and cgroup-v1
("memory.oom_control").
"""

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def memory_kills(root: Path = ROOT, own: Path = Path("/proc/self/cgroup")) -> int:
    """Return the counter `oom_kill` of this process's cgroup; 0 where there is none."""
    return sum(_counter(path) for path in _files(root, own))


def _files(root: Path, own: Path) -> list[Path]:
    """Return the files that have the counter: of cgroup v1, of v2, or of both."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if not kinds:
            base, name = root, "memory.events"
        elif "memory" in kinds.split(","):
            base, name = root / "memory", "memory.oom_control"
        else:
            continue
        # In a container the path is the host's, and the container sees its own cgroup at the root.
        inside = [base / path.strip("/") / name, base / name]
        files += [path for path in inside if path.is_file()][:1]
    return files


def _counter(path: Path) -> int:
    try:
        words = path.read_text().split()
    except OSError:
        return 0
    return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0
