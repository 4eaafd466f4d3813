"""Curves and tables of the FML experiment."""

from collections.abc import Sequence
import pathlib

import numpy as np

from hetfl import report


def curve_rows(config: dict, rows: Sequence[dict]) -> list[dict]:
  """Rows with the one number of each model that is drawn."""
  models = config["client_models"]
  names = {"global/test_accuracy": "global/accuracy"}
  for k, model in enumerate(models):
    names[f"client{k}/validation_accuracy"] = f"client {k}'s {model}/accuracy"
  return [
    {"round": row["round"]} | {names[n]: row[n] for n in names if n in row}
    for row in rows
  ]


def draw(
  runs: dict[str, list[dict]], config: dict, workdir: pathlib.Path
) -> None:
  """Draws the curves of one or more runs of a federation."""
  report.curves(
    {name: curve_rows(config, rows) for name, rows in runs.items()},
    workdir / "curves.png",
    metric="accuracy",
    ylabel="Test or validation accuracy (%)",
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
    columns.append(["", f"{k}: {clients[-1]['model']}", *accuracies])
  for name, form in (("rounds", "{:,d}"), ("seconds", "{:,.1f}")):
    columns.append(
      ["", name, *(form.format(r[name]) for r in results.values())]
    )
  return report.align(columns, heads=2)
