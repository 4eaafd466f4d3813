"""Models of one's own for `experiments/`, which are soon compiled."""

import flax.linen as nn


def small(num_classes, width=8):
  """A network of one hidden layer."""
  flat = lambda x: x.reshape(len(x), -1)
  return nn.Sequential([flat, nn.Dense(width), nn.relu, nn.Dense(num_classes)])


def large(num_classes):
  """A wider one."""
  return small(num_classes, 16)
