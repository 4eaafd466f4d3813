"""Models of the user's own, which flags name as FILE.py:FUNCTION.

The function takes the number of classes and returns a Flax module, or a
`hetfl.Model`. Modules take images as the recipe prepares them.
"""

from collections.abc import Sequence
import functools
import hashlib
import importlib.util
import inspect
import pathlib
import sys

import common
import flax.linen as nn
import jax
import jax.numpy as jnp

from hetfl import checks, core


def is_own(name: str) -> bool:
  """Whether a model's name is FILE.py:FUNCTION."""
  return ":" in name


def check(flag: str, names: Sequence[str], known: Sequence[str]) -> None:
  """Checks the names of models in a flag.

  Args:
    flag: the flag.
    names: its values.
    known: names of models that are not the user's.

  Raises:
    UsageError: a name is unknown, or the user's file or function is missing.
  """
  for name in names:
    if is_own(name):
      _function(flag, name)
    elif name not in known:
      raise common.UsageError(
        f"--{flag}={name}: choose from {', '.join(known)}, or give a model of"
        " your own as FILE.py:FUNCTION"
      )


def load(
  flag: str, name: str, num_classes: int, example: jax.Array
) -> core.Model:
  """Calls the user's function, and checks the model's outputs.

  Args:
    flag: the flag that names the model.
    name: FILE.py:FUNCTION.
    num_classes: C.
    example: images `float[1, H, W, c]`, of which only the shape matters.

  Returns:
    The model.

  Raises:
    UsageError: the function is missing, returns no model, or the model's
      outputs are not `float[1, C]`.
  """
  shown = f"--{flag}={name}"
  function = _function(flag, name)
  with checks.noted(f"{shown}, called with num_classes={num_classes}"):
    model = function(num_classes)
  if isinstance(model, nn.Module):
    model = core.Model.from_flax(model, example)
  if not isinstance(model, core.Model):
    raise common.UsageError(
      f"{shown}: returned a {type(model).__name__}, not a Flax module or a"
      " hetfl.Model"
    )
  with checks.noted(f"{shown}, given images of shape {example.shape}"):
    outputs = jax.eval_shape(
      lambda key: model.predict(model.start(key), jnp.zeros(example.shape)),
      jax.random.key(0),
    )
  if getattr(outputs, "shape", None) != (1, num_classes):
    raise common.UsageError(
      f"{shown}: given one image {example.shape[1:]}, the model's output is"
      f" {jax.tree.map(jnp.shape, outputs)}, but {num_classes} classes need"
      f" logits of shape (1, {num_classes})"
    )
  return model


def sources(names: Sequence[str]) -> dict[str, bytes]:
  """The files of the models, which a run keeps.

  Args:
    names: names of models, the user's and others.

  Returns:
    Name and content of each file. A run that is resumed with other content is
    refused. Files that these files import are not kept.
  """
  paths = {_path(name) for name in names if is_own(name)}
  kept = {}
  for path in sorted(paths):
    content = path.read_bytes()
    kept[f"model-{path.name}"] = content
  if len(kept) < len(paths):
    raise common.UsageError(
      "the files of two models have the same name,"
      f" {', '.join(map(str, sorted(paths)))}: rename one"
    )
  return kept


def _path(name: str) -> pathlib.Path:
  return pathlib.Path(name.rpartition(":")[0]).expanduser().absolute()


def _function(flag: str, name: str):
  """The function; raises a `UsageError` if there is none."""
  shown, path = f"--{flag}={name}", _path(name)
  if not path.is_file():
    raise common.UsageError(
      f"{shown}: there is no file {path}; give FILE.py:FUNCTION"
    )
  with checks.noted(f"{shown}, importing {path}"):
    module = _module(path)
  called = name.rpartition(":")[2]
  function = getattr(module, called, None)
  if not callable(function):
    raise common.UsageError(f"{shown}: {path} has no function {called!r}")
  try:
    inspect.signature(function).bind(10)
  except TypeError as error:
    raise common.UsageError(
      f"{shown}: must take one argument, the number of classes: {error}"
    ) from None
  except ValueError:  # It has no signature.
    pass
  return function


@functools.cache
def _module(path: pathlib.Path):
  """Imports a file, once; it may import others of its folder."""
  name = f"{path.stem}_{hashlib.sha256(bytes(path)).hexdigest()[:8]}"
  spec = importlib.util.spec_from_file_location(name, path)
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module  # As pickle and dataclasses expect.
  if str(path.parent) not in sys.path:
    sys.path.append(str(path.parent))
  spec.loader.exec_module(module)
  return module
