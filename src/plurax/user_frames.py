"""Whose mistake an exception is, and where in the user's own files it was made.

A traceback through plurax has dozens of frames of plurax, JAX and Python between the few that the
user wrote. Shown are these; and where the innermost frame of user and plurax is one of plurax, the
mistake is ours, and nothing is left out.

On the command line `describe_error` prints them. In a script the functions of plurax that a user
calls leave them in the traceback (`leave_users_frames`), as JAX leaves out its own frames, and with
JAX's switch for it: `JAX_TRACEBACK_FILTERING=off` shows all.
"""

import os
import sys
import sysconfig
import traceback
import types
import warnings
from pathlib import Path
from typing import Any

from plurax import errors

INSTALLED = frozenset(["site-packages", "dist-packages"])
"""Folders of libraries: there are more of them than Python's own, such as a user's."""

OWN = str(Path(__file__).parent) + os.sep


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of an exception that lie in the user's files, outermost first."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if is_users_file(frame.filename)]


def is_users(error: BaseException) -> bool:
    """Whether the user's code raised it, itself or through a library it called."""
    frames = traceback.extract_tb(error.__traceback__)
    known = [f for f in frames if is_users_file(f.filename) or f.filename.startswith(OWN)]
    if isinstance(error, SyntaxError) and is_users_file(error.filename or ""):
        return True
    return bool(known) and is_users_file(known[-1].filename)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user's code from which plurax was called.

    `stacklevel` of `warnings.warn` counts frames, and how many there are depends on the call.
    """
    caller = sys._getframe(1)
    frame: types.FrameType | None = caller
    while frame is not None and not _is_users_frame(frame):
        frame = frame.f_back
    at = frame or caller  # a thread of plurax
    names, file = at.f_globals, at.f_code.co_filename
    registry = names.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, file, at.f_lineno, names.get("__name__"), registry)


def _is_users_frame(frame: types.FrameType) -> bool:
    """Whether a frame is of a user's file, or of what a user types."""
    file, typed = frame.f_code.co_filename, frame.f_globals.get("__name__") == "__main__"
    return is_users_file(file) or (typed and not file.startswith(OWN))


def leave_users_frames(error: BaseException) -> None:
    """Leave the user's frames alone in the traceback of an error that is a user's."""
    if not _shows_all() and (isinstance(error, errors.PluraxError) or is_users(error)):
        _leave_users(error)


def _shows_all() -> bool:
    jax: Any = sys.modules.get("jax")
    return jax is not None and jax.config.jax_traceback_filtering == "off"


def _leave_users(error: BaseException, seen: frozenset[int] = frozenset()) -> None:
    """Leave out of a traceback, and of those that it is shown with, all frames but the user's."""
    frames, here = [], error.__traceback__
    while here is not None:
        frames.append(here)
        here = here.tb_next
    kept: types.TracebackType | None = None
    for one in reversed(frames):
        if is_users_file(one.tb_frame.f_code.co_filename):
            kept = types.TracebackType(kept, one.tb_frame, one.tb_lasti, one.tb_lineno)
    error.__traceback__ = kept
    _leave_notes(error)
    chained = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    # An error that is raised again may be its own cause.
    if chained is not None and id(chained) not in seen:
        _leave_users(chained, seen | {id(error)})


def _leave_notes(error: BaseException) -> None:
    """Leave out what JAX says of the frames that it left out, where more are left out here."""
    if notes := getattr(error, "__notes__", []):
        error.__notes__ = [note for note in notes if "JAX has removed" not in note]


def describe_error(error: BaseException) -> str:
    """An error as a user should see it: the message, and the lines of their files that led there.

    Of an error of plurax the innermost line is enough, for the message says the rest.
    """
    frames = user_frames(error)
    if isinstance(error, errors.PluraxError):
        where = [f"\n  at {f.filename}:{f.lineno}: {f.line}" for f in frames[-1:]]
        return str(error).rstrip("\n") + "".join(where)
    _leave_notes(error)
    lines = traceback.StackSummary.from_list(frames).format()
    lines += traceback.format_exception_only(error)
    return "".join(lines).rstrip("\n")


def is_users_file(file: str) -> bool:
    """Whether a file is neither of plurax nor of an installed library."""
    if file.startswith(("<", OWN)) or INSTALLED & {*Path(file).parts}:
        return False
    paths = sysconfig.get_paths()
    libraries = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return not any(file.startswith(library + "/") for library in libraries)
