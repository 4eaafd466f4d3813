"""Settings: each is declared once, as a field of a frozen dataclass.

A field has a type, a default and a range, by `setting`; its help is in the
docstring of its class. From this come the flag, its help and its check, what a
run's folder records and compares, what a search varies, the warnings of flags
without effect, and `docs/settings.md`.

Defaults and effects depend on words, such as `merged` or `cifar100`, which say
what a run is: its data set, algorithm, engine and the like. A condition lists
words, one of which must hold; of parts between commas, all must.
"""

from collections.abc import Collection, Mapping, Sequence
import dataclasses
import functools
import importlib
import inspect
import math
import os
import signal
import sys
import textwrap
import typing
from typing import Any, NamedTuple

from absl import flags

Words = Collection[str]


class UsageError(ValueError):
  """A setting whose value makes no sense, alone or with the others."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
  """How a setting is read, and what it changes.

  Attributes:
    default: its value where no case holds.
    cases: condition -> default; the last that holds counts.
    only: the condition on which it has an effect.
    kind: `result`, for what changes a run's result; `speed`, which a resumed
      run takes over from its folder; `machine`, which it does not; or `place`,
      which is not recorded.
    matters: the condition on which a `speed` changes the result after all.
    low: the least value.
    high: the greatest.
    each: names of what can have a value each; one value is for all of them.
    most: the greatest number of values.
    distinct: whether no value may come twice.
    search: the range in a search.
    search_each: whether a search has a value for each of `each`, if there are.
    argument: the library's name, as an argument and in `state.hyper`, if it is
      another.
    name: the setting's.
    type: of a value: int, float, str or bool.
    many: whether there can be several values.
    choices: the allowed values.
    help: what it is.
  """

  default: Any = None
  cases: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  only: str = ""
  kind: str = "result"
  matters: str | None = None
  low: float = -math.inf
  high: float = math.inf
  each: tuple[str, ...] = ()
  most: int | None = None
  distinct: bool = False
  search: str = ""
  search_each: bool = True
  argument: str = ""
  name: str = ""
  type: Any = str
  many: bool = False
  choices: tuple[str, ...] = ()
  help: str = ""

  def default_in(self, words: Words) -> Any:
    """The default of a run."""
    found = self.default
    for condition, value in self.cases.items():
      found = value if holds(condition, words) else found
    return self.whole(found)

  def kind_in(self, words: Words) -> str:
    """The kind in a run; `idle` if it has no effect there."""
    if not holds(self.only, words):
      return "idle"
    matters = self.matters is not None and holds(self.matters, words)
    return "result" if matters else self.kind

  def whole(self, value: Any) -> Any:
    """A value as a tuple if there can be several, with one for `each`."""
    if value is None or not self.many:
      return value
    value = tuple(value) if isinstance(value, list | tuple) else (value,)
    return value * len(self.each) if self.each and len(value) == 1 else value

  def read(self, text: str) -> Any:
    """The value that a text, as on the command line, stands for.

    Raises:
      UsageError: naming the setting, the text and what is allowed.

    >>> rate = Setting(name="lr", type=float, low=0, many=True, each=("a", "b"))
    >>> rate.read("0.1"), rate.read("0.1,0")
    ((0.1, 0.1), (0.1, 0.0))
    >>> Setting(name="workdir").read("runs/lr=0.1,0.2")
    'runs/lr=0.1,0.2'
    >>> rate.read("-1")
    Traceback (most recent call last):
      ...
    settings.UsageError: --lr=-1: -1 must be at least 0
    """
    shown = f"--{self.name}={text}"
    if not self.many:
      return self._one(shown, text)
    values = [self._one(shown, t) for t in text.split(",") if t]
    if not values and self.default != ():
      raise UsageError(f"{shown}: give a value, or leave it out")
    if self.each and len(values) not in (1, len(self.each)):
      raise UsageError(
        f"{shown}: give one value, or {len(self.each)}, for"
        f" {' and '.join(self.each)}"
      )
    if self.distinct and len({*values}) < len(values):
      raise UsageError(f"{shown}: name each once")
    if self.most and not 1 <= len(values) <= self.most:
      raise UsageError(f"{shown}: give one value, or FIRST,LAST")
    return self.whole(values)

  def _one(self, shown: str, text: str) -> Any:
    if self.type is bool:
      return flags.BooleanParser().parse(text)
    try:
      value = self.type(text)
    except ValueError:
      whole = "whole " if self.type is int else ""
      raise UsageError(f"{shown}: not a {whole}number") from None
    if self.type is str:
      if not text:
        raise UsageError(f"{shown}: give a value, or leave it out")
      if self.choices and text not in self.choices:
        raise UsageError(f"{shown}: choose from {', '.join(self.choices)}")
      return os.path.expanduser(text)  # It may be a path.
    if not math.isfinite(value):
      raise UsageError(f"{shown}: must be a finite number")
    if not self.low <= value <= self.high:
      raise UsageError(f"{shown}: {text} must {self.range}")
    # As programs count; seeds have a range of their own.
    if self.type is int and self.high == math.inf and value >= 2**31:
      raise UsageError(f"{shown}: {text} must be below 2^31")
    return value

  @property
  def range(self) -> str:
    """The allowed numbers, in words; empty if all are."""
    if math.isfinite(self.high):
      return f"lie between {self.low:.12g} and {self.high:.12g}"
    return f"be at least {self.low:.12g}" if math.isfinite(self.low) else ""

  @property
  def limits(self) -> str:
    """The allowed numbers, and where it has an effect, as sentences."""
    texts = [self.range and f"Must {self.range}."]
    texts.append(self.only and f"For {in_words(self.only)}.")
    return " ".join(filter(None, texts))

  @property
  def defaults(self) -> str:
    """The defaults, in words; empty if there is none."""
    texts = [] if self.default in (None, ()) else [shown(self.default)]
    for condition, value in self.cases.items():
      texts.append(f"{shown(value)} ({in_words(condition)})")
    return "; ".join(texts)


def setting(
  default: Any = None, cases: Mapping[str, Any] | None = None, **details: Any
) -> Any:
  """A field for a setting; see `Setting`."""
  declared = Setting(default=default, cases=cases or {}, **details)
  return dataclasses.field(default=None, metadata={"setting": declared})


count = functools.partial(setting, low=1)
share = functools.partial(setting, low=0, high=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """The settings of a run; subclasses declare them.

  `OLD` names flags of earlier versions, which flag files may still have.
  """

  words: frozenset[str] = frozenset()
  OLD: typing.ClassVar[tuple[str, ...]] = ()

  @classmethod
  @functools.cache
  def declared(cls) -> dict[str, Setting]:
    """The settings by name."""
    hints, helps, found = typing.get_type_hints(cls), _helps(cls), {}
    for field in dataclasses.fields(cls):
      if "setting" not in field.metadata:
        continue
      hint, many = hints[field.name], False
      if type(None) in typing.get_args(hint):  # X | None.
        hint = typing.get_args(hint)[0]
      if typing.get_origin(hint) is tuple:
        hint, many = typing.get_args(hint)[0], True
      choices = typing.get_args(hint)
      read = dict(type=str if choices else hint, many=many, choices=choices)
      read |= dict(name=field.name, help=helps[field.name])
      declared = field.metadata["setting"]
      found[field.name] = dataclasses.replace(declared, **read)
    return found

  @classmethod
  def resolve(cls, given: Mapping[str, Any], words: Words) -> typing.Self:
    """The settings of a run.

    Args:
      given: values by name; others are ignored.
      words: what holds of the run.

    Returns:
      Every setting's value.
    """
    values = {}
    for name, declared in cls.declared().items():
      value = given.get(name)
      found = declared.default_in(words) if value is None else value
      values[name] = declared.whole(found)
    return cls(words=frozenset(words), **values)

  def of_kind(self, *kinds: str) -> dict[str, Any]:
    """The values of settings of some kinds, by name."""
    return {
      name: getattr(self, name)
      for name, declared in self.declared().items()
      if declared.kind_in(self.words) in kinds
    }

  def arguments(self, function: Any, **more: Any) -> dict[str, Any]:
    """The arguments of a function that are settings, and more.

    Args:
      function: its arguments have the names of settings, or those that they
        state (`argument`).
      **more: further arguments, or other values of these.

    Returns:
      Values by argument.
    """
    names = {s.argument or name: name for name, s in self.declared().items()}
    takes = inspect.signature(function).parameters
    found = {n: getattr(self, names[n]) for n in takes if n in names}
    return found | more


def _helps(cls: type) -> dict[str, str]:
  """The texts under `Attributes:` in the docstrings of a class."""
  helps, name = {}, ""
  for base in reversed(cls.__mro__):
    text = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2]
    for line in text.splitlines():
      if not line.startswith("    "):
        name, _, line = line.strip().partition(": ")
        helps[name] = ""
      helps[name] = f"{helps[name]} {line.strip()}".strip()
  return helps


def holds(condition: str, words: Words) -> bool:
  """Whether a condition holds.

  >>> holds("merged periodic, cifar", {"merged", "cifar"}), holds("", set())
  (True, True)
  >>> holds("merged periodic, cifar", {"merged", "digits"})
  False
  """
  parts = filter(None, condition.split(", "))
  return all(set(words) & set(part.split()) for part in parts)


def in_words(condition: str) -> str:
  """A condition as a text.

  >>> in_words("merged periodic fedavg, cifar")
  'merged, periodic or fedavg with cifar'
  """
  either = lambda part: " or ".join(", ".join(part.split()).rsplit(", ", 1))
  return " with ".join(map(either, condition.split(", ")))


def shown(value: Any) -> str:
  """A value as written on the command line.

  >>> shown((0.5, 1.0)), shown(True)
  ('0.5,1.0', 'true')
  """
  if isinstance(value, list | tuple):
    return ",".join(map(str, value))
  return str(value).lower() if isinstance(value, bool) else str(value)


class Given(NamedTuple):
  """What a user gave.

  Attributes:
    values: by name.
    typed: the names that are on the command line itself, not in a flag file.
    files: the flag files.
    rest: arguments that are not flags.
  """

  values: dict[str, Any]
  typed: frozenset[str] = frozenset()
  files: tuple[str, ...] = ()
  rest: tuple[str, ...] = ()


def parse(
  argv: Sequence[str],
  *classes: type[Settings],
  known_only: bool = False,
  more: bool = False,
) -> Given:
  """Reads the flags of some classes.

  Args:
    argv: the arguments.
    *classes: their settings are the flags.
    known_only: whether to ignore others.
    more: whether there may be arguments that are not flags.

  Returns:
    The values.

  Raises:
    UsageError: a flag is unknown, or its value is not allowed.
    SystemExit: after `--help`.
  """
  known = flags.FlagValues()
  known.set_gnu_getopt(True)
  declared = {n: s for cls in classes for n, s in cls.declared().items()}
  old = {name for cls in classes for name in cls.OLD} - declared.keys()
  for name in (*declared, *old):
    is_bool = name in declared and declared[name].type is bool
    define = flags.DEFINE_boolean if is_bool else flags.DEFINE_string
    define(name, None, "", flag_values=known)
  written = [a.lstrip("-") for a in argv if a[:1] == "-"]
  if {"h", "help", "helpfull"}.intersection(written):
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # As when `head` has enough.
    print(help_of(*classes))
    sys.exit()
  typed = {a.partition("=")[0] for a in written}
  files = []
  for argument, value in zip(argv, [*argv[1:], ""]):
    name, equals, text = argument.lstrip("-").partition("=")
    if argument.startswith("-") and name == "flagfile":
      files.append(text if equals else value)
  if "" in files:
    raise UsageError("--flagfile: give a file, or leave it out")
  try:
    lines = known.read_flags_from_files(argv, force_gnu=False)
    # Some editors begin a file by a byte-order mark.
    lines = [a.removeprefix("\ufeff") for a in lines if a[:2] != "\ufeff#"]
    rest = known(["", *lines], known_only=known_only)[1:]
  except flags.IllegalFlagValueError as error:  # Of a boolean.
    flag = str(error).partition(":")[0].removeprefix("flag ")
    raise UsageError(f"{flag}: give true or false") from None
  except UnicodeDecodeError as error:
    raise UsageError(f"--flagfile: a file is not UTF-8 text: {error}") from None
  except (flags.Error, ValueError) as error:  # The latter for `--noNAME=VALUE`.
    text = str(error).removeprefix("ERROR:: ")
    flag = getattr(error, "flagname", None)  # An unknown one.
    if flag and flag not in typed:
      text += " It is in a flag file, maybe of another command."
    raise UsageError(text) from None
  if rest and not known_only and not more:
    raise UsageError(f"unexpected argument {rest[0]!r}; flags begin with --")
  names = {n if n in known else n.removeprefix("no") for n in typed}
  for name in sorted(old & names):
    raise UsageError(f"--{name}: not for this command; leave it out")
  values = {}
  for name, s in declared.items():
    text = known[name].value
    if text is not None:
      values[name] = s.read(text) if isinstance(text, str) else text
  names &= declared.keys()
  return Given(values, frozenset(names), tuple(files), tuple(rest))


def help_of(*classes: type[Settings]) -> str:
  """The text of `--help`."""
  lines = [inspect.cleandoc(sys.modules["__main__"].__doc__ or "")]
  lines.append("\n--flagfile=FILE reads flags from a file, one on each line.")
  lines.append("Of several defaults that fit a run, the last counts.")
  declared = {n: s for cls in classes for n, s in cls.declared().items()}
  # Those of the command itself come first.
  for owner in dict.fromkeys(base for cls in classes for base in cls.__mro__):
    own = declared.keys() & inspect.get_annotations(owner).keys()
    if own:
      what = (inspect.getdoc(owner) or "").partition(".")[0]
      lines.append(f"\nflags of {what[:1].lower()}{what[1:]}:")
    for name, s in [(n, declared.pop(n)) for n in [*declared] if n in own]:
      choices = f": <{'|'.join(s.choices)}>" if s.choices else ":"
      lines.append(f"  --{'[no]' if s.type is bool else ''}{name}{choices}")
      default = s.defaults and f"By default {s.defaults}."
      text = " ".join(filter(None, [s.help, s.limits, default]))
      lines += textwrap.wrap(f"    {text}", 78, subsequent_indent="    ")
  return "\n".join(lines)


def table_of(cls: type[Settings], leave_out: Collection[str] = ()) -> str:
  """A table of settings for `docs/settings.md`."""
  lines = ["| flag | default | what it is |", "|---|---|---|"]
  for name, s in cls.declared().items():
    choices = ", ".join(f"`{choice}`" for choice in s.choices)
    texts = [s.help, choices and f"One of {choices}.", s.limits]
    texts.append(s.search and f"Searched in `{s.search}`.")
    if name not in leave_out:
      text = " ".join(filter(None, texts))
      lines.append(f"| `--{name}` | {s.defaults} | {text} |")
  return "\n".join(lines)


def main(argv: Sequence[str], cls: type[Settings], module: str) -> None:
  """Reads a command's flags, and only then imports what runs it.

  Args:
    argv: the arguments.
    cls: the command's settings.
    module: has `main(given)`.
  """
  try:
    given = parse(argv, cls)
  except UsageError as error:
    sys.exit(f"error: {error}")
  launch = importlib.import_module("launch")
  launch.run(importlib.import_module(module).main, given, cls)
