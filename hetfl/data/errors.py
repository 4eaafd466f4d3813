"""The error raised for bad or missing data."""


class DataError(ValueError):
  """A data file that is missing, damaged or not what its name says.

  Its message is one line: which file, what is wrong with it, what to do.
  """
