"""Models of the user's own, which flags name as FILE.py:FUNCTION.

The function takes the number of classes, or of tokens, and returns a Flax Linen
module or a `hetfl.Model`. Models of images take them as the recipe prepares
them; models of text take tokens and return `TokenLogits`.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import functools
import hashlib
import pathlib
import sys
import traceback
import types

from absl import logging
import flax.linen as nn
import jax
import jax.numpy as jnp
from settings import UsageError

from hetfl import checks, core
from hetfl.models.language import TokenLogits


def is_own(name: str) -> bool:
  """Whether a model's name is FILE.py:FUNCTION."""
  return ":" in name


def labels(names: Sequence[str]) -> list[str]:
  """The functions of the models that are the user's, each once, in order."""
  own = [name.rpartition(":")[2] for name in names if is_own(name)]
  return list(dict.fromkeys(own))


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
      choices = f"choose from {', '.join(known)}, or " if known else ""
      raise UsageError(
        f"--{flag}={name}: {choices}give models of your own as FILE.py:FUNCTION"
      )


@functools.cache
def load(
  flag: str,
  name: str,
  size: int,
  shape: tuple[int, ...],
  of: str = "classes",
) -> core.Model:
  """Calls the user's function, and checks the model's outputs.

  Args:
    flag: the flag that names the model.
    name: FILE.py:FUNCTION.
    size: C, the number of classes; for text V, that of tokens.
    shape: height, width, channels; for text the length of a sentence, T.
    of: what C is the number of; for `features` the outputs need be no logits.

  Returns:
    The model, the same for the same arguments.

  Raises:
    UsageError: the function is missing, returns no model, or the model's
      outputs are not `float[B, C]`, or for text not `TokenLogits`.
  """
  shown, is_text = f"--{flag}={name}", len(shape) == 1
  function = _function(flag, name)
  example = jnp.zeros((1, *shape), jnp.int32 if is_text else jnp.float32)
  counted = "vocabulary_size" if is_text else f"num_{of}"
  with _in_a_line(f"{shown}, called with {counted}={size}", name):
    model = function(size)
    if isinstance(model, nn.Module):
      model = core.Model.from_flax(model, example)
  if not isinstance(model, core.Model):
    raise UsageError(
      f"{shown}: returned a {type(model).__name__}, not a Flax Linen module or"
      " a hetfl.Model, such as hetfl.Model.from_nnx(lambda rngs: Net(rngs))"
    )
  kind = "logits" if of == "classes" else "outputs"
  inputs = "tokens" if is_text else "images"
  with _in_a_line(f"{shown}, given {inputs} of shape {example.shape}", name):
    outputs = _trial(model, name, example, logits=of == "classes")
  found = jax.tree.map(jnp.shape, outputs)
  wanted, needs = (1, size), f"{size} {of} need {kind} of shape (1, {size})"
  if is_text:
    features = getattr(outputs, "features", example)
    width, chunk = features.shape[-1:], getattr(outputs, "chunk", None)
    logits = (1, *shape, *width), (*width, size), (size,), chunk
    wanted = TokenLogits(*logits)
    needs = (
      f"a vocabulary of {size} needs TokenLogits of features (1,"
      f" {shape[0]}, E), kernel (E, {size}) and bias ({size},)"
    )
  if found != wanted:
    one = f"sentence of {shape[0]} tokens" if is_text else f"image {shape}"
    raise UsageError(
      f"{shown}: given one {one}, the model's output is {found}, but {needs}"
    )
  return model


