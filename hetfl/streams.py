"""Streams of random numbers: one for each kind of draw."""

from collections.abc import Callable
import enum

import numpy as np


class Stream(enum.IntEnum):
  """The numbers of the streams; a new one takes a new number.

  Results depend on them, so they must not change; 104 and 108 are retired.
  """

  PACHINKO = 1
  DIRICHLET = 2
  IID = 3
  POOLS = 4
  DISTILL_IMAGES = 5
  LABEL_SHARDS = 6
  MATCHING = 7
  HELDOUT_IMAGES = 8
  BAD_LABELS = 9
  EQUAL_CLASSES = 11
  WRITERS = 12
  SUBCLASSES = 13
  TEXT_USERS = 14
  DISTILL_SENTENCES = 15
  OWN_TEST = 16  # which of its examples a client keeps for tests
  EXAMPLES = 17  # of a data set, those that are divided among clients
  OWN_VALIDATION = 18  # as OWN_TEST, to decide when to stop
  PUBLIC_HELDOUT = 21
  PUBLIC_EXAMPLES = 22
  PRIVATE_HELDOUT = 23
  PUBLIC_SUBSET = 101
  DIGEST = 102
  REVISIT = 103
  CLIENTS = 105  # which clients train in a round
  ORDER = 106  # of a client's examples
  DISTILL = 107  # order of distillation batches
  DROPOUT = 109  # which clients of a round drop out of it


def generator(stream: Stream, *numbers: int) -> np.random.Generator:
  """A generator that no other stream shares.

  Args:
    stream: what is drawn.
    *numbers: a seed and whatever else the draw depends on. NumPy ignores
      trailing zeros, so all draws of a stream must have equally many.

  Returns:
    The generator.

  >>> [generator(Stream.IID, seed).integers(1000).item() for seed in (0, 0, 1)]
  [811, 811, 978]
  """
  return np.random.default_rng([stream, *numbers])


def generators(
  stream: Stream, *numbers: int
) -> Callable[[int], np.random.Generator]:
  """Generators by the number of a client, much faster than `generator`.

  They are one PCG64, at places as far apart as its method `jumped` puts them:
  use one up before making the next.

  Args:
    stream: what is drawn.
    *numbers: as for `generator`.

  Returns:
    `client -> generator`.

  >>> of_client = generators(Stream.ORDER, 0)
  >>> [of_client(k).integers(1000).item() for k in (3, 5, 3)]
  [744, 972, 744]
  """
  bits = np.random.PCG64([stream, *numbers])
  start, rng = bits.state, np.random.Generator(bits)

  def of_client(k: int) -> np.random.Generator:
    bits.state = start
    bits.advance(k * 210306068529402873165736369884012333109)
    return rng

  return of_client
