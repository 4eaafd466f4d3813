"""Curves and tables of the FML experiment."""

from collections.abc import Sequence
import pathlib

import numpy as np

from hetfl import logs, report

# In these a client ends with its own model, in others with the global one.
_PERSONAL = ("fml", "independent")


def curve_rows(
  config: dict, rows: Sequence[dict], personal: bool = True
) -> list[dict]:
  """Rows with only the metric of each model that is drawn.

  Args:
    config: the run's flags.
    rows: rows of metrics, as `logs.read_rows` reads them.
    personal: whether clients have models of their own in all algorithms drawn;
      if not, their labels have only their numbers.

  Returns:
    Rows of `round`, `global/accuracy` and `client .../accuracy`; of more than
    ten clients only their mean, `average client/accuracy`.

  >>> row = {"round": 1, "client0/validation_accuracy": 0.5}
  >>> curve_rows({"client_models": ["mlp"]}, [row])
  [{'round': 1, "client 0's mlp/accuracy": 0.5}]
  >>> curve_rows({"client_models": ["mlp"]}, [row], personal=False)
  [{'round': 1, 'client 0/accuracy': 0.5}]
  """
  names = {"global/test_accuracy": "global/accuracy"}
  few = len(config["client_models"]) <= logs.FEW
  if not few:
    names["clients/validation_accuracy"] = "average client/accuracy"
  for k, model in enumerate(config["client_models"] if few else ()):
    which = f"client {k}'s {model}" if personal else f"client {k}"
    names[f"client{k}/validation_accuracy"] = f"{which}/accuracy"
  return [
    {"round": row["round"]} | {names[n]: row[n] for n in names if n in row}
    for row in rows
  ]


def draw(
  runs: dict[str, list[list[dict]]], config: dict, workdir: pathlib.Path
) -> None:
  """Draws the curves of one or more algorithms, with one or more seeds each.

  Next to other algorithms, independent training also has a dashed line: each
  client's best accuracy (the paper's Figure 5).
  """
  personal = all(name in _PERSONAL for name in runs)
  drawn = {
    name: [curve_rows(config, rows, personal) for rows in seeds]
    for name, seeds in runs.items()
  }
  best = {}
  if len(runs) > 1:
    seeds = drawn.get("independent", ())
    for name in {name for rows in seeds for row in rows for name in row}:
      bests = [max(row.get(name) or 0.0 for row in rows) for rows in seeds]
      if name != "round":
        best[name.removesuffix("/accuracy")] = {"independent": np.mean(bests)}
  report.curves(
    drawn,
    workdir / "curves.png",
    metric="accuracy",
    ylabel="Test or validation accuracy (%)",
    published=best,
    dashed="best",
    title=f"{','.join(config['dataset'])}, {config['partition']}",
  )


def table(results: dict[str, list[dict]]) -> str:
  """A plain-text table of all seeds' results, one line per algorithm.

  Of more than ten clients it has the mean, the lowest and the highest accuracy.
  """
  heads = {("global", "test %"): lambda r: r["global"]["test_accuracy"]}
  heads["", "best %"] = lambda r: r["global"]["best_test_accuracy"]
  of_clients = lambda r: [c["validation_accuracy"] for c in r["clients"]]
  heads["clients", "mean %"] = lambda r: np.mean(of_clients(r))
  number = max(len(of[0]["clients"]) for of in results.values())
  if number > logs.FEW:
    heads["", "lowest %"] = lambda r: min(of_clients(r))
    heads["", "highest %"] = lambda r: max(of_clients(r))
  columns = [["", "algorithm", *results]]
  for head, value in heads.items():
    cells = [
      report.cell([value(r) for r in of], factor=100) for of in results.values()
    ]
    columns.append([*head, *cells])
  for k in range(number if number <= logs.FEW else 0):
    clients = [[r["clients"][k] for r in of] for of in results.values()]
    accuracies = [
      report.cell([c["validation_accuracy"] for c in of], factor=100)
      for of in clients
    ]
    # FedAvg and FedProx give every client the global model.
    models = {of[0]["model"] for of in clients}
    head = f"{k}: {models.pop()}" if len(models) == 1 else str(k)
    columns.append(["", head, *accuracies])
  for name, form in (("rounds", "{:,d}"), ("seconds", "{:,.1f}")):
    cells = [
      report.cell([r[name] for r in of], form) for of in results.values()
    ]
    columns.append(["", name, *cells])
  return report.align(columns, heads=2)
