"""The flag files of Federated Mutual Learning's tables and figures.

`make_flags.py` writes them. What the runs share is here and in
`fml.DEFAULTS`, once; Table 1's cells are the rows of
`published/fml_table1.csv`.
"""

import csv
import pathlib
from typing import Any

import fml

from hetfl import logs

TABLE = pathlib.Path(__file__).resolve().parent / "published/fml_table1.csv"

# A flag file says all of these, though they are the defaults too.
SHARED = ("rounds", "local_epochs", "batch_size", "learning_rate")
EXTRA = {
  "fedavg": {},
  "fedprox": {"prox_mu": 0.01},
  "fml": {"alpha": 0.5, "beta": 0.5},
  "independent": {},
}
PARTITIONS = {
  "iid": "IID",
  "noniid1": "Non-IID (1)",
  "noniid2": "Non-IID (2)",
  "noniid3": "Non-IID (3)",
}
# The paper's Figure 5: 1 MLP, 1 LeNet5, 1 CNN1, 2 CNN2.
UNLIKE = ("mlp", "lenet5", "cnn1", "cnn2", "cnn2")


def published() -> list[dict[str, str]]:
  """The cells of Table 1."""
  lines = TABLE.read_text(encoding="utf-8").splitlines()
  return list(csv.DictReader(line for line in lines if line[0] != "#"))


def _file(
  name: str, about: list[str], algorithms: list[str], flags: dict[str, Any]
) -> tuple[str, str]:
  """One flag file's name and text."""
  datasets = flags["dataset"].split(",")
  flags = {"algorithm": algorithms} | flags
  flags["num_clients"] = len(datasets) if len(datasets) > 1 else 5
  flags |= {n: fml.DEFAULTS[datasets[0]][n] for n in SHARED}
  for algorithm in algorithms:
    flags |= EXTRA[algorithm]
  head = [
    *(f"# {line}" for line in about),
    "#   python experiments/fml.py \\",
    f"#       --flagfile=experiments/flags/{name} --data_dir=DIR",
    "# Not said in the paper: mu, CNN1's padding and width (BUILD_NOTES.md).",
  ]
  return name, "\n".join(head) + "\n" + logs.flags_text(flags) + "\n"


def flag_files() -> dict[str, str]:
  """Each flag file's name and text."""
  files = []
  for row in published():
    dataset, model, split, algorithm, accuracy = row.values()
    about = [
      f"FML Table 1, {dataset}, {model}, {PARTITIONS[split]}: {algorithm}.",
      f"Published: {accuracy} % of the global model on the test set.",
    ]
    files.append(
      _file(
        f"fml_table1_{dataset}_{model}_{split}_{algorithm}.flags",
        about,
        [algorithm],
        {
          "dataset": dataset,
          "partition": split,
          "global_model": model,
          "client_models": model,
        },
      )
    )
  for split, title in PARTITIONS.items():
    about = [
      f"FML Figure 4, {title}: what a client ends with, on its private",
      "validation images: FML's own model, else the global one. The paper does",
      "not say which data set and model; these are ours.",
    ]
    files.append(
      _file(
        f"fml_fig4_data_heterogeneity_{split}.flags",
        about,
        ["fedavg", "fedprox", "fml"],
        {
          "dataset": "cifar10",
          "partition": split,
          "global_model": "cnn1",
          "client_models": "cnn1",
        },
      )
    )
  cifar10 = {"dataset": "cifar10", "partition": "iid"}
  unlike = cifar10 | {"global_model": "lenet5", "client_models": UNLIKE}
  about = [
    "FML Figure 5, model heterogeneity: five clients with unlike models,",
    "LeNet5 as the global one, against the same models trained independently.",
  ]
  files.append(
    _file(
      "fml_fig5_model_heterogeneity.flags",
      about,
      ["fml", "independent"],
      unlike,
    )
  )
  about = [
    "FML Figure 6, objective heterogeneity: LeNet5 on CIFAR-10 and CNN1 on",
    "CIFAR-100 share CNN2's convolutions, each with an adaptor of its own,",
    "against the same models trained independently.",
  ]
  files.append(
    _file(
      "fml_fig6_objective_heterogeneity.flags",
      about,
      ["fml", "independent"],
      {
        "dataset": "cifar10,cifar100",
        "partition": "iid",
        "global_model": "cnn2_conv",
        "client_models": ("lenet5", "cnn1"),
      },
    )
  )
  sardines = unlike | {"client_models": ("mlp",) * 5}
  for name, about, flags in (
    (
      "sardines",
      "FML section 6, the catfish effect: five weak clients alone.",
      sardines,
    ),
    (
      "catfish",
      "FML section 6, the catfish effect: one strong client among the weak.",
      sardines | {"client_models": ("mlp",) * 4 + ("cnn2",)},
    ),
    (
      "bad_client",
      "FML section 6: one client trains on random labels.",
      unlike | {"bad_clients": 4, "bad_label_share": 1.0},
    ),
  ):
    files.append(_file(f"fml_sec6_{name}.flags", [about], ["fml"], flags))
  return dict(files)
