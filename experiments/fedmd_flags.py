"""The flag files of FedMD's four environments and its weak parties.

`make_flags.py` writes them. What the runs share is here and in
`fedmd.DEFAULTS`, once; published numbers are in `published/fedmd.csv`.
"""

import csv
import pathlib
from typing import Any

import fedmd

from hetfl import logs

TABLE = pathlib.Path(__file__).resolve().parent / "published/fedmd.csv"

TITLES = {
  "mnist_letters_iid": "MNIST / FEMNIST i.i.d.",
  "mnist_letters_by_writer": "MNIST / FEMNIST non-i.i.d.",
  "cifar_iid": "CIFAR i.i.d.",
  "cifar_noniid": "CIFAR non-i.i.d.",
}
# A flag file says all of these, though they are the defaults too.
SHARED = (
  "models",
  "num_parties",
  "rounds",
  "learning_rate",
  "public_epochs",
  "public_batch_size",
  "transfer_epochs",
  "transfer_batch_size",
  "pooled_epochs",
  "public_subset",
  "digest_batch_size",
  "digest_epochs",
  "revisit_batch_size",
  "revisit_epochs",
)
# Supplement, results 3: two fully connected parties, heard as much as the
# others or less; how much less is not said there.
WEAK = {"equal": [1.0] * 10, "suppressed": [1.0] * 8 + [0.1] * 2}


def published() -> list[dict[str, str]]:
  """The rows of the published numbers."""
  lines = TABLE.read_text(encoding="utf-8").splitlines()
  return list(csv.DictReader(line for line in lines if line[0] != "#"))


def _bounds(environment: str) -> str:
  (row,) = (
    row
    for row in published()
    if (row["quantity"], row["environment"]) == ("pooled", environment)
  )
  values = [row[str(k)] for k in range(10)]
  return f"{min(values)} to {max(values)} %"


def _file(
  name: str, about: list[str], environment: str, more: dict[str, Any]
) -> tuple[str, str]:
  """One flag file's name and text."""
  flags = {"environment": environment}
  flags |= {n: fedmd.DEFAULTS[environment][n] for n in SHARED}
  if environment == "mnist_letters_by_writer":
    flags["min_writer_examples"] = 18
  else:
    flags["examples_per_class"] = fedmd.DEFAULTS[environment][
      "examples_per_class"
    ]
  if environment == "cifar_noniid":
    flags["superclasses"] = "paper"
  flags |= more
  head = [
    *(f"# {line}" for line in about),
    "#   python experiments/fedmd.py \\",
    f"#       --flagfile=experiments/flags/{name} --data_dir=DIR",
    "# Hours on a CPU; --width=0.125 --public_epochs=5 for a first look.",
    f"# Published upper bound, pooled data: {_bounds(environment)}.",
    "# Not said in the paper, from its code: epochs, batches, loss, layers.",
  ]
  return name, "\n".join(head) + "\n" + logs.flags_text(flags) + "\n"


def flag_files() -> dict[str, str]:
  """Each flag file's name and text."""
  files = [
    _file(f"fedmd_{environment}.flags", [f"FedMD, {title}"], environment, {})
    for environment, title in TITLES.items()
  ]
  files.append(
    _file(
      "fedmd_cifar_noniid_code.flags",
      ["FedMD, CIFAR non-i.i.d. as in the released code: table 1's models, and"]
      + ["superclasses 0, 1, 7, 9, 12, 18"],
      "cifar_noniid",
      {"models": "table1", "superclasses": "code"},
    )
  )
  for name, weights in WEAK.items():
    files.append(
      _file(
        f"fedmd_weak_{name}.flags",
        [
          f"FedMD with two weak parties, weights {name}; to share the training",
          "before the collaboration with the other such run:",
          "--pretrained=FOLDER_OF_THE_OTHER_RUN",
        ],
        "cifar_iid",
        {"weak_parties": 2, "consensus_weights": weights},
      )
    )
  return dict(files)
