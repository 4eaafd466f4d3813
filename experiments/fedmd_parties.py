"""FedMD's parties: their models, the paper's or the user's own."""

import itertools

from absl import logging
import common
import fedmd_settings as settings
import jax
import jax.numpy as jnp
import own_models

from hetfl import core, Participant
from hetfl.models import fedmd as models
from hetfl.optimizers import keras_adam


def make_parties(
  config: dict,
  speed: dict,
  num_classes: int,
  image_shape: tuple[int, int, int],
  transform: core.Preparation,
) -> tuple[list[str], list[Participant]]:
  """Makes a run's parties.

  Args:
    config: the flags that change the result.
    speed: the flags that change the speed only.
    num_classes: C, of public and private classes together.
    image_shape: height, width, channels.
    transform: prepares their private images.

  Returns:
    The names of the parties' models, and the parties.

  Raises:
    UsageError: a model does not fit the images.
  """
  own = settings.own_names(config["models"])
  strong = config["num_parties"] - config["weak_parties"]
  named = [
    (name, own_models.load("models", name, num_classes, image_shape))
    for name in itertools.islice(itertools.cycle(own), strong)
  ]
  if rest := config["num_parties"] - len(named):
    example = jnp.zeros((1, *image_shape))
    of_paper = models.party_models(
      # If all the rest are weak parties, the table does not matter.
      "small" if own else config["models"],
      rest,
      num_classes,
      width=config["width"],
      weak_parties=config["weak_parties"],
      batch_norm_momentum=config["batch_norm_momentum"],
      conv=speed["conv"],
      dtype=config["dtype"],
    )
    named += [
      (name, core.Model.from_flax(module, example)) for name, module in of_paper
    ]
  parties = []
  for k, (name, model) in enumerate(named):
    try:
      variables = jax.eval_shape(model.init, jax.random.key(0))
    except (TypeError, ValueError, IndexError, ZeroDivisionError) as error:
      height, width, _ = image_shape
      raise common.UsageError(
        f"--models={config['models']}: party{k}'s ({name}) does not fit"
        f" images of {height}x{width}: {error}"
      ) from error
    decays = models.has_head(variables.params)
    if not decays and "l2" in common.typed():
      logging.warning(
        "--l2=%s has no effect on party%d: its model %s has no layer 'head'.",
        config["l2"],
        k,
        name,
      )
    parties.append(
      Participant(
        model,
        f"party{k}",
        learning_rate=config["learning_rate"],
        transform=transform,
        optimizer=keras_adam,
        l2=config["l2"],
        penalty=models.head_penalty if decays else None,
      )
    )
  return [name for name, _ in named], parties
