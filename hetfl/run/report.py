"""Tables and summaries of finished or running runs.

All take the results of several seeds, and show their mean and deviation.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
import pathlib
import re
from typing import Any

import numpy as np

from hetfl.run import logs

# Rows of metrics of one run, as `logs.read_rows` reads them.
Rows = Sequence[Mapping[str, Any]]

# The columns of a pool's accuracies; the second and third of language models.
_ACCURACIES = {
  "test_accuracy": "test %",
  "test_accuracy_questions": "questions %",
  "test_accuracy_answers": "answers %",
  "heldout_accuracy": "held-out %",
}


def table(results: Mapping[str, Rows]) -> str:
  """Formats codistillation's results as a plain-text table, one line per run.

  Args:
    results: label -> the contents of `result.json` of each seed, accuracies
      from 0 to 1.

  Returns:
    The table; a missing value is a dash, or `diverged` in a run that has.

  >>> small = {'parameters': 5, 'test_accuracy': .5, 'heldout_accuracy': .25}
  >>> result = {'rounds': 9, 'seconds': 1.25, 'pools': {'small': small}}
  >>> print(table({'fedavg': [result]}))
             small
  algorithm  parameters  test %  held-out %  rounds  seconds
  ---------  ----------  ------  ----------  ------  -------
  fedavg              5   50.00       25.00       9      1.2
  >>> other = {'rounds': 9, 'seconds': 1.25, 'pools': {
  ...     'small': small | {'test_accuracy': .75}}}
  >>> print(table({'fedavg': [result, other]}))
             small
  algorithm  parameters         test %    held-out %  rounds    seconds
  ---------  ----------  -------------  ------------  ------  ---------
  fedavg              5  62.50 ± 17.68  25.00 ± 0.00       9  1.2 ± 0.0
  """
  columns = [["", "algorithm", *results]]

  def add(head, title, name, form, factor=1, pool=None):
    def value(result):
      found = (result["pools"][pool] if pool else result)[name]
      lost = found is None and "diverged" in result
      return float("nan") if lost else found

    cells = [
      cell(list(map(value, of)), form, factor) for of in results.values()
    ]
    columns.append([head, title, *cells])

  for pool, measured in next(iter(results.values()))[0]["pools"].items():
    add(pool, "parameters", "parameters", "{:,d}", pool=pool)
    for name, title in _ACCURACIES.items():
      if name in measured:
        add("", title, name, "{:.2f}", 100, pool)
  if "epsilon" in next(iter(results.values()))[0]:
    add("", "epsilon", "epsilon", "{:.2f}")
  add("", "rounds", "rounds", "{:,d}")
  add("", "seconds", "seconds", "{:,.1f}")
  return align(columns, heads=2)


def parties_table(seeds: Sequence[Rows]) -> str:
  """Formats each party's results as a plain-text table.

  Args:
    seeds: for each seed and party a dict of `name`, `model`, `parameters`, and
      accuracies from 0 to 1, those that there are of `public_accuracy`,
      `transfer_accuracy`, `final_accuracy` and `pooled_accuracy`; `None` if it
      has diverged.

  Returns:
    The table, with the mean accuracies in its last line.

  >>> print(parties_table([[
  ...     dict(name='a', model='mlp(9)', parameters=5,
  ...          transfer_accuracy=.25, final_accuracy=.5),
  ...     dict(name='b', model='mlp(3)', parameters=2,
  ...          transfer_accuracy=.75, final_accuracy=.5)]]))
  party  model   parameters  transfer %  final %
  -----  ------  ----------  ----------  -------
  a      mlp(9)           5       25.00    50.00
  b      mlp(3)           2       75.00    50.00
  mean                            50.00    50.00
  """
  columns = [
    ["party", *(p["name"] for p in seeds[0]), "mean"],
    ["model", *(p["model"] for p in seeds[0]), ""],
    ["parameters", *(f"{p['parameters']:,d}" for p in seeds[0]), ""],
  ]
  for name in ("public", "transfer", "final", "pooled"):
    if f"{name}_accuracy" not in seeds[0][0]:
      continue
    values = as_floats(
      [[p[f"{name}_accuracy"] for p in parties] for parties in seeds]
    )
    values = np.column_stack([values, values.mean(axis=1)])
    cells = [cell(of_party, factor=100) for of_party in values.T]
    columns.append([f"{name} %", *cells])
  return align(columns, names=2)


def clients_table(results: Mapping[str, Rows], personal: Container[str]) -> str:
  """A plain-text table of algorithms whose clients' models are tested.

  It says which model is tested on clients' images: the global one or their own.
  For more than ten clients it has the mean, lowest and highest accuracy.

  Args:
    results: algorithm -> the content of `result.json` of each seed.
    personal: the algorithms in which clients have their own.

  Returns:
    The table, with a line for each algorithm.
  """
  columns = [["", "algorithm", *results]]

  def add(head, title, value, factor=100, form="{:.2f}"):
    cells = [[value(r) for r in of] for of in results.values()]
    shown = [cell(values, form, factor) for values in cells]
    columns.append([head, title, *shown])

  of_clients = lambda r: as_floats(
    [c["validation_accuracy"] for c in r["clients"]]
  )
  add("global", "test %", lambda r: r["global"]["test_accuracy"])
  add("", "best %", lambda r: r["global"]["best_test_accuracy"])
  whose = ["own" if name in personal else "global" for name in results]
  columns.append(["clients", "model", *whose])
  add("", "mean %", lambda r: np.mean(of_clients(r)))
  number = max(len(of[0]["clients"]) for of in results.values())
  if number > logs.FEW:
    number = 0
    add("", "lowest %", lambda r: np.min(of_clients(r)))
    add("", "highest %", lambda r: np.max(of_clients(r)))
  for k in range(number):
    # FedAvg and FedProx give every client the global model.
    models = {of[0]["clients"][k]["model"] for of in results.values()}
    head = f"{k}: {models.pop()}" if len(models) == 1 else str(k)
    add("", head, lambda r, k=k: of_clients(r)[k])
  add("", "rounds", lambda r: r["rounds"], 1, "{:,d}")
  add("", "seconds", lambda r: r["seconds"], 1, "{:,.1f}")
  return align(columns, heads=2)


def align(
  columns: Sequence[Sequence[str]], heads: int = 1, names: int = 1
) -> str:
  """Formats columns of cells as a plain-text table.

  Args:
    columns: the columns, each starting with its headers.
    heads: how many header lines there are.
    names: how many of the first columns hold names.

  Returns:
    The table, with a rule below the headers.

  >>> print(align([['algorithm', 'fml'], ['test %', '50.0']]))
  algorithm  test %
  ---------  ------
  fml          50.0
  """
  padded = []
  for j, column in enumerate(columns):
    width = max(map(len, column))
    column = [*column[:heads], "-" * width, *column[heads:]]
    # Names are aligned left, numbers and their headers right.
    padded.append(
      [
        cell.ljust(width) if j < names or i < heads - 1 else cell.rjust(width)
        for i, cell in enumerate(column)
      ]
    )
  return "\n".join("  ".join(cells).rstrip() for cells in zip(*padded))


def mean_and_deviation(values: Any) -> tuple[Any, Any]:
  """The mean and the sample standard deviation, which is 0 for one number.

  Args:
    values: `[n, ...]`, n numbers or arrays, at least one.

  Returns:
    The mean and the deviation, whose sum of squares is divided by n - 1.

  >>> mean, deviation = mean_and_deviation([1.0, 2.0, 3.0])
  >>> float(mean), float(deviation)
  (2.0, 1.0)
  """
  ddof = min(1, len(values) - 1)
  return np.mean(values, axis=0), np.std(values, axis=0, ddof=ddof)


def as_floats(values: Any) -> np.ndarray:
  """An array in which `None`, a float that was not finite, is NaN."""
  return np.array(values, float)


def cell(
  values: Sequence[float | None], form: str = "{:.2f}", factor: float = 1
) -> str:
  """A cell of a table: a number, or mean ± standard deviation of several.

  Args:
    values: of one run or of several seeds; `None` if missing, NaN of a model
      that has diverged.
    form: the format string of a number.
    factor: from the values' unit to the table's.

  Returns:
    The cell.

  >>> cell([0.5], factor=100), cell([0.25, 0.5], factor=100)
  ('50.00', '37.50 ± 17.68')
  >>> cell([0.5, None]), cell([0.5, float('nan')])
  ('-', 'diverged')
  >>> cell([1200, 1200], '{:,d}'), cell([1200, 1300], '{:,d}')
  ('1,200', '1,250 ± 71')
  """
  known = [value for value in values if value is not None]
  if len(known) < len(values):
    return "-"
  if np.isnan(known).any():
    return "diverged"
  if isinstance(known[0], int):  # Parameters are the same for all seeds.
    if len(set(known)) > 1:  # Rounds need not be.
      return cell([float(value) for value in known], "{:,.0f}", factor)
    known = known[:1]
  if len(known) == 1:
    return form.format(factor * known[0])
  return " ± ".join(form.format(factor * v) for v in mean_and_deviation(known))


def carried_on(rows: Rows, rounds: Iterable[int]) -> Rows:
  """A run's rows, continued after an early end with the values of the last.

  >>> carried_on([{"round": 1, "x": 7}], {1, 2})
  [{'round': 1, 'x': 7}, {'round': 2, 'x': 7}]
  """
  more = sorted(t for t in rounds if t > rows[-1]["round"])
  return [*rows, *({**rows[-1], "round": t} for t in more)]


def last_and_best(
  evaluation: Mapping[str, Any], rows: Rows, owner: str
) -> dict[str, Any]:
  """A model's metrics in the last evaluation, and its best accuracies of all.

  Args:
    evaluation: the last: `'owner/metric'` -> value.
    rows: all evaluations' rows.
    owner: whose metrics.

  Returns:
    Each metric by its name, and each accuracy's best by `'best_'` and its name.

  >>> rows = [{'a/test_accuracy': x} for x in (0.5, None, 0.25)]
  >>> last_and_best({'a/test_accuracy': 0.25, 'a/test_loss': 2.0}, rows, 'a')
  {'test_accuracy': 0.25, 'best_test_accuracy': 0.5, 'test_loss': 2.0}
  """
  found = {}
  for name, value in evaluation.items():
    whose, _, metric = name.partition("/")
    if whose != owner:
      continue
    found[metric] = value
    if re.match("(test|heldout|validation)_accuracy", metric):
      known = [row[name] for row in rows if row.get(name) is not None]
      found[f"best_{metric}"] = max(known, default=None)
  return found


def write_summary(
  workdir: pathlib.Path,
  results: Mapping[str, Sequence[dict]],
  seeds: Sequence[int],
) -> None:
  """Writes the results of several seeds to `summary.json`.

  For each accuracy and perplexity of an algorithm that all seeds have, by its
  path in the results, it has the mean, the standard deviation and all values.

  Args:
    workdir: the folder of the seeds' folders.
    results: algorithm -> the content of `result.json` of each seed.
    seeds: the seeds.
  """
  algorithms = {}
  for name, of_seeds in results.items():
    leaves, found = [dict(_measures(result)) for result in of_seeds], {}
    for place in leaves[0]:
      values = [leaf.get(place) for leaf in leaves]
      if None not in values:
        mean, deviation = mean_and_deviation(values)
        found[place] = dict(mean=mean, deviation=deviation, values=values)
    algorithms[name] = found
  summary = {"seeds": seeds, "algorithms": algorithms}
  logs.write_json(workdir / "summary.json", summary)


def _measures(result: Any, place: str = "") -> Iterator[tuple[str, Any]]:
  """A result's accuracies and perplexities by path: `pools.small.test_...`."""
  parts = result.items() if isinstance(result, Mapping) else enumerate(result)
  for name, value in parts:
    if isinstance(value, Mapping | list):
      yield from _measures(value, f"{place}{name}.")
    elif re.search("accuracy|perplexity", str(name)):
      yield f"{place}{name}", value
