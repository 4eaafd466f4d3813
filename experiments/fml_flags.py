"""The cells of Federated Mutual Learning's tables and figures.

What the runs share is here and in `fml.DEFAULTS`, once.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import fml
import tables as tables_lib

# A flag file says all of these, though they are the defaults too.
_SHARED = ("rounds", "local_epochs", "batch_size", "learning_rate")
_EXTRA = {
  "fedavg": {},
  "fedprox": {"prox_mu": 0.01},
  "fml": {"alpha": 0.5, "beta": 0.5},
  "independent": {},
}
_PARTITIONS = {
  "iid": "IID",
  "noniid1": "Non-IID (1)",
  "noniid2": "Non-IID (2)",
  "noniid3": "Non-IID (3)",
}
# The paper's Figure 5: 1 MLP, 1 LeNet5, 1 CNN1, 2 CNN2.
_UNLIKE = ("mlp", "lenet5", "cnn1", "cnn2", "cnn2")
_GLOBAL = "global.test_accuracy"
_CLIENTS = "clients.*.validation_accuracy"


def tables() -> dict[str, tables_lib.Table]:
  """The tables and figures of Shen et al. 2020."""
  return {
    name: tables_lib.Table(f"Shen et al. 2020, {title}", "fml.py", cells)
    for name, title, cells in (
      ("fml_table1", "Table 1", _table1()),
      ("fml_fig4", "Figure 4, data heterogeneity", _figure4()),
      ("fml_fig5", "Figure 5, model heterogeneity", _figure5()),
      ("fml_fig6", "Figure 6, objective heterogeneity", _figure6()),
      ("fml_sec6", "section 6, catfish and sardines", _section6()),
    )
  }


def _cell(
  name: str,
  title: str,
  algorithms: Sequence[str],
  flags: Mapping[str, Any],
  paths: Mapping[str, float | None],
  notes: Sequence[str] = (),
) -> tables_lib.Cell:
  datasets = flags["dataset"].split(",")
  flags = {"algorithm": algorithms, **flags}
  flags["num_clients"] = len(datasets) if len(datasets) > 1 else 5
  flags |= {n: fml.DEFAULTS[datasets[0]][n] for n in _SHARED}
  for algorithm in algorithms:
    flags |= _EXTRA[algorithm]
  if len(algorithms) > 1:
    paths = {f"{a}.{p}": x for a in algorithms for p, x in paths.items()}
  return tables_lib.Cell(
    name,
    title,
    flags,
    paths,
    (*notes, "Not said in the paper: mu, CNN1's padding and width."),
  )


def _table1() -> list[tables_lib.Cell]:
  cells = []
  for row in tables_lib.read_published("fml_table1.csv"):
    dataset, model, split, algorithm, accuracy = row.values()
    cells.append(
      _cell(
        f"fml_table1_{dataset}_{model}_{split}_{algorithm}",
        f"{dataset}, {model}, {_PARTITIONS[split]}, {algorithm}",
        [algorithm],
        {
          "dataset": dataset,
          "partition": split,
          "global_model": model,
          "client_models": model,
        },
        {_GLOBAL: float(accuracy)},
      )
    )
  return cells


def _figure4() -> list[tables_lib.Cell]:
  return [
    _cell(
      f"fml_fig4_data_heterogeneity_{split}",
      title,
      ["fedavg", "fedprox", "fml"],
      {
        "dataset": "cifar10",
        "partition": split,
        "global_model": "cnn1",
        "client_models": "cnn1",
      },
      {_CLIENTS: None},
      (
        "What a client ends with, on its private validation images: FML's own",
        "model, else the global one. Data set and model are our choice.",
      ),
    )
    for split, title in _PARTITIONS.items()
  ]


def _unlike(models: Sequence[str]) -> dict[str, Any]:
  return {
    "dataset": "cifar10",
    "partition": "iid",
    "global_model": "lenet5",
    "client_models": models,
  }


def _figure5() -> list[tables_lib.Cell]:
  return [
    _cell(
      "fml_fig5_model_heterogeneity",
      "five unlike clients, LeNet5 as the global model",
      ["fml", "independent"],
      _unlike(_UNLIKE),
      {_CLIENTS: None},
    )
  ]


def _figure6() -> list[tables_lib.Cell]:
  return [
    _cell(
      "fml_fig6_objective_heterogeneity",
      "LeNet5 on CIFAR-10 and CNN1 on CIFAR-100",
      ["fml", "independent"],
      {
        "dataset": "cifar10,cifar100",
        "partition": "iid",
        "global_model": "cnn2_conv",
        "client_models": ("lenet5", "cnn1"),
      },
      {
        "clients.0.validation_accuracy": None,
        "clients.1.validation_accuracy": None,
      },
      ("They share CNN2's convolutions, each with an adaptor of its own.",),
    )
  ]


def _section6() -> list[tables_lib.Cell]:
  mlps = ("mlp",) * 4
  paths = {
    _GLOBAL: None,
    "clients.0.validation_accuracy": None,
    _CLIENTS: None,
  }
  return [
    _cell(f"fml_sec6_{name}", title, ["fml"], flags, paths)
    for name, title, flags in (
      ("sardines", "five weak clients", _unlike((*mlps, "mlp"))),
      (
        "catfish",
        "one strong client among weak ones",
        _unlike((*mlps, "cnn2")),
      ),
      (
        "bad_client",
        "one client trains on random labels",
        _unlike(_UNLIKE) | {"bad_clients": 4, "bad_label_share": 1.0},
      ),
    )
  ]
