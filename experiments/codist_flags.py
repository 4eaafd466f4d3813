"""Flag files of the codistillation paper's Stack Overflow runs.

Table 1's Stack Overflow half, and Table 2, whose runs draw Figure 3 too (its
three panels are each run's `curves_answers.png`, `curves_questions.png` and
`curves.png`). `make_flags.py` writes them.
"""

import csv
import pathlib

import codist

from hetfl import logs

PUBLISHED = pathlib.Path(__file__).resolve().parent / "published"
# Clients of 433.6 sentences each, as 684 have 296,597 (the paper's Table 4).
CLIENTS = {"143k": 330, "296k": 684, "612k": 1411}

SHARED = (
  "vocabulary",
  "vocabulary_size",
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
DOMAIN = {"": "", "in_domain": "_in", "c4": "_out"}


def rows(name: str) -> list[dict[str, str]]:
  """The rows of a file of published numbers."""
  lines = (PUBLISHED / name).read_text(encoding="utf-8").splitlines()
  return list(csv.DictReader(line for line in lines if line[0] != "#"))


def flag_files() -> dict[str, str]:
  """Each flag file's name and text."""
  files = {}
  for row in rows("codist_table1_stackoverflow.csv"):
    size, algorithm = row["high_capacity_examples"], row["algorithm"]
    name = f"table1_stackoverflow_{size}_{algorithm}"
    files[f"{name}{DOMAIN[row['distill_data']]}.flags"] = _text(
      f"Table 1, Stack Overflow, |P_H| = {size}: {algorithm}"
      f" {row['distill_data']}".rstrip(),
      f"{name}{DOMAIN[row['distill_data']]}.flags",
      algorithm,
      {"high_capacity_clients": CLIENTS[size]},
      row["distill_data"],
      f"small {row['small']} %, large {row['large']} %",
    )
  for row in rows("codist_table2_stackoverflow.csv"):
    algorithm = row["algorithm"]
    name = f"table2_stackoverflow_{algorithm}.flags"
    files[name] = _text(
      f"Table 2 and Figure 3, pools by domain: {algorithm}",
      name,
      algorithm,
      {"pools": "domain"},
      "" if algorithm == "fedavg" else "in_domain",
      "; ".join(
        f"{on} small {row[f'{on}_small']} %, large {row[f'{on}_large']} %"
        for on in ("answers", "questions", "mixed")
      ),
    )
  return files


def _text(title, name, algorithm, pools, distill_data, published) -> str:
  defaults = codist.DEFAULTS["stackoverflow"][algorithm]
  values = {"algorithm": algorithm, "dataset": "stackoverflow", **pools}
  if distill_data:
    values["distill_data"] = distill_data
    if distill_data == "in_domain":
      values["distill_examples"] = defaults["distill_examples"]
  values |= {n: defaults[n] for n in (*SHARED, *EXTRA[algorithm])}
  path = " --c4_path=SHARDS" if distill_data == "c4" else ""
  return "\n".join(
    [
      f"# {title}",
      "#   python experiments/codist.py \\",
      f"#       --flagfile=experiments/flags/{name} --data_dir=DIR{path}",
      "# DIR holds FedJAX's stackoverflow_{train,held_out,test}.sqlite.",
      "# For an accelerator; on two CPU cores about ten seconds a round, by"
      " the time of a step.",
      f"# Published: {published}.",
      logs.flags_text(values),
      "",
    ]
  )
