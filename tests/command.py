"""Call the command line in this process."""

import pytest

from plurax.cli import dispatch


def run(capsys, *arguments):
    """Return the exit code of `plurax ARGUMENTS`, what it printed, and what it said on stderr."""
    with pytest.raises(SystemExit) as stopped:
        dispatch.main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return stopped.value.code, printed.out, printed.err
