"""What launchers say to each other, over the network or within one of them.

Orders go from the supervisor to the hosts, and reports come back:

    {"do": "start", "attempt": 3, "first": 4, ...}    {"is": "progress", "attempt": 3, "saved": 96}
    {"do": "signal", "signal": 15}                    {"is": "stuck", "attempt": 3, "process": 5}
    {"do": "kill", "stuck": false}                    {"is": "exit", "process": 5, "code": 137, ...}
    {"do": "end", "code": 0}                          {"is": "asked", "signal": 15}
"""

from typing import Any

Message = dict[str, Any]
EXIT = ("process", "code", "step", "stuck", "stopped", "memory", "ours")
"""What a report says of a process that has ended: fields of `plurax.launch.outcome.Exit`."""
REPORTS = {
    "exit": {"attempt", *EXIT},
    "progress": {"attempt", "saved"},
    "stuck": {"attempt", "process"},
    "asked": {"signal"},
}
"""What a report says at least; others are not read."""
