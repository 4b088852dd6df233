"""What launchers say to each other, over the network or within one of them.

Orders go from the supervisor to the hosts, and reports come back:

    {"do": "start", "attempt": 3, "first": 4, ...}    {"is": "progress", "attempt": 3, "saved": 96}
    {"do": "signal", "signal": 15}                    {"is": "stuck", "attempt": 3, "process": 5}
    {"do": "kill", "stuck": false}                    {"is": "exit", "process": 5, "code": 137, ...}
    {"do": "end", "code": 0}                          {"is": "asked", "signal": 15}

What comes over the network is read once `is_order`, `is_report` or `has_form` says that it is what
it should be: another host may have another version of plurax.
"""

from collections.abc import Mapping
from typing import Any

Message = dict[str, Any]
Fields = Mapping[str, tuple[type, ...]]
NoneType = type(None)
EXIT: Fields = {
    "process": (int,),
    "code": (int,),
    "step": (int, NoneType),
    "stuck": (bool,),
    "stopped": (bool,),
    "memory": (bool,),
    "ours": (bool,),
}
"""What a report says of a process that has ended: fields of `plurax.launch.outcome.Exit`."""
REPORTS: Mapping[str, Fields] = {
    "exit": {"attempt": (int,), **EXIT},
    "progress": {"attempt": (int,), "saved": (int,)},
    "stuck": {"attempt": (int,), "process": (int,)},
    "asked": {"signal": (int,)},
}
"""What a report says at least."""
ORDERS: Mapping[str, Fields] = {
    "start": {"attempt": (int,), "processes": (int,), "first": (int,), "coordinator": (str,)},
    "signal": {"signal": (int,)},
    "kill": {"stuck": (bool,)},
    "end": {"code": (int,)},
}
GREETINGS: Mapping[str, Fields] = {
    "hello": {"nonce": (str,)},
    "leader": {"nonce": (str,)},
    "join": {
        "host": (int,),
        "hosts": (int,),
        "processes": (int,),
        "attempt": (int,),
        "launcher": (str,),
    },
}
"""What two launchers say before the first order."""
MAX_PROCESSES = 4096
"""Of a host."""
MAX_NUMBER = 1 << 53


def is_report(message: Message) -> bool:
    """Return whether a message is what a host reports."""
    return _has_kind(message, "is", REPORTS)


def is_order(message: Message) -> bool:
    """Return whether a message is an order to a host."""
    return _has_kind(message, "do", ORDERS)


def has_form(message: Message, greeting: str) -> bool:
    """Return whether a message is a greeting of a kind."""
    if message.get("is") != greeting or not _has(message, GREETINGS[greeting]):
        return False
    return 1 <= message.get("processes", 1) <= MAX_PROCESSES


def _has_kind(message: Message, key: str, kinds: Mapping[str, Fields]) -> bool:
    kind = message.get(key)
    return isinstance(kind, str) and kind in kinds and _has(message, kinds[kind])


def _has(message: Message, fields: Fields) -> bool:
    """Return whether all fields are there, of their types, without absurd numbers."""
    return all(
        type(value := message.get(name, ...)) in types
        and not (type(value) is int and abs(value) > MAX_NUMBER)
        for name, types in fields.items()
    )
