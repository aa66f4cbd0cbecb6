"""The user's mistakes end in one line and exit status 2; bugs end in a traceback."""

from __future__ import annotations

import errno


class UserError(ValueError):
    """A mistake of the user, in one line: what was expected, what was given, what to change.

    Raised wherever input is read: flags, configurations, files, data rows, models, and devices or
    packages that are missing. Checks of what our own code passes raise ValueError: when one of
    them fails, that is a bug, and the traceback is worth more than the message.
    """


def is_disk_full(error: BaseException | None) -> bool:
    """True if `error`, or an error that led to it, says that a disk or a quota is full.

    The text of each error is searched too, because Orbax reports a full disk as a ValueError.
    """
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
