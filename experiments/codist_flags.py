"""The cells of the codistillation paper's tables."""

import codist
import tables as tables_lib

# A flag file says all of these, though they are the defaults too.
_SHARED = (
  "rounds",
  "clients_per_round",
  "client_batch_size",
  "client_lr",
  "server_lr",
)
_DISTILL = ("distill_lr", "distill_steps", "distill_batch_size")
_EXTRA = {
  "fedavg": (),
  "periodic": (*_DISTILL, "codist_period"),
  "merged": (*_DISTILL, "merge_alpha"),
}
# The paper tuned these and published none: see BUILD_NOTES.md.
_TARGETS = {"teacher_temperature": 1, "student_regularization": 0.01}
_TUNED = {"fedavg": {}, "periodic": _TARGETS, "merged": _TARGETS}
_DOMAIN = {"": "", "in_domain": "_in", "cifar10": "_out"}


def tables() -> dict[str, tables_lib.Table]:
  """The tables of Lichtarge et al. 2023."""
  return {"codist_table1_cifar": _table1_cifar()}


def _table1_cifar() -> tables_lib.Table:
  cells = []
  for row in tables_lib.read_published("codist_table1_cifar.csv"):
    algorithm, size = row["algorithm"], int(row["high_capacity_examples"])
    defaults = codist.DEFAULTS["cifar100"][algorithm]
    flags = {
      "algorithm": algorithm,
      "dataset": "cifar100",
      "high_capacity_clients": size // 100,  # 100 examples a client.
    }
    if row["distill_data"]:
      flags["distill_data"] = row["distill_data"]
    flags |= {n: defaults[n] for n in (*_SHARED, *_EXTRA[algorithm])}
    flags |= _TUNED[algorithm]
    domain = _DOMAIN[row["distill_data"]]
    cells.append(
      tables_lib.Cell(
        name=f"table1_cifar_{size}_{algorithm}{domain}",
        title=f"|P_H| = {size}, {algorithm} {row['distill_data']}".rstrip(),
        flags=flags,
        published={
          f"pools.{pool}.test_accuracy": float(row[pool])
          for pool in ("small", "large")
        },
      )
    )
  return tables_lib.Table(
    "Lichtarge et al. 2023, Table 1, CIFAR-100", "codist.py", cells
  )
