"""The user's mistakes end in one line and exit status 2; bugs end in a traceback."""

from __future__ import annotations

import dis
import errno
from types import TracebackType

OUR_PACKAGES = ("common", "sparrow_jax", "sparrow_torch", "kernels_pallas", "kernels_triton")


class UserError(ValueError):
    """A mistake of the user, in one line: what was given, what is expected, what to change."""


def is_user_error(error: BaseException) -> bool:
    """True for a UserError, and for a ValueError that a `raise` statement of ours made.

    The checks in our packages raise ValueError with a line for the user. A ValueError from inside
    numpy, jax or the interpreter (`int("x")`) was checked by nobody: that is a bug of ours, and its
    traceback is worth more than its message.
    """
    if isinstance(error, UserError):
        return True
    return type(error) is ValueError and _raised_by_us(error.__traceback__)


def is_disk_full(error: BaseException | None) -> bool:
    """True if a disk or quota is full. Orbax says so in the text of a ValueError of its own."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if isinstance(error, BaseExceptionGroup):
            return any(is_disk_full(e) for e in error.exceptions)
        if "No space left on device" in str(error) or "Disk quota exceeded" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def one_line(error: BaseException) -> str:
    """The message with its line breaks folded to spaces."""
    return " ".join(str(error).split())


def _raised_by_us(traceback: TracebackType | None) -> bool:
    if traceback is None:
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    package = traceback.tb_frame.f_globals.get("__name__", "").partition(".")[0]
    instruction = traceback.tb_frame.f_code.co_code[traceback.tb_lasti]
    return package in OUR_PACKAGES and dis.opname[instruction] == "RAISE_VARARGS"
