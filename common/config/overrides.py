"""Recipe files and `--config.a.b=v`: from the command line to a validated Config, and to JSON.

    file, overrides, rest = parse(["--config=configs/demo.py", "--config.rollout.temperature=0.8"])
    config = apply(load(file), overrides)

Values are typed by the annotations of the dataclasses beside this file:

    int, float, str      --config.num_steps=40
    bool                 --config.model.qk_norm=false          (true false yes no on off 1 0)
    bool or auto         --config.grpo.normalize_std=auto      (null in config.json)
    tuple of numbers     --config.mismatch.budgets=4,8,16      (or "(4, 8, 16)")
    dict                 --config.task.args='{"min_entries": 24}'
    one key of a dict    --config.task.args.min_entries=24     (the other keys stay)

Every mistake raises UserError, one line that says what to change.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import json
import sys
import traceback
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.config import Config
from common.errors import UserError, one_line

_FLAG = "--config"
_WORDS = {"true": True, "yes": True, "on": True, "1": True}
_WORDS |= {"false": False, "no": False, "off": False, "0": False}
_RECIPE_ERRORS = (
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    SyntaxError,
    TypeError,
    ValueError,
)


def parse(argv: Sequence[str]) -> tuple[str | None, dict[str, str], list[str]]:
    """Split arguments into (recipe file or None, {"a.b": "text"}, all other arguments).

    `--config=x` and `--config x` mean the same; if a key is given twice, the last value counts.
    """
    config_file: str | None = None
    overrides: dict[str, str] = {}
    rest: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name != _FLAG and not name.startswith(_FLAG + "."):
            rest.append(argument)
            continue
        if not equals:
            value = next(arguments, "--")
            if value.startswith("--"):
                raise UserError(f"{name}: expected a value, as in {name}=VALUE")
        if name == _FLAG:
            config_file = value
        else:
            overrides[name[len(_FLAG) + 1 :]] = value
    return config_file, overrides, rest


def load(path: str | Path) -> Config:
    """Run a recipe file and return the Config that its `get_config()` makes."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"--config={path}: no such file{_nearest_recipe(path)}")
    module = types.ModuleType("sparrow_recipe")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses in a recipe look themselves up there
    try:
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), module.__dict__)
        get_config = getattr(module, "get_config", None)
        config = get_config() if callable(get_config) else None
    except _RECIPE_ERRORS as error:
        line = _line_in(path, error)
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        message = error.msg if isinstance(error, SyntaxError) else one_line(error)
        raise UserError(f"{path}:{line}: {kind}{message}") from error
    if not callable(get_config):
        raise UserError(
            f"--config={path}: defines no function get_config(); add one that returns a Config"
        )
    if not isinstance(config, Config):
        raise UserError(
            f"--config={path}: get_config() returned {type(config).__name__}: expected Config"
        )
    return config


def apply(config: Config, overrides: Mapping[str, str]) -> Config:
    """A new, validated Config with the overrides, e.g. {"rollout.page_size": "8"}, applied."""
    groups: dict[str, dict[str, Any]] = {}
    for key, text in overrides.items():
        group, name, rest = _locate(config, key)
        owner = getattr(config, group) if group else config
        changes = groups.setdefault(group, {})
        hint = _hints(type(owner))[name]
        if rest:
            merged = dict(changes.get(name, getattr(owner, name)))
            _set_inside(merged, rest, _literal(text), key)
            changes[name] = merged
        else:
            changes[name] = _from_text(text, hint, key)
    top = groups.pop("", {})
    for group, changes in groups.items():
        top[group] = _replace(getattr(config, group), changes, f"config.{group}: ")
    return _replace(config, top, "config: ")


