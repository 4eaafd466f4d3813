"""Errors of data, each kind worded once."""

from collections.abc import Iterator
import contextlib
import os


class DataError(ValueError):
  """A data file that is missing, damaged or not what its name says.

  Its message is one line: which file, what is wrong with it, what to do.
  """


@contextlib.contextmanager
def reading(path: str | os.PathLike, remedy: str) -> Iterator[None]:
  """Turns errors in reading a file within the block into a `DataError`.

  Args:
    path: the file, for the message.
    remedy: what to do, for the message.

  Raises:
    DataError: any error within, except for missing packages.

  >>> with reading('own.npz', 'make it again'):
  ...   raise ValueError('File is not a zip file')
  Traceback (most recent call last):
    ...
  hetfl.data.errors.DataError: own.npz: cannot be read (File is not a zip \
file): make it again
  """
  try:
    yield
  except (DataError, ImportError):
    raise
  except FileNotFoundError as error:
    raise DataError(f"{path}: no such file: {remedy}") from error
  except Exception as error:  # Each library raises many kinds of its own.
    said = " ".join(str(error).split()) or type(error).__name__
    raise DataError(f"{path}: cannot be read ({said}): {remedy}") from error
