"""Your own images: one `.npz` file of labelled images."""

from collections.abc import Sequence
import os

from absl import logging
import numpy as np

from hetfl.data import files
from hetfl.data.errors import DataError
from hetfl.data.vision import VisionDataset
from hetfl.population import Bank

LAYOUT = (
  "want a file by np.savez(FILE, x_train=uint8[N, H, W] or [N, H, W, C],"
  " y_train=int[N], x_test=..., y_test=...) and, if there are clients, their"
  " ids, clients_train=[N]"
)


def check_npz(
  path: str | os.PathLike | None,
  datasets: Sequence[str],
  *,
  of: str = "dataset",
  argument: str = "npz",
) -> None:
  """Checks that there is a file where a data set is `npz`, and only there.

  Args:
    path: the file, or `None`.
    datasets: names of data sets.
    of: the argument that names them, for messages.
    argument: the argument that names the file, for messages.

  Raises:
    ValueError: there is a file but no such data set, or the reverse.
  """
  if path is None and "npz" in datasets:
    raise ValueError(f"{argument}=None: {of}=npz needs your file; {LAYOUT}")
  if path is not None and "npz" not in datasets:
    raise ValueError(
      f"{argument}={path}: {of}={','.join(datasets)} does not read it; use"
      f" {of}=npz"
    )


def load_npz(path: str | os.PathLike) -> VisionDataset:
  """Reads images of your own from a NumPy file.

  The file has the arrays of Keras's data sets, made by `np.savez` or
  `np.savez_compressed`: `x_train` and `x_test` `uint8[N, H, W, C]`, or
  `uint8[N, H, W]` for grey images; and `y_train` and `y_test` `int[N]`, from 0.
  It may also have `clients_train`, the number or name of the client that holds
  each training image. Nothing is unpickled.

  Args:
    path: the file.

  Returns:
    The data set; its number of classes is one more than the largest label.

  Raises:
    DataError: the file is missing, damaged, or has other arrays.

  >>> import io
  >>> file, x = io.BytesIO(), np.zeros((4, 8, 8), np.uint8)
  >>> np.savez(file, x_train=x, y_train=[0, 1, 2, 2], x_test=x[:1], y_test=[1],
  ...          clients_train=['ann', 'bob', 'ann', 'bob'])
  >>> _ = file.seek(0)
  >>> images = load_npz(file)
  >>> images.train['x'].shape, images.num_classes, images.clients.tolist()
  ((4, 8, 8, 1), 3, ['ann', 'bob', 'ann', 'bob'])
  """
  names = ("x_train", "y_train", "x_test", "y_test", "clients_train")
  arrays = files.read_npz(path, *names, layout=LAYOUT)
  train, test = (_bank(path, arrays, part) for part in ("train", "test"))
  size, test_size = image_size(train), image_size(test)
  if size != test_size:
    raise DataError(
      f"{path}: x_train has images of {size}, x_test of {test_size}; give both"
      " the same shape"
    )
  clients = arrays.get("clients_train")
  if clients is not None:
    if clients.shape != train["y"].shape or clients.dtype.kind not in "iuU":
      raise DataError(
        f"{path}: clients_train is {clients.dtype}{[*clients.shape]} for"
        f" {len(train['y'])} training images; give the number or name of each"
        " one's client"
      )
  labels = np.concatenate([train["y"], test["y"]])
  num_classes = int(labels.max()) + 1
  if num_classes > len(labels):
    raise DataError(
      f"{path}: a label is {num_classes - 1}, but there are only {len(labels)}"
      " images; number the classes 0, 1, 2, ..."
    )
  missing = num_classes - len(np.unique(labels))
  if missing:
    logging.warning(
      "%s: %d of %d classes have no image; if that is not meant, number the"
      " classes 0, 1, 2, ...",
      path,
      missing,
      num_classes,
    )
  return VisionDataset("npz", train, test, num_classes, clients)


def _bank(path, arrays: dict[str, np.ndarray], part: str) -> Bank:
  """The training or the test images, checked."""
  for name in (f"x_{part}", f"y_{part}"):
    if name not in arrays:
      raise DataError(f"{path}: {name} is missing: {LAYOUT}")
  x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
  if x.dtype != np.uint8 or x.ndim not in (3, 4) or not x.size:
    raise DataError(
      f"{path}: x_{part} is {x.dtype}{[*x.shape]}; give uint8 pixels, 0 to"
      " 255, as [N, H, W] or [N, H, W, C]"
    )
  y = y.reshape(len(x)) if y.shape == (len(x), 1) else y  # Keras's CIFAR.
  if y.dtype.kind not in "iu" or y.shape != (len(x),):
    raise DataError(
      f"{path}: y_{part} is {y.dtype}{[*y.shape]} for {len(x)} images; give"
      " each a whole number, its class"
    )
  for label in (int(y.min()), int(y.max())):
    if not 0 <= label < 2**31:
      raise DataError(
        f"{path}: y_{part} has a label {label}; number the classes from 0"
      )
  return {"x": x[..., None] if x.ndim == 3 else x, "y": y.astype(np.int32)}


def image_size(bank: Bank) -> str:
  """The size of a bank's images, such as 28x28x1."""
  return "x".join(map(str, bank["x"].shape[1:]))
