"""Your own images: one `.npz` file of labelled images."""

from collections.abc import Sequence
import os
from typing import Any

from absl import logging
import numpy as np

from hetfl.data import files, vision
from hetfl.data.errors import reading
from hetfl.population import Bank

LAYOUT = (
  "want a file by np.savez(FILE, x_train=uint8[N, H, W] or [N, H, W, C],"
  " y_train=int[N] from 0, x_test=..., y_test=...) and, if there are clients,"
  " their numbers or names, clients_train=[N]"
)


def check_npz(
  path: str | os.PathLike | None,
  datasets: Sequence[str],
  *,
  of: str = "dataset",
  argument: str = "npz",
) -> None:
  """Checks that there is a file if a data set is `npz`, and only then.

  Args:
    path: the file, or `None`.
    datasets: names of data sets.
    of: the argument that names them, for messages.
    argument: the argument that names the file, for messages.

  Raises:
    ValueError: there is a file but no such data set, or the reverse.
  """
  if (path is None) == ("npz" in datasets):
    needed = f"does not read it; use {of}=npz"
    if path is None:
      needed = f"needs your file; {LAYOUT}"
    raise ValueError(f"{argument}={path}: {of}={','.join(datasets)} {needed}")


def images_of(
  dataset: str, data_dir: Any, download: bool, npz: str | os.PathLike | None
) -> vision.VisionDataset:
  """The images of a data set by `vision.load`, or of `npz`, your own."""
  if npz is not None and dataset == "npz":
    return load_npz(npz)
  return vision.load(dataset, data_dir=data_dir, download=download)


def load_npz(path: str | os.PathLike) -> vision.VisionDataset:
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
  with reading(path, LAYOUT):
    arrays = files.read_npz(path, *names)
    train, test = (_bank(arrays, part) for part in ("train", "test"))
    shape, test_shape = train["x"].shape[1:], test["x"].shape[1:]
    if shape != test_shape:
      raise ValueError(f"x_train has images of {shape}, x_test of {test_shape}")
    labels = np.concatenate([train["y"], test["y"]])
    num_classes = int(labels.max()) + 1
    if num_classes > len(labels):
      raise ValueError(
        f"a label is {labels.max()}, but there are only {len(labels)} images"
      )
    clients = arrays.get("clients_train")
    if clients is not None:
      _check("clients_train", clients, "iuU", len(train["y"]))
  missing = num_classes - len(np.unique(labels))
  if missing:
    text = "%s: %d of %d classes have no image; number them 0, 1, 2, ..."
    logging.warning(text, path, missing, num_classes)
  return vision.VisionDataset("npz", train, test, num_classes, clients)


def _bank(arrays: dict[str, np.ndarray], part: str) -> Bank:
  """The training or the test images, checked."""
  if not {f"x_{part}", f"y_{part}"} <= arrays.keys():
    raise ValueError(f"x_{part} or y_{part} is missing")
  x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
  if x.shape[:1] == (0,):
    raise ValueError(f"x_{part} has no images; it needs one or more")
  found = f"x_{part} is {x.dtype}{[*x.shape]}"
  if x.dtype != np.uint8 or x.ndim not in (3, 4) or not x.size:
    raise ValueError(found)
  if x.ndim == 4 and x.shape[1] <= 4 < x.shape[3]:
    raise ValueError(
      f"{found}, with its channels first; save x.transpose(0, 2, 3, 1)"
    )
  y = y[:, 0] if y.shape == (len(x), 1) else y  # Keras's CIFAR.
  _check(f"y_{part}", y, "iu", len(x))
  if y.min() < 0 or y.max() >= 2**31:
    raise ValueError(f"y_{part} has labels from {y.min()} to {y.max()}")
  return {"x": x[..., None] if x.ndim == 3 else x, "y": y.astype(np.int32)}


def _check(name: str, array: np.ndarray, kinds: str, images: int) -> None:
  """Raises unless there is a value of some kind for each image."""
  if array.dtype.kind not in kinds or array.shape != (images,):
    raise ValueError(
      f"{name} is {array.dtype}{[*array.shape]} for {images} images"
    )
