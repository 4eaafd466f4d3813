"""Kernels of layers, and which form of each runs on which backend."""

from typing import Literal, NamedTuple

import jax

ConvForm = Literal["patches", "winograd", "native"]


class Forms(NamedTuple):
  """The fastest forms on a backend; all give the same numbers up to rounding.

  Attributes:
    conv: form of convolutions whose kernels have a batch axis: one for each
      client, lane or trial.
    conv_alone: that of convolutions whose kernels have none.
    patches: `joined` from one slice for each place in a window, or `gathered`
      pixel by pixel.
    pooling: three element-wise `maxima`, or a `reduction` over windows.
    crops: `slices`, or `products` with one-hot rows.
    positions: of a sentence, in each iteration of an LSTM's loop.
  """

  conv: ConvForm
  conv_alone: ConvForm
  patches: Literal["joined", "gathered"]
  pooling: Literal["maxima", "reduction"]
  crops: Literal["slices", "products"]
  positions: int


_FORMS = {
  "cpu": Forms("winograd", "patches", "joined", "maxima", "slices", 1),
  "gpu": Forms("patches", "native", "gathered", "maxima", "slices", 20),
  "tpu": Forms("native", "native", "joined", "reduction", "products", 20),
}


def forms() -> Forms:
  """The forms for the default backend.

  * CPUs: Winograd's form takes a third to a half of the multiplications.
    Maxima are several times faster than a reduction, gradient included.
  * GPUs: cuDNN's grouped convolutions, one group for each client, move five
    times the bytes of patches; without a batch axis the two have not been
    compared. Gathered patches need fewer decisions in a kernel.
  * TPUs have units for convolutions and reductions, but would take slices with
    different offsets one image at a time.
  * On accelerators an iteration costs more than the small products of one
    position.
  """
  return _FORMS.get(jax.default_backend(), _FORMS["gpu"])


def default_conv(*, small: bool = False, alone: bool = False) -> ConvForm:
  """The form of a model's convolutions if none is given; see `forms`.

  Args:
    small: whether images have less than 16 pixels a side, like digits: on CPUs
      these train faster than Winograd's form compiles.
    alone: whether kernels have no batch axis, as in FedMD, where each party
      trains by itself. Most of its layers have strides, so that none but
      patches would take Winograd's form.

  Returns:
    The form. Changes speed only.

  >>> default_conv(), default_conv(small=True), default_conv(alone=True)
  ('winograd', 'patches', 'patches')
  """
  conv = forms().conv_alone if alone else forms().conv
  return "patches" if small and conv == "winograd" else conv
