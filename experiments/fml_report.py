"""Curves and tables of the FML experiment."""

from collections.abc import Sequence
import pathlib

import numpy as np

from hetfl.run import logs, report

# In these a client ends with its own model, in others with the global one.
_PERSONAL = ("fml", "independent")


def curve_rows(config: dict, rows: Sequence[dict]) -> list[dict]:
  """Rows with only the metric of each model that is drawn.

  Args:
    config: the run's flags.
    rows: rows of metrics, as `logs.read_rows` reads them.

  Returns:
    Rows of `round`, `global/accuracy` and `clientN/accuracy`; of more than
    ten clients only their mean, `clients/accuracy`.

  >>> row = {"round": 1, "client0/validation_accuracy": 0.5}
  >>> curve_rows({"client_models": ["mlp"]}, [row])
  [{'round': 1, 'client0/accuracy': 0.5}]
  """
  number = len(config["client_models"])
  clients = (f"client{k}" for k in range(number))
  names = {"global/test_accuracy": "global/accuracy"} | {
    f"{client}/validation_accuracy": f"{client}/accuracy"
    for client in (clients if number <= logs.FEW else ["clients"])
  }
  return [
    {"round": row["round"]} | {names[n]: row[n] for n in names if n in row}
    for row in rows
  ]


def titles(config: dict, algorithms: Sequence[str]) -> dict[str, str]:
  """Titles of the panels, which say whose model is tested on which images.

  Args:
    config: the flags of any of the runs.
    algorithms: the algorithms whose lines are in each panel.

  Returns:
    Panel -> title.

  >>> titles({"client_models": ["mlp"]}, ["fml"])["client0"]
  "client 0's own mlp, on its images"
  >>> titles({"client_models": ["mlp"]}, ["fedavg"])["client0"]
  "global model, on client 0's images"
  >>> titles({"client_models": ["mlp"]}, ["fedavg", "fml"])["client0"]
  "client 0's images (its own model: mlp)"
  """
  own = [name for name in algorithms if name in _PERSONAL]
  found = {"global": "global model, on test images"}
  if len(own) == len(algorithms):
    found["clients"] = "clients' own models, on their images (mean)"
    form = "client {}'s own {}, on its images"
  elif own:
    found["clients"] = "clients' images (mean)"
    form = "client {}'s images (its own model: {})"
  else:
    found["clients"] = "global model, on clients' images (mean)"
    form = "global model, on client {}'s images"
  for k, model in enumerate(config["client_models"]):
    found[f"client{k}"] = form.format(k, model)
  return found


def draw(
  runs: dict[str, list[list[dict]]], config: dict, workdir: pathlib.Path
) -> None:
  """Draws the curves of one or more algorithms, with one or more seeds each.

  Next to other algorithms, independent training also has a dashed line: each
  client's best accuracy (the paper's Figure 5).
  """
  drawn = {
    name: [curve_rows(config, rows) for rows in seeds]
    for name, seeds in runs.items()
  }
  best = {}
  if len(runs) > 1:
    seeds = drawn.get("independent", ())
    for name in {name for rows in seeds for row in rows for name in row}:
      bests = [max(row.get(name) or 0.0 for row in rows) for rows in seeds]
      if name != "round":
        best[name.removesuffix("/accuracy")] = {"independent": np.mean(bests)}
  whose = ""
  own = [name for name in runs if name in _PERSONAL]
  if 0 < len(own) < len(runs):
    shared = ", ".join(name for name in runs if name not in own)
    whose = (
      f"\nOn clients' images: {shared} with the global model;"
      f" {', '.join(own)} with the clients' own"
    )
  report.curves(
    drawn,
    workdir / "curves.png",
    metric="accuracy",
    ylabel="Test or validation accuracy (%)",
    published=best,
    dashed="best",
    title=f"{','.join(config['dataset'])}, {config['partition']}{whose}",
    titles=titles(config, list(runs)),
  )


def table(results: dict[str, list[dict]]) -> str:
  """A plain-text table of all seeds' results, one line per algorithm.

  It says which model is tested on clients' images: the global one or their own.
  Of more than ten clients it has the mean, the lowest and the highest accuracy.
  """
  heads = {("global", "test %"): lambda r: r["global"]["test_accuracy"]}
  heads["", "best %"] = lambda r: r["global"]["best_test_accuracy"]
  of_clients = lambda r: [c["validation_accuracy"] for c in r["clients"]]
  heads["", "mean %"] = lambda r: np.mean(of_clients(r))
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
  whose = ["own" if name in _PERSONAL else "global" for name in results]
  columns.insert(3, ["clients", "model", *whose])
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
