"""Writes the flag files of the papers' tables and figures.

  python experiments/make_flags.py

Here are those of the CIFAR half of the codistillation Table 1: each cell of
the table is one row of `published/codist_table1_cifar.csv`; what the cells
share is here and in `codist.DEFAULTS`, once. `fml_flags.py` has those of
Federated Mutual Learning, `fedmd_flags.py` FedMD's. A test checks that the
files are up to date.
"""

import csv
import pathlib

import codist
import fedmd_flags
import fml_flags

from hetfl import logs

HERE = pathlib.Path(__file__).resolve().parent
TABLE = HERE / "published" / "codist_table1_cifar.csv"

# A flag file says all of these, though they are the defaults too.
SHARED = (
  "rounds",
  "clients_per_round",
  "client_batch_size",
  "client_lr",
  "server_lr",
)
DISTILL = ("distill_lr", "distill_steps", "distill_batch_size")
EXTRA = {
  "fedavg": (),
  "periodic": (*DISTILL, "codist_period"),
  "merged": (*DISTILL, "merge_alpha"),
}
# The paper tuned these and published none: see BUILD_NOTES.md.
TARGETS = {"teacher_temperature": 1, "student_regularization": 0.01}
TUNED = {
  "fedavg": {},
  "periodic": TARGETS,
  "merged": TARGETS,
}
MINUTES = {"fedavg": 15, "periodic": 16, "merged": 55}


def published() -> list[dict[str, str]]:
  """The rows of Table 1."""
  lines = TABLE.read_text(encoding="utf-8").splitlines()
  return list(csv.DictReader(line for line in lines if line[0] != "#"))


def flag_files() -> dict[str, str]:
  """Each flag file's name and text, of all papers."""
  return codist_files() | fml_flags.flag_files() | fedmd_flags.flag_files()


def codist_files() -> dict[str, str]:
  """Each flag file's name and text, of the codistillation paper."""
  files = {}
  for row in published():
    algorithm = row["algorithm"]
    domain = {"": "", "in_domain": "_in", "cifar10": "_out"}
    name = (
      f"table1_cifar_{row['high_capacity_examples']}_{algorithm}"
      f"{domain[row['distill_data']]}.flags"
    )
    defaults = codist.DEFAULTS["cifar100"][algorithm]
    flags = {
      "algorithm": algorithm,
      "dataset": "cifar100",
      # 100 examples a client.
      "high_capacity_clients": int(row["high_capacity_examples"]) // 100,
    }
    if row["distill_data"]:
      flags["distill_data"] = row["distill_data"]
    flags |= {n: defaults[n] for n in (*SHARED, *EXTRA[algorithm])}
    flags |= TUNED[algorithm]
    head = [
      f"# Table 1, CIFAR, |P_H| = {row['high_capacity_examples']}:"
      f" {algorithm} {row['distill_data']}".rstrip(),
      "#   python experiments/codist.py \\",
      f"#       --flagfile=experiments/flags/{name} --data_dir=DIR",
      f"# About {MINUTES[algorithm]} minutes on two CPU threads of one core.",
      f"# Published: small {row['small']} %, large {row['large']} %.",
      "# What we got: results/README.md.",
    ]
    files[name] = "\n".join(head) + "\n" + logs.flags_text(flags) + "\n"
  return files


def main() -> None:
  """Writes the files."""
  folder = HERE / "flags"
  folder.mkdir(exist_ok=True)
  for name, text in flag_files().items():
    (folder / name).write_text(text, encoding="utf-8")
    print(folder / name)


if __name__ == "__main__":
  main()
