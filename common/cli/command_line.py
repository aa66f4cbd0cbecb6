"""The command `sparrow`: reads the arguments, runs one command, reports mistakes in one line.

    sparrow COMMAND --config=configs/x.py --config.a.b=VALUE --flag=VALUE

Exit status:
    0    done
    1    a full disk (one line on stderr), a bug (a traceback), or `compare` found a difference
    2    a mistake of the user (one line on stderr)
    130  stopped by Ctrl-C or SIGTERM; the line says whether the same command resumes
    141  the reader of the output went away, as in `sparrow help config | head`
--debug shows the traceback of every error.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from common.cli.command_runs import Arguments
from common.cli.commands import COMMANDS, Command
from common.config import overrides
from common.errors import UserError, is_disk_full, one_line
from common.records import stopping

INTRODUCTION = """\
sparrow: GRPO with rollouts under scheduled block-sparse attention, and a policy that is trained
under dense attention (arXiv 2606.08446).

usage: sparrow COMMAND --config=RECIPE.py [--config.group.setting=VALUE ...] [--flag=VALUE ...]
"""

FIRST_STEPS = """\
first steps:
  sparrow doctor                                              shows what this machine can run
  sparrow warmup --config=configs/demo.py --run=runs/a        trains a small policy from scratch
  sparrow profile --config=configs/demo.py --model=runs/a/model --out=runs/profile.json
  sparrow schedule --config=configs/demo.py --profile=runs/profile.json --extrapolate \\
      --out=runs/schedule.json
  sparrow train --config=configs/demo.py --model=runs/a/model --run=runs/b \\
      --config.rollout.schedule=runs/schedule.json
  sparrow report runs/b                                       writes runs/b/report.html

`sparrow help COMMAND` explains a command, `sparrow help config` lists every setting.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (console script `sparrow`)."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    status = _run([a for a in words if a != "--debug"], debug)
    if argv is None and status in (1, stopping.STATUS):
        # Leave at once: threads of libraries would print more about the same stop.
        sys.stdout.flush()
        os._exit(status)
    return status


def _run(argv: list[str], debug: bool) -> int:
    stopping.install()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a path may have bytes that are not UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        _dispatch(argv)
        sys.stdout.flush()
    except KeyboardInterrupt:
        if debug:
            raise
        print(f"sparrow: stopped{_resumes(argv)}", file=sys.stderr)
        return stopping.STATUS
    except BrokenPipeError:  # `sparrow help config | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        return _say(error, argv, debug)
    return 0


def _say(error: Exception, argv: list[str], debug: bool) -> int:
    """Print the one line of a mistake or a full disk, return its status; a bug is raised again."""
    if debug:
        raise error
    if is_disk_full(error):
        where = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
        hint = _resumes(argv) or "; then run the command again"
        print(f"sparrow: {where}no space left on device; free some{hint}", file=sys.stderr)
        return 1
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        name = Path(str(error.filename)).name
        print(f"sparrow: {name[:40]}...: the file name has {len(name)} characters, too many for "
              "this file system; choose a shorter one", file=sys.stderr)  # fmt: skip
        return 2
    if not isinstance(error, UserError):
        raise error
    print(f"sparrow: {one_line(error)}", file=sys.stderr)
    return 2


def _resumes(argv: list[str]) -> str:
    resumes = any(name in COMMANDS and COMMANDS[name].resumes for name in argv[:1])
    return "; the same command resumes" if resumes else ""


def _dispatch(argv: list[str]) -> None:
    if not argv or argv[0] in ("help", "-h", "--help", "-help"):
        return _help(argv[1:])
    command = _find(argv[0])
    if {"--help", "-h", "-help"} & set(argv[1:]):
        return print(help_text(command))
    command.run(parse_arguments(command, argv[1:]))


def _find(name: str) -> Command:
    if name in COMMANDS:
        return COMMANDS[name]
    if name.startswith("-"):
        raise UserError(f"{name}: expected the command before the flags, e.g. sparrow train {name}")
    guess = overrides.nearest(name, list(COMMANDS))
    did = f"did you mean `sparrow {guess}`?" if guess else f"expected one of {', '.join(COMMANDS)}"
    raise UserError(f"{name}: no such command; {did}")


def parse_arguments(command: Command, argv: Sequence[str]) -> Arguments:
    """The Arguments in `argv`, which follow the name of the command.

    Raises UserError for flags and positional arguments that the command does not take or lacks.
    """
    if command.takes_config:
        config_file, changes, argv = overrides.parse(argv)
    else:
        config_file, changes = None, {}
    values = _flag_values(command)
    for name in (word.partition("=")[0] for word in argv if word.startswith("-")):
        if len(name) > 60:  # absl searches for similar names by recursion over the letters
            raise UserError(f"{name[:40]}...: no such flag; `sparrow help {command.name}` lists "
                            "the flags")  # fmt: skip
    try:
        names = values(["sparrow", *argv])[1:]
    except flags.Error as error:
        hint = f"; `sparrow help {command.name}` lists the flags"
        said = one_line(error).replace("FATAL Flags parsing error: ", "")
        if len(said) > 300:  # the value has thousands of digits
            said = f"{said[:120]} ... {said[-120:]}"
        raise UserError(said + hint) from error
    if len(names) < command.min_names:
        raise UserError(f"sparrow {command.name}: expected {command.names}; e.g. {command.example}")
    if names and not command.names:
        raise UserError(f"{names[0]}: not a flag; sparrow {command.name} takes no other arguments")
    given = {name: values[name].value for name in values}
    for flag in command.flags:
        if flag.required and not given[flag.name]:
            raise UserError(
                f"sparrow {command.name}: --{flag.name} is missing ({flag.help}); e.g. "
                f"{command.example}"
            )
    return Arguments(names=names, config_file=config_file, overrides=changes, flags=given)


def _flag_values(command: Command) -> flags.FlagValues:
    define: dict[Any, Any] = {str: flags.DEFINE_string, bool: flags.DEFINE_bool}
    define |= {int: flags.DEFINE_integer, float: flags.DEFINE_float}
    values = flags.FlagValues()
    for flag in command.flags:
        define[flag.kind](flag.name, flag.default, flag.help, flag_values=values)
    return values


def help_text(command: Command) -> str:
    """What `sparrow help COMMAND` prints."""
    usage = f"usage: sparrow {command.name}" + (f" {command.names}" if command.names else "")
    text = textwrap.fill(command.text, 96)
    lines = [command.summary, "", text, "", "example:", f"  {command.example}", "", usage]
    flags_of = [
        (f"--{f.name}", f"{f.help}{' (required)' if f.required else ''}") for f in command.flags
    ]
    if command.takes_config:
        flags_of += [
            ("--config", "recipe file, e.g. configs/demo.py"),
            ("--config.a.b", "one setting of it, e.g. --config.rollout.temperature=0.8"),
        ]
    flags_of.append(("--debug", "show the traceback of every error"))
    for name, text in flags_of:
        first, rest = f"  {name:<14} ", " " * 17
        lines += textwrap.wrap(text, 100, initial_indent=first, subsequent_indent=rest)
    return "\n".join(lines)


def _help(names: list[str]) -> None:
    if not names:
        table = "\n".join(f"  {c.name:<10} {c.summary}" for c in COMMANDS.values())
        print(f"{INTRODUCTION}\ncommands:\n{table}\n\n{FIRST_STEPS}", end="")
    elif names[0] == "config":
        print(overrides.describe(), end="")
    else:
        print(help_text(_find(names[0])))