def _trial(model, name, example, logits):
  """A new model's outputs, which are looked at for common mistakes.

  Logits that sum to 1 cause a warning, since the losses take a softmax of their
  own; but no error, since such a model still learns, and it is a guess.
  """
  key = jax.random.key(0)

  @jax.jit
  def run():
    # Different inputs, of which whole numbers are 0.
    x = jax.random.uniform(key, example.shape).astype(example.dtype)
    variables = model.start(key, name)
    if logits and not jax.tree.leaves(variables.params):
      raise ValueError(f"{name}: has no parameters, so it learns nothing")
    # Errors of training would come later, without the file's name.
    jax.eval_shape(lambda: model.outputs(variables, x, key, True))
    return model.predict(variables, x)

  outputs = run()
  for leaf in jax.tree.leaves(outputs):
    checks.array(name, leaf)
  several = getattr(outputs, "ndim", 0) and outputs.shape[-1] > 1
  if logits and several and jnp.all(outputs >= 0):
    if jnp.allclose(outputs.sum(axis=-1), 1, atol=0.01):
      logging.warning(
        "%s: its outputs sum to 1, as after a softmax. The losses take"
        " logits: leave the softmax out.",
        name,
      )
  return outputs


def model(
  flag: str,
  name: str,
  size: int,
  example: jax.Array,
  build: Callable[[], nn.Module],
  of: str = "classes",
) -> core.Model:
  """The user's model, or one of hetfl's.

  Args:
    flag: the flag that names the model.
    name: FILE.py:FUNCTION, or any other name for hetfl's.
    size: see `load`.
    example: inputs of the right shape and type.
    build: makes hetfl's module.
    of: see `load`.

  Returns:
    The model.

  Raises:
    UsageError: as `load`.
  """
  if is_own(name):
    return load(flag, name, size, example.shape[1:], of)
  return core.Model.from_flax(build(), example)


def sources(names: Sequence[str]) -> dict[str, bytes]:
  """The files of the models, which a run keeps.

  Args:
    names: names of models, the user's and others.

  Returns:
    Name and content of each file, as it was run. A run that is resumed with
    other content is refused. Files that these files import are not kept.
  """
  paths = {_path(name) for name in names if is_own(name)}
  kept: dict[str, bytes] = {}
  for i, path in enumerate(sorted(paths)):  # Two may share a name.
    number = i if f"model-{path.name}" in kept else ""
    kept[f"model{number}-{path.name}"] = _loaded(path)[1]
  return kept


def _path(name: str) -> pathlib.Path:
  return pathlib.Path(name.rpartition(":")[0]).absolute()


def _function(flag: str, name: str):
  """The function; raises a `UsageError` if there is none."""
  shown, path = f"--{flag}={name}", _path(name)
  if not path.is_file():
    raise UsageError(f"{shown}: there is no file {path}; give FILE.py:FUNCTION")
  with _in_a_line(f"{shown}, importing {path}", name):
    module, _ = _loaded(path)
  called = name.rpartition(":")[2]
  function = getattr(module, called, None)
  if not callable(function):
    raise UsageError(f"{shown}: {path} has no function {called!r}")
  return function


@functools.cache
def _loaded(path: pathlib.Path) -> tuple[types.ModuleType, bytes]:
  """A file as a module, and its content; it may import others of its folder."""
  content = path.read_bytes()
  name = f"{path.stem}_{hashlib.sha256(bytes(path)).hexdigest()[:8]}"
  module = types.ModuleType(name)
  module.__file__ = str(path)
  sys.modules[name] = module  # As dataclasses expect.
  if str(path.parent) not in sys.path:
    sys.path.append(str(path.parent))
  exec(compile(content, path, "exec"), vars(module))
  return module, content


@contextlib.contextmanager
def _in_a_line(doing: str, name: str) -> Iterator[None]:
  """Has errors of the user's code shown in a line, with their place in it."""
  try:
    yield
  except (Exception, SystemExit) as error:
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.lineno for f in frames if f.filename == str(_path(name))]
    at = f" at line {lines[-1]}" if lines else ""
    raise UsageError(
      f"{doing}: {type(error).__name__}{at}: {error}; mend the file"
      " (--verbosity=1 shows the whole traceback)"
    ) from error
