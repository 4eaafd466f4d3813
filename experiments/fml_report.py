"""Curves and tables of the FML experiment."""

from collections.abc import Sequence
import pathlib

import numpy as np

from hetfl import report

# With these a client ends with a model of its own, else with the global one.
_PERSONAL = ("fml", "independent")


def curve_rows(
  config: dict, rows: Sequence[dict], personal: bool = True
) -> list[dict]:
  """Rows with the one number of each model that is drawn.

  Args:
    config: the run's flags.
    rows: rows of metrics, as `logs.read_rows` reads them.
    personal: whether the clients' models are their own in all that is drawn;
      if not, a client goes by its number alone.

  Returns:
    Rows of `round`, `global/accuracy` and `client .../accuracy`.

  >>> row = {"round": 1, "client0/validation_accuracy": 0.5}
  >>> curve_rows({"client_models": ["mlp"]}, [row])
  [{'round': 1, "client 0's mlp/accuracy": 0.5}]
  >>> curve_rows({"client_models": ["mlp"]}, [row], personal=False)
  [{'round': 1, 'client 0/accuracy': 0.5}]
  """
  names = {"global/test_accuracy": "global/accuracy"}
  for k, model in enumerate(config["client_models"]):
    which = f"client {k}'s {model}" if personal else f"client {k}"
    names[f"client{k}/validation_accuracy"] = f"{which}/accuracy"
  return [
    {"round": row["round"]} | {names[n]: row[n] for n in names if n in row}
    for row in rows
  ]


def draw(
  runs: dict[str, list[dict]], config: dict, workdir: pathlib.Path
) -> None:
  """Draws the curves of one or more runs of a federation.

  Beside others independent training has a dashed line too, the best that each
  client came to (the paper's Figure 5).
  """
  personal = all(name in _PERSONAL for name in runs)
  drawn = {n: curve_rows(config, rows, personal) for n, rows in runs.items()}
  best = {}
  if len(runs) > 1:
    for row in drawn.get("independent", ()):
      for name, value in row.items():
        if name != "round" and value is not None:
          line = best.setdefault(name.removesuffix("/accuracy"), {})
          line["independent"] = max(value, line.get("independent", 0.0))
  report.curves(
    drawn,
    workdir / "curves.png",
    metric="accuracy",
    ylabel="Test or validation accuracy (%)",
    published=best,
    dashed="best",
    title=f"{','.join(config['dataset'])}, {config['partition']}",
  )


def table(results: dict[str, dict]) -> str:
  """A plain-text table of results, a line an algorithm."""
  percent = lambda x: "-" if x is None else f"{100 * x:.2f}"
  columns = [
    ["", "algorithm", *results],
    ["global", "test %"],
    ["", "best %"],
    ["clients", "mean %"],
  ]
  for result in results.values():
    accuracies = [c["validation_accuracy"] for c in result["clients"]]
    columns[1].append(percent(result["global"]["test_accuracy"]))
    columns[2].append(percent(result["global"]["best_test_accuracy"]))
    columns[3].append(percent(float(np.mean(accuracies))))
  for k in range(max(len(r["clients"]) for r in results.values())):
    clients = [r["clients"][k] for r in results.values()]
    accuracies = [percent(c["validation_accuracy"]) for c in clients]
    # FedAvg and FedProx give every client the global model.
    models = {client["model"] for client in clients}
    head = f"{k}: {models.pop()}" if len(models) == 1 else str(k)
    columns.append(["", head, *accuracies])
  for name, form in (("rounds", "{:,d}"), ("seconds", "{:,.1f}")):
    columns.append(
      ["", name, *(form.format(r[name]) for r in results.values())]
    )
  return report.align(columns, heads=2)
