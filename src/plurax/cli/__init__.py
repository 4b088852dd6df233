"""The command line."""

import importlib
import signal
import sys
import threading
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the command `plurax`. Exits with 2 after a user's error."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # A launcher starts in a tenth of a second without JAX, and is small beside its processes.
    module = "launch_command" if arguments[:1] == ["launch"] else "dispatch"
    handler = signal.getsignal(signal.SIGINT)
    in_main = threading.current_thread() is threading.main_thread()
    if ends_quietly := in_main and handler is signal.default_int_handler:
        # Ctrl-C while JAX is imported ends the process: there is nothing to save, or to show.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    command = importlib.import_module(f"plurax.cli.{module}")
    if ends_quietly:
        signal.signal(signal.SIGINT, handler)
    command.main(arguments)
