r"""Searches for an experiment's hyper-parameters on held-out data.

  python experiments/tune.py --experiment=codist --trials=64 --block=16 \
      --workdir=DIR -- --algorithm=merged --dataset=digits --rounds=60

Flags after `--` are the experiment's own. By default the search space is the
paper's (codist: Lichtarge et al. 2023, appendix F), and the objective is the
mean of the models' accuracies on held-out data, never on test data;
`--experiment=fml` requires `--heldout_examples` for it. Trial 0 has the flags'
own values and is not halved, so the best trial is never worse than these on
held-out data. DIR then holds

  trials.jsonl  one line per trial
  result.json   the best trial, and the means of the best --top trials
  best.flags    a flag file of the best trial, for the experiment
  parallel.png  all trials, each a line across the hyper-parameters

The same command resumes a search that was stopped; with more --trials, it adds
to a finished one. To merge searches of several machines, with the same --seeds
for their trials and a different --seed each, run the same command with
--join=DIR1,DIR2 and a new DIR.
"""

from collections.abc import Sequence
import dataclasses
import importlib
import sys
from typing import Literal

import codist
import fml
import settings
from settings import count, setting

_EXPERIMENTS = {"codist": codist.Codist, "fml": fml.Fml}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search(settings.Settings):
  """A search.

  Attributes:
    experiment: The experiment whose hyper-parameters are searched.
    trials: Total number of trials; 1,024 in the paper. More can be added later.
      A multiple of --block is best, since a smaller last block is halved on its
      own.
    join: Folders of searches with the same flags, including --seeds, but a
      different --seed each; merge their trials, and train none.
    block: Number of trials that train side by side, which bounds the memory;
      with --batching=vmap a trial of codist's CIFAR takes about a gigabyte. 64
      in the paper.
    halvings: How often the worse half of a block is dropped; 2 is after 1/4 and
      after 1/2 of the rounds.
    space: Ranges that replace the paper's: NAME=log:LOW:HIGH,
      NAME=linear:LOW:HIGH, or NAME=fixed for the value of its flag. NAME is a
      flag, such as client_lr, or a flag for one model, such as server_lr.small;
      a flag that has a default range for each model stands for both. Besides
      the default dimensions, prox_mu can be searched; batch sizes, epochs,
      momentum, dropout and label_weight cannot. Next-word prediction needs
      larger learning rates than the paper's, client_lr=log:1e-3:1.
    objective: The held-out accuracy to maximize: for codist that of one model
      (small, large), for fml that of the global model or of the clients' own
      (global, clients); or their mean (mean).
    proposer: How trials are proposed: by seeded random search, or by Optuna's
      TPE (pip install -e '.[tune]'), one block at a time.
    batching: How trials train side by side: as one program, split over the
      devices if there are several (vmap), or as separate runs on one engine
      (threads). auto takes vmap on accelerators, threads on CPUs. Changes speed
      only.
    top: Number of best trials in the table and in result.json's means, out of
      those that were trained to the end; 25 in the paper's Figure 4.
  """

  experiment: Literal["codist", "fml"] = setting("codist")
  trials: int = count(64, kind="speed")
  join: tuple[str, ...] | None = setting(kind="place")
  block: int = count(16)
  halvings: int = setting(2, low=0, high=10)
  space: tuple[str, ...] = setting((), kind="place")
  objective: str = setting("mean")
  proposer: Literal["random", "optuna"] = setting("random")
  batching: Literal["auto", "vmap", "threads"] = setting("auto", kind="speed")
  top: int = count(10, kind="place")


def main(argv: Sequence[str]) -> None:
  """Runs the search, then writes and prints its results."""
  argv = [argument for argument in argv if argument != "--"]
  no_help = [a for a in argv if a not in ("-h", "--help", "--helpfull")]
  try:
    known = settings.parse(no_help, Search, known_only=True).values
    cls = _EXPERIMENTS[known.get("experiment", "codist")]
    given = settings.parse(argv, Search, cls)
  except settings.UsageError as error:
    sys.exit(f"error: {error}")
  launch = importlib.import_module("launch")
  launch.run(importlib.import_module("tune_run").main, given, cls)


if __name__ == "__main__":
  main(sys.argv[1:])
