"""Imported by grader processes before a deadline begins: reasoning_gym takes seconds to import."""

import reasoning_gym  # noqa: F401

from common.tasks.reasoning import score_entry

__all__ = ["score_entry"]
