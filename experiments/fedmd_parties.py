"""FedMD's parties: their models, the paper's or the user's own."""

import common
import fedmd_settings as settings
import jax
import jax.numpy as jnp
import own_models

from hetfl import core
from hetfl.models import fedmd as models
from hetfl.party import Party


def make_parties(
  config: dict, speed: dict, num_classes: int, image_shape: tuple[int, ...]
) -> tuple[list[str], list[Party]]:
  """Makes a run's parties.

  Args:
    config: the flags that change the result.
    speed: the flags that change the speed only.
    num_classes: C, of public and private classes together.
    image_shape: height, width, channels.

  Returns:
    The names of the parties' models, and the parties.

  Raises:
    UsageError: a model does not fit the images.
  """
  example = jnp.zeros((1, *image_shape))
  own = settings.own_names(config["models"])
  strong = config["num_parties"] - config["weak_parties"]
  names, parties = [], []
  for k, (name, module) in enumerate(
    models.party_models(
      "small" if own else config["models"],
      config["num_parties"],
      num_classes,
      width=config["width"],
      weak_parties=config["weak_parties"],
      batch_norm_momentum=config["batch_norm_momentum"],
      conv=speed["conv"],
    )
  ):
    if own and k < strong:
      name = own[k % len(own)]
      model = own_models.load("models", name, num_classes, example)
    else:
      model = core.Model.from_flax(module, example)
    try:
      variables = jax.eval_shape(model.init, jax.random.key(0))
    except (TypeError, ValueError, IndexError, ZeroDivisionError) as error:
      raise common.UsageError(
        f"--models={config['models']}: party{k}'s ({name}) does not fit"
        f" images of {image_shape[0]}x{image_shape[0]}: {error}"
      ) from error
    names.append(name)
    has_head = models.has_head(variables.params)
    parties.append(
      Party(
        name=f"party{k}",
        model=model,
        learning_rate=config["learning_rate"],
        l2=config["l2"],
        penalty=models.head_penalty if has_head else None,
      )
    )
  return names, parties
