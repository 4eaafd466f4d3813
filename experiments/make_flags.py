"""Writes the flag files of the CIFAR half of the codistillation Table 1.

  python experiments/make_flags.py

Each cell of the table is one row of `published/codist_table1_cifar.csv`; what
the cells share is here, once. A test checks that the files are up to date.
"""

import csv
import pathlib

HERE = pathlib.Path(__file__).resolve().parent
TABLE = HERE / "published" / "codist_table1_cifar.csv"

# The paper's settings, appendix C. They are the defaults too, but a flag file
# should say what it runs.
SHARED = {
  "dataset": "cifar100",
  "rounds": 1500,
  "clients_per_round": 20,
  "client_batch_size": 20,
  "client_epochs": 1,
  "server_optimizer": "adam",
}
DISTILL = {
  "periodic": {"codist_period": 200, "distill_steps": 200},
  "merged": {"distill_steps": 32},
}
# The paper tuned these and published none; see BUILD_NOTES.md for our search.
RATES = {
  "fedavg": {"client_lr": "0.05", "server_lr": "0.005,0.002"},
  "periodic": {
    "client_lr": "0.02",
    "server_lr": "0.005,0.002",
    "distill_lr": "0.001,0.001",
    "distill_batch_size": 128,
    "teacher_temperature": "1",
    "student_regularization": "0.01",
  },
  "merged": {
    "client_lr": "0.02",
    "server_lr": "0.005,0.002",
    "distill_lr": "0.001,0.001",
    "distill_batch_size": 128,
    "teacher_temperature": "1",
    "student_regularization": "0.01",
    "merge_alpha": "0.5",
  },
}
MINUTES = {"fedavg": 15, "periodic": 16, "merged": 55}


def published() -> list[dict[str, str]]:
  """The rows of Table 1."""
  lines = TABLE.read_text(encoding="utf-8").splitlines()
  return list(csv.DictReader(line for line in lines if line[0] != "#"))


def flag_files() -> dict[str, str]:
  """Each flag file's name and text."""
  files = {}
  for row in published():
    algorithm = row["algorithm"]
    domain = {"": "", "in_domain": "_in", "cifar10": "_out"}
    name = (
      f"table1_cifar_{row['high_capacity_examples']}_{algorithm}"
      f"{domain[row['distill_data']]}.flags"
    )
    flags = {
      "algorithm": algorithm,
      **SHARED,
      # 100 examples a client.
      "high_capacity_clients": int(row["high_capacity_examples"]) // 100,
    }
    if row["distill_data"]:
      flags["distill_data"] = row["distill_data"]
    flags |= DISTILL.get(algorithm, {}) | RATES[algorithm]
    head = [
      f"# Table 1, CIFAR, |P_H| = {row['high_capacity_examples']}:"
      f" {algorithm} {row['distill_data']}".rstrip(),
      "#   python experiments/codist.py --data_dir=DIR \\",
      f"#       --flagfile=experiments/flags/{name}",
      f"# About {MINUTES[algorithm]} minutes on two CPU threads of one core.",
      f"# Published: small {row['small']} %, large {row['large']} %.",
      "# What we got: results/README.md.",
    ]
    lines = head + [f"--{key}={value}" for key, value in flags.items()]
    files[name] = "\n".join(lines) + "\n"
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