def to_dict(config: Config) -> dict[str, Any]:
    """The configuration in JSON types (tuples become lists); `from_dict` is the inverse."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_dict(values: Mapping[str, Any], *, source: str = "config.json") -> Config:
    """The Config that `to_dict` turned into `values`.

    A missing key keeps its default, because the file may be older than the setting. Raises
    UserError, naming `source`, for an unknown key and for a value that a setting cannot have.
    """
    return _section(Config, values, "", source)


def differences(old: Config, new: Config) -> list[str]:
    """Dotted names of the settings that differ between two configurations."""
    missing = object()
    a, b = dict(_flatten(to_dict(old))), dict(_flatten(to_dict(new)))
    return [k for k in dict.fromkeys([*a, *b]) if a.get(k, missing) != b.get(k, missing)]


def describe() -> str:
    """Every setting with its type, default and meaning: the text of `sparrow help config`."""
    lines: list[str] = []
    for cls, prefix in _sections():
        lines += ["", f"{(cls.__doc__ or '').strip().splitlines()[0]}"]
        for f in dataclasses.fields(cls):
            if "doc" not in f.metadata:
                continue
            hint = _hints(cls)[f.name]
            default = {} if typing.get_origin(hint) is dict else f.default
            kind = _type_name(hint)
            lines.append(f"  --config.{prefix}{f.name}={_show(default)}    {kind}")
            choices = ", ".join(map(str, f.metadata.get("choices") or ()))
            lines.append(f"      {f.metadata['doc']}{'; one of ' if choices else ''}{choices}")
            if f.metadata.get("within"):
                lines[-1] += f"; in {f.metadata['within']}"
    return "\n".join(lines[1:]) + "\n"


def nearest(name: str, names: Sequence[str]) -> str | None:
    """The most similar of `names`, or None if nothing is similar."""
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=0.55)), None)


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _sections() -> list[tuple[type, str]]:
    """(class, prefix of its keys) of Config, "", and of its groups, "model.", "task.", ..."""
    groups = [(f.name, _hints(Config)[f.name]) for f in dataclasses.fields(Config)]
    return [(Config, "")] + [(h, f"{n}.") for n, h in groups if dataclasses.is_dataclass(h)]


def _all_keys() -> list[str]:
    return [
        p + f.name for cls, p in _sections() for f in dataclasses.fields(cls) if "doc" in f.metadata
    ]


def _locate(config: Config, key: str) -> tuple[str, str, list[str]]:
    """("rollout", "page_size", []) of "rollout.page_size"; the list is a path inside a dict."""
    parts = key.split(".")
    group = parts[0] if dataclasses.is_dataclass(getattr(config, parts[0], None)) else ""
    names = parts[1:] if group else parts
    owner = getattr(config, group) if group else config
    if group and not names:
        example = f"{_FLAG}.{group}.{dataclasses.fields(owner)[0].name}"
        raise UserError(
            f"{_FLAG}.{key}: is a group of settings; set one of them, e.g. {example}=..."
        )
    if names[0] not in {f.name for f in dataclasses.fields(owner)}:
        raise UserError(f"{_FLAG}.{key}: no such setting; {_suggestion(key)}")
    rest = names[1:]
    if rest and (typing.get_origin(_hints(type(owner))[names[0]]) is not dict or "" in rest):
        whole = ".".join(parts[: len(parts) - len(rest)])
        raise UserError(f"{_FLAG}.{key}: no such setting; did you mean {_FLAG}.{whole}?")
    return group, names[0], rest


def _suggestion(key: str) -> str:
    keys = _all_keys()
    leaf = key.rpartition(".")[2]
    same_leaf = next((k for k in keys if k.rpartition(".")[2] == leaf), None)
    by_leaf = nearest(leaf, [k.rpartition(".")[2] for k in keys])
    guess = same_leaf or nearest(key, keys)
    guess = guess or next((k for k in keys if k.rpartition(".")[2] == by_leaf), None)
    help_line = "`sparrow help config` lists them all"
    return f"did you mean {_FLAG}.{guess}? ({help_line})" if guess else help_line


def _set_inside(values: dict[str, Any], path: Sequence[str], value: Any, key: str) -> None:
    """Set values[path[0]][path[1]]... = value; the dicts on the way are copied."""
    for part in path[:-1]:
        inner = values.get(part, {})
        if not isinstance(inner, dict):
            raise UserError(f"{_FLAG}.{key}: {part!r} is {inner!r}, not a dict; set it as a whole")
        values[part] = values = dict(inner)
    values[path[-1]] = value


def _literal(text: str) -> Any:
    """The text read as JSON, else as a Python literal, else the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # not JSON, thousands of digits, or too many brackets
        pass
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text


