"""The command line: choose a command, run it, say how it failed."""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence

from plurax import __version__, errors
from plurax.cli.commands import COMMANDS, command_named, exit_codes_text, help_text
from plurax.distributed.environment import writes_files
from plurax.distributed.initialize import end_at_once, exit_code, leave
from plurax.exit_codes import ExitCode
from plurax.terminal import printable
from plurax.user_frames import describe_error, is_users


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the command `plurax`. Exits with one of `ExitCode`."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:2] == ["help", "exit-codes"]:
        print(exit_codes_text(), end="")
        raise SystemExit(ExitCode.DONE)
    if arguments[:1] == ["help"] and len(arguments) > 1:
        arguments = [*arguments[1:], "--help"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(help_text(), end="")
        raise SystemExit(ExitCode.DONE)
    if arguments[0] == "--version":
        print(f"plurax {__version__}")
        raise SystemExit(ExitCode.DONE)
    command = command_named(arguments[0])
    if command is None:
        names = [entry.name for entry in COMMANDS]
        print(f"error: {errors.unknown_command(arguments[0], names)}", file=sys.stderr)
        raise SystemExit(ExitCode.MISTAKE)
    try:
        with _quiet_unless_first():
            raise SystemExit(command.load()(arguments[1:]))
    except BrokenPipeError:  # the reader has closed the pipe, as with `| head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(ExitCode.READER_GONE) from None
    except KeyboardInterrupt:
        print("\nSIGINT: stopped before the first step; nothing was trained.", file=sys.stderr)
        raise SystemExit(ExitCode.INTERRUPTED) from None
    except errors.PluraxError as error:
        print(printable(f"error: {describe_error(error)}"), file=sys.stderr)
        leave(exit_code(error))
    except Exception as error:
        code = exit_code(error)
        if code == ExitCode.OUT_OF_MEMORY:
            print(
                printable(f"error: {errors.memory_is_full(str(error) or repr(error))}"),
                file=sys.stderr,
            )
            leave(code)
        if code == ExitCode.PEER_DIED:
            end_at_once(type(error), error, error.__traceback__)
        if not is_users(error):
            raise
        print(
            printable(f"error: {errors.user_code_failed(describe_error(error))}"), file=sys.stderr
        )
        leave(ExitCode.MISTAKE)


@contextlib.contextmanager
def _quiet_unless_first() -> Iterator[None]:
    """Print to nowhere in all processes of a gang but the first; errors go to all their stderr."""
    if writes_files():
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield
