"""What a command of `sparrow` is: its flags, and a parsed command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common.config import Config, overrides
from common.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag of a command; an empty default counts as not given."""

    name: str
    help: str
    kind: Callable[[str], Any] = str
    default: Any = None
    required: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """A parsed command line. names: what is no flag; flags: value (or default) of every flag."""

    names: Sequence[str]
    config_file: str | None
    overrides: Mapping[str, str]
    flags: Mapping[str, Any]

    def config(
        self, extra: Mapping[str, str] | None = None, *, default: Config | None = None
    ) -> Config:
        """Recipe (without one, `default`), then overrides, then `extra`, validated."""
        if self.config_file is None and default is not None:
            return overrides.apply(default, {**self.overrides, **(extra or {})})
        if self.config_file is None:
            raise UserError("--config is missing; name a recipe, e.g. --config=configs/demo.py")
        return overrides.apply(
            overrides.load(self.config_file), {**self.overrides, **(extra or {})}
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """A row of the table. names: how the help shows positional arguments, "" if there are none.

    resumes: the command goes on where it was stopped.
    """

    name: str
    summary: str
    text: str
    example: str
    run: Callable[[Arguments], None]
    flags: tuple[Flag, ...] = ()
    takes_config: bool = True
    names: str = ""
    min_names: int = 0
    resumes: bool = False