def _from_text(text: str, hint: Any, key: str) -> Any:
    where = f"{_FLAG}.{key}={text}"
    if hint is str:
        return text
    if hint in (bool, bool | None):
        auto = {} if hint is bool else {"auto": None}
        value: Any = (_WORDS | auto).get(text.lower(), text)
    elif hint in (int, float):
        try:
            value = hint(text)
        except ValueError:
            value = text
    else:
        value = _literal(text)
        if typing.get_origin(hint) is tuple and not isinstance(value, list | tuple | str):
            value = (value,)
    return _typed(value, hint, where)


def _typed(value: Any, hint: Any, where: str) -> Any:
    """`value` in the type of the annotation (int to float, list to tuple), else UserError."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and isinstance(value, list | tuple):
        if arguments[-1] is Ellipsis:
            return tuple(_typed(v, arguments[0], where) for v in value)
        if len(value) == len(arguments):
            return tuple(_typed(v, h, where) for v, h in zip(value, arguments, strict=True))
    elif origin is dict and isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return dict(value)
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if abs(value) <= sys.float_info.max:  # no NaN, no integer too large for a float
            return float(value)
    elif hint == bool | None and (value is None or type(value) is bool):
        return value
    elif origin is None and type(value) is hint:
        return value
    raise UserError(f"{where}: expected {_type_name(hint)}, got {_show(value)}")


def _type_name(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is dict:
        return "a dict, e.g. '{\"key\": 1}'"
    if origin is tuple and typing.get_origin(arguments[0]) is tuple:
        return "a tuple of tuples of numbers, e.g. '((1, 2), (3, 4))'"
    if origin is tuple:
        count = "" if arguments[-1] is Ellipsis else f"{len(arguments)} "
        whole = "whole numbers" if arguments[0] is int else "numbers"
        return f"{count}{whole} with commas between"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return names.get(hint, "true, false or auto")


def _show(value: Any) -> str:
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple) and not any(isinstance(v, tuple) for v in value):
        return ",".join(map(str, value))
    return str(value) if isinstance(value, str | int | float) else repr(value).replace(" ", "")


def _replace(owner: Any, changes: dict[str, Any], prefix: str) -> Any:
    try:
        return dataclasses.replace(owner, **changes)
    except UserError as error:
        raise UserError(f"{prefix}{error}") from error


def _section(cls: type, values: Any, prefix: str, source: str) -> Any:
    if not isinstance(values, Mapping):
        raise UserError(f"{source}: {prefix or 'the file'}: expected a JSON object, got {values!r}")
    hints, arguments = _hints(cls), {}
    for name, value in values.items():
        if name not in hints:
            guess = nearest(name, list(hints))
            hint = f"; did you mean {prefix}{guess}?" if guess else ""
            raise UserError(f"{source}: {prefix}{name}: no such setting{hint}")
        if dataclasses.is_dataclass(hints[name]):
            arguments[name] = _section(hints[name], value, f"{prefix}{name}.", source)
        else:
            arguments[name] = _typed(value, hints[name], f"{source}: {prefix}{name}")
    try:
        return cls(**arguments)
    except UserError as error:
        raise UserError(f"{source}: {prefix}{error}") from error


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _nearest_recipe(path: Path) -> str:
    recipes = {p.stem: p for p in sorted(Path("configs").glob("*.py")) if p.stem != "__init__"}
    guess = nearest(path.stem, list(recipes)) or ("demo" if "demo" in recipes else None)
    return f"; did you mean --config={recipes[guess]}?" if guess else ""


def _line_in(path: Path, error: BaseException) -> int:
    """The line of the recipe that was running when the error was raised."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno or 0
    frames = traceback.extract_tb(error.__traceback__)
    return next((f.lineno or 0 for f in reversed(frames) if f.filename == str(path)), 0)
