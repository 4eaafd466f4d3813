"""Checks of what models, losses and functions of the user's return.

Errors name what returned it, its shape and what to do.
"""

from collections.abc import Mapping
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np

from hetfl.checks import not_a


def alike(what: str, given: Any, wanted: Any) -> None:
  """Checks that a pytree has another's structure and shapes.

  Args:
    what: what returned the pytree, for error messages.
    given: the pytree.
    wanted: the other one, of arrays or `jax.ShapeDtypeStruct`s.

  Raises:
    ValueError: naming the arrays that only one has, or else the first whose
      shape differs. Types may differ.

  >>> alike('init', {'w': jnp.ones(2)}, {'w': jnp.ones(3)})
  Traceback (most recent call last):
    ...
  ValueError: init: ['w'] has shape (2,), expected (3,)
  >>> alike('init', {'w': jnp.ones(2)}, {'v': jnp.ones(2)})
  Traceback (most recent call last):
    ...
  ValueError: init: must not have ['w']; lacks ['v']
  """
  here, there = map(jax.tree.structure, (given, wanted))
  if here != there:  # type: ignore[operator]
    raise ValueError(f"{what}: {_unlike(given, wanted)}")
  for (path, a), b in zip(
    jax.tree.leaves_with_path(given), jax.tree.leaves(wanted)
  ):
    if jnp.shape(a) != jnp.shape(b):
      raise ValueError(
        f"{what}: {jax.tree_util.keystr(path)} has shape {jnp.shape(a)},"
        f" expected {jnp.shape(b)}"
      )


def _unlike(given, wanted):
  """How the structures of two pytrees differ, in words."""
  paths = [
    [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]
    for tree in (given, wanted)
  ]
  problems = []
  for verb, of, other in (
    ("must not have", *paths),
    ("lacks", *reversed(paths)),
  ):
    if apart := [path or "a bare array" for path in of if path not in other]:
      more = f" and {len(apart) - 3} more" if len(apart) > 3 else ""
      problems.append(f"{verb} {', '.join(apart[:3])}{more}")
  if problems:
    return "; ".join(problems)
  here, there = map(jax.tree.structure, (given, wanted))
  return f"got structure {here}, expected {there}"  # Nodes of other types.


def losses(values: Any, mask: jax.Array) -> None:
  """Checks that a loss gives a number for each example, or a scalar.

  Args:
    values: what the loss gave.
    mask: `float[B]`.

  Raises:
    ValueError: it gives neither, such as a pair, or `[B, 1]`, which times a
      mask would be `[B, B]`.

  >>> losses(jnp.zeros((8, 1)), jnp.ones(8))
  Traceback (most recent call last):
    ...
  ValueError: a loss of shape (8, 1) on 8 examples: give one number for each, \
float[8]
  """
  if not hasattr(values, "dtype") and not np.isscalar(values):
    raise ValueError(
      f"a loss returned a {type(values).__name__}: it must return float[B]"
    )
  if jnp.ndim(values) and jnp.shape(values) != jnp.shape(mask):
    raise ValueError(
      f"a loss of shape {jnp.shape(values)} on {len(mask)} examples: give one"
      f" number for each, float[{len(mask)}]"
    )


def labels(logits: jax.Array, batch: Mapping[str, Any]) -> jax.Array:
  """The batch's labels, if they are one whole number for each prediction.

  Args:
    logits: `float[..., C]`.
    batch: what should hold `y: int[...]`.

  Returns:
    `y`.

  Raises:
    ValueError: `y` is missing, or of another type or shape.

  >>> labels(jnp.zeros((8, 3)), {'y': jnp.zeros((8, 3))})
  Traceback (most recent call last):
    ...
  ValueError: batch['y'] is float32 of shape (8, 3) beside logits of shape \
(8, 3): labels are whole numbers, 0 to C - 1, of shape (8,)
  """
  if "y" not in batch:
    raise ValueError(
      f"a batch holds {sorted(batch)}, but the loss takes labels 'y': name the"
      " bank's labels so, or give a transform"
    )
  dense(logits)
  y, shape = batch["y"], jnp.shape(logits)
  dtype = jnp.result_type(y)
  if not jnp.issubdtype(dtype, jnp.integer) or jnp.shape(y) != shape[:-1]:
    raise ValueError(
      f"batch['y'] is {dtype} of shape {jnp.shape(y)} beside logits of shape"
      f" {shape}: labels are whole numbers, 0 to C - 1, of shape"
      f" {shape[:-1]}"
    )
  return y


def dense(outputs: Any) -> None:
  """Checks that a model's outputs are an array.

  Args:
    outputs: what the model gave, `float[..., C]`.

  Raises:
    ValueError: they are something else, such as `TokenLogits`.
  """
  if not hasattr(outputs, "dtype") and not np.isscalar(outputs):
    raise ValueError(
      "a model's outputs must be an array float[..., C],"
      f" {not_a(outputs)}. Language models need Pool(loss=sentence_loss()),"
      " Distiller(divergence=token_divergence, weights=token_weights) and"
      " Evaluator(measure=next_word_metrics), all from hetfl; fml and fedmd are"
      " for classifiers"
    )


def same_outputs(*logits: jax.Array) -> None:
  """Checks that models which learn from each other have the same outputs.

  Args:
    *logits: each model's logits for the same examples.

  Raises:
    ValueError: they are of different shapes.

  >>> same_outputs(jnp.zeros((8, 3)), jnp.zeros((8, 5)))
  Traceback (most recent call last):
    ...
  ValueError: outputs of shapes (8, 3), (8, 5): models that learn from each \
other need the same classes
  """
  for outputs in logits:
    dense(outputs)
  shapes = list(dict.fromkeys(jnp.shape(z) for z in logits))
  if len(shapes) > 1:
    raise ValueError(
      f"outputs of shapes {', '.join(map(str, shapes))}: models that learn from"
      " each other need the same classes"
    )


def statistics(stats: Any) -> None:
  """Warns of integers among the statistics that are averaged over clients.

  Args:
    stats: a model's statistics.
  """
  for path, leaf in jax.tree.leaves_with_path(stats):
    if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
      logging.warning(
        "stats%s is %s: the mean over clients of different numbers of steps is"
        " rounded. Haiku's batch normalisation then corrects its"
        " statistics too much; hold its counter as float32.",
        jax.tree_util.keystr(path),
        jnp.result_type(leaf),
      )
