"""The cells of Federated Mutual Learning's tables and figures.

The flags that runs share are defined once, here and in `fml_settings.DEFAULTS`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import fml_settings
import numpy as np
import tables as tables_lib

# Every flag file sets these, although they are also the defaults.
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
_BEST_GLOBAL = "global.best_test_accuracy"
_CLIENTS = "clients.*.validation_accuracy"
# All of the five clients but the last, the strong or the badly trained one.
_OTHERS = "clients.0-3.validation_accuracy"


def tables() -> dict[str, tables_lib.Table]:
  """The tables and figures of Shen et al. 2020."""
  return {
    name: tables_lib.Table(f"Shen et al. 2020, {title}", "fml.py", cells)
    for name, title, cells in (
      ("fml_table1", "Table 1", _table1()),
      ("fml_fig4", "Figures 3 and 4, data heterogeneity", _figure4()),
      ("fml_fig5", "Figure 5, model heterogeneity", _figure5()),
      ("fml_fig6", "Figure 6, objective heterogeneity", _figure6()),
      ("fml_sec6", "section 6, catfish and sardines", _section6()),
      ("fml_dynamic", "section 6, dynamic alpha and beta", _dynamic()),
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
  flags |= {n: fml_settings.DEFAULTS[datasets[0]][n] for n in _SHARED}
  for algorithm in algorithms:
    flags = _EXTRA[algorithm] | flags
  if {*algorithms} <= {"fedavg", "fedprox"}:
    flags["merge_weights"] = "examples"  # Equation 2; FML's are equal.
  return tables_lib.Cell(name, title, flags, paths, (*notes, _not_said(flags)))


def _not_said(flags: Mapping[str, Any]) -> str:
  """Names those of a cell's settings that the paper does not give."""
  models = {flags["global_model"].removesuffix("_conv")}
  if {"fml", "independent"} & set(flags["algorithm"]):
    models |= set(np.atleast_1d(flags["client_models"]))
  parts = {
    "the learning rate": True,
    "mu": "prox_mu" in flags,
    "alpha, beta": "alpha" in flags,
    "augmentation": "cifar" in flags["dataset"],
    "CNN1's padding and width": "cnn1" in models,
    "CNN2's padding": "cnn2" in models,
  }
  return f"Not said in the paper: {', '.join(p for p in parts if parts[p])}."


def _of_each(
  algorithms: Sequence[str], paths: Sequence[str]
) -> dict[str, None]:
  """The same numbers for each algorithm; the paper only plots them."""
  return {f"{a}.{path}": None for a in algorithms for path in paths}


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
        {_GLOBAL: None, _BEST_GLOBAL: float(accuracy)},
        (
          "The paper does not say which round's accuracy it gives. Its code",
          "says the best of all evaluations, so it stands beside our best.",
        ),
      )
    )
  return cells


def _figure4() -> list[tables_lib.Cell]:
  algorithms = ["fedavg", "fedprox", "fml"]
  return [
    _cell(
      f"fml_fig4_data_heterogeneity_{split}",
      title,
      algorithms,
      {
        "dataset": "cifar10",
        "partition": split,
        "global_model": "cnn1",
        "client_models": "cnn1",
      },
      _of_each(algorithms, [_GLOBAL, _CLIENTS]),
      (
        "Figure 3: the global model on the test images. Figure 4: what a",
        "client ends with, on its private validation images: FML's own model,",
        "else the global one. Data set and model are our choice.",
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
  paths = {}
  for k in range(len(_UNLIKE)):
    paths[f"fml.clients.{k}.validation_accuracy"] = None
    paths[f"independent.clients.{k}.best_validation_accuracy"] = None
  return [
    _cell(
      "fml_fig5_model_heterogeneity",
      "five different clients, LeNet5 as the global model",
      ["fml", "independent"],
      _unlike(_UNLIKE),
      paths | _of_each(["fml"], [_OTHERS, _GLOBAL]),
      (
        "FML's clients are compared with the best that each comes to alone,",
        "the figure's dashed lines.",
      ),
    )
  ]


def _figure6() -> list[tables_lib.Cell]:
  algorithms = ["fml", "independent"]
  clients = [f"clients.{k}.validation_accuracy" for k in range(2)]
  return [
    _cell(
      "fml_fig6_objective_heterogeneity",
      "LeNet5 on CIFAR-10 and CNN1 on CIFAR-100",
      algorithms,
      {
        "dataset": "cifar10,cifar100",
        "partition": "iid",
        "global_model": "cnn2_conv",
        "client_models": ("lenet5", "cnn1"),
      },
      _of_each(algorithms, clients),
      ("They share CNN2's convolutions, each with an adaptor of its own.",),
    )
  ]


def _section6() -> list[tables_lib.Cell]:
  """The numbers are of clients 0 to 3, since the last client differs.

  The badly trained client is among different models and among equal ones: the
  controls are this table's first and fourth cells.
  """
  ours = "Data set, models and number of clients are our choice."
  mlps = ("mlp",) * 4
  paths = dict.fromkeys(
    [_OTHERS, *(f"clients.{k}.validation_accuracy" for k in range(4)), _GLOBAL]
  )
  bad = {"bad_clients": 4, "bad_label_share": 1.0}
  beside = "Clients 0 to 3 are to be put beside those of"
  return [
    _cell(f"fml_sec6_{name}", title, ["fml"], flags, paths, (*notes, ours))
    for name, title, flags, notes in (
      (
        "sardines",
        "five weak clients",
        _unlike((*mlps, "mlp")),
        (beside, "fml_sec6_catfish."),
      ),
      (
        "catfish",
        "one strong client, 4, among weak ones",
        _unlike((*mlps, "cnn2")),
        (beside, "fml_sec6_sardines, which has no catfish."),
      ),
      (
        "bad_sardine",
        "five weak clients, client 4 trains on random labels",
        _unlike((*mlps, "mlp")) | bad,
        (beside, "fml_sec6_sardines, where client 4 has true labels."),
      ),
      (
        "good_client",
        "five different clients",
        _unlike(_UNLIKE),
        (beside, "fml_sec6_bad_client."),
      ),
      (
        "bad_client",
        "the same, client 4 trains on random labels",
        _unlike(_UNLIKE) | bad,
        (beside, "fml_sec6_good_client, where client 4 has true labels."),
      ),
    )
  ]


def _dynamic() -> list[tables_lib.Cell]:
  return [
    _cell(
      name,
      title,
      ["fml"],
      {
        "dataset": "cifar10",
        "partition": "iid",
        "global_model": "cnn1",
        "client_models": "cnn1",
        **weights,
      },
      dict.fromkeys([_GLOBAL, _BEST_GLOBAL, _CLIENTS]),
      ("Data set, model, values and the straight line are our choice.",),
    )
    for name, title, weights in (
      ("fml_dynamic_constant", "alpha and beta are 0.5 in all rounds", {}),
      (
        "fml_dynamic",
        "alpha falls and beta rises over the rounds",
        {"alpha": (0.9, 0.5), "beta": (0.5, 0.9)},
      ),
    )
  ]
