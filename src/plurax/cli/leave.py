"""End the process of a command that stopped."""

import os
import sys
import threading
from typing import NoReturn

from plurax import errors
from plurax.exit_codes import ExitCode


def exit_code(error: errors.PluraxError) -> ExitCode:
    """Return the exit code of a command that an error ended."""
    if isinstance(error, errors.ReplicaError):
        return ExitCode.CORRUPT
    permanent = isinstance(error, errors.RunStoppedError)
    return ExitCode.PERMANENT if permanent else ExitCode.MISTAKE


def leave(status: int) -> NoReturn:
    """Exit, even where a thread still waits for a disk that does not answer."""
    others = [one for one in threading.enumerate() if one is not threading.main_thread()]
    if any(not one.daemon for one in others):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    raise SystemExit(status)
