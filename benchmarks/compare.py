"""Times rounds of hetfl against FedJAX, PyTorch and itself, side by side.

  python benchmarks/compare.py --json=FILE [--only=NAME,...] [--runs=N]

hetfl and the peer take turns in one process, so that drifts in the machine's
speed affect both. A turn is one round; on accelerators it is ten, dispatched
without waiting, as in training. The table gives medians; `ratio` is the median
over the turns of peer / ours: above one, ours is faster. `ceiling_share` is the
speed of our round as a share of that of large matrix products, which take turns
with both. Convolutions count as direct ones, so Winograd's form, which needs
fewer products, can exceed 100 %. `--only` takes names and prefixes of names,
such as `fedavg_large` or `fml`; the `_plain` rows take minutes on a CPU. A
chart is drawn next to the JSON.
"""

import argparse
import datetime
import gc
import pathlib
import platform
import re
import sys

import jax
from matplotlib import figure
from matplotlib.backends import backend_agg

ROOT = pathlib.Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # As a script, not with -m.
  sys.path.insert(0, str(ROOT))

from benchmarks import codist, fedmd, fml, language, rounds  # noqa: E402
from hetfl.engine.threads import num_cores  # noqa: E402
from hetfl.run import logs, training  # noqa: E402


def chosen(only: str | None, every: dict[str, rounds.Row]) -> list[str]:
  """The names that `--only` selects.

  Args:
    only: comma-separated names or prefixes of names; `None` for all.
    every: all rows, by name.

  Returns:
    The names in the rows' order.

  Raises:
    ValueError: no row has this name or prefix.

  >>> chosen('fedavg_l,fml', dict.fromkeys(['fml', 'fedavg_large', 'lm']))
  ['fml', 'fedavg_large']
  """
  if not only:
    return list(every)
  wanted = [word for word in only.split(",") if word]
  for word in wanted:
    if not any(name.startswith(word) for name in every):
      raise ValueError(f"--only={word}: choose from {', '.join(every)}")
  return [name for name in every if name.startswith(tuple(wanted))]


def provenance() -> dict:
  """What a row's numbers depend on: machine, versions, commit, day."""
  cpus = pathlib.Path("/proc/cpuinfo")
  text = cpus.read_text() if cpus.exists() else ""
  names = sorted({*re.findall(r"(?m)^model name\s*: (.*)$", text)})
  return {
    "processor": ", ".join(names) or platform.processor(),
    "cores": num_cores(),
    **training.provenance("fedjax", "torch"),
    "date": datetime.date.today().isoformat(),
  }


def measure(name: str, row: rounds.Row, runs: int, products) -> dict:
  """Times a row's two sides.

  Args:
    name: the row's name.
    row: the row.
    runs: turns of each.
    products: the callable that measures the ceiling.

  Returns:
    The row's entry in the JSON.
  """
  result = {"name": name, "peer": row.peer, "runs": runs}
  result |= rounds.take_turns(
    rounds.looped(row.ours()), row.other(), runs, products
  )
  speed = row.flops() / result["ours_s"] / 1e9
  result["ceiling_share"] = speed / result["ceiling_gflop_s"]
  amount, unit = row.work()
  result[f"{unit}_per_s"] = amount / result["ours_s"]
  result[f"peer_{unit}_per_s"] = amount / result["peer_s"]
  gc.collect()
  return result


def chart(results: list[dict], path: pathlib.Path) -> None:
  """Draws our speed-up over each peer, to a PNG."""
  fig = figure.Figure(
    figsize=(8, 0.9 + 0.3 * len(results)), layout="constrained", dpi=150
  )
  backend_agg.FigureCanvasAgg(fig)
  ax = fig.subplots()
  ratios = [row["ratio"] for row in results]
  bars = ax.barh([row["name"] for row in results], ratios, color="#1f77b4")
  ax.bar_label(bars, fmt="%.2f", padding=3, fontsize=8.5)
  ax.axvline(1, color="0.3", linewidth=1)
  ax.invert_yaxis()
  ax.margins(x=0.1)
  ax.set_xlabel("Seconds of the peer by seconds of hetfl")
  ax.tick_params(labelsize=8.5)
  ax.spines[["top", "right"]].set_visible(False)
  fig.savefig(path)


def main() -> None:
  """Runs the benchmarks, prints a table, writes JSON and draws a chart."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--json", help="file for the rows")
  parser.add_argument("--only", help="names or their beginnings, with commas")
  parser.add_argument(
    "--runs", type=rounds.count, default=7, help="turns of each"
  )
  parser.add_argument(
    "--data_dir",
    help="folder with stackexchange/Posts.xml for the language rows, by"
    " default random words",
  )
  parser.add_argument(
    "--fml_examples",
    type=rounds.count,
    default=2000,
    help="images of an FML client",
  )
  parser.add_argument(
    "--fedmd_width",
    type=float,
    default=0.125,
    help="width factor of FedMD's ten models",
  )
  parser.add_argument(
    "--matmul_precision",
    default="float32",
    choices=("float32", "tensorfloat32"),
    help="of both sides' float32 products and convolutions on a GPU",
  )
  args = parser.parse_args()
  # For FedJAX's pmap; ours uses the first device only.
  if jax.config.jax_platforms in (None, "", "cpu"):
    jax.config.update("jax_num_cpu_devices", num_cores())
  # The same for both; JAX's default depends on the accelerator.
  jax.config.update("jax_default_matmul_precision", args.matmul_precision)
  every = (
    codist.rows()
    | fml.rows(args.fml_examples)
    | fedmd.rows(args.fedmd_width)
    | language.rows(args.data_dir, args.runs)
  )
  try:
    names = chosen(args.only, every)
  except ValueError as e:
    sys.exit(f"error: {e}")
  products = rounds.ceiling()
  origin = provenance() | {"matmul_precision": args.matmul_precision}
  results = []
  print(
    f"{'name':33} {'ours s':>8} {'min':>8} {'max':>8} {'peer s':>8}"
    f" {'ratio':>6} {'ceiling':>8}  peer"
  )
  for name in names:
    try:
      row = measure(name, every[name], args.runs, products) | origin
    except ImportError as error:
      print(f"{name:33} left out: {error}; pip install -e '.[bench]' may help")
      continue
    results.append(row)
    print(
      f"{name:33} {row['ours_s']:8.3f} {row['ours_min_s']:8.3f}"
      f" {row['ours_max_s']:8.3f} {row['peer_s']:8.3f} {row['ratio']:6.2f}"
      f" {100 * row['ceiling_share']:6.1f} %  {row['peer']}",
      flush=True,
    )
    if args.json:
      logs.write_json(args.json, results)
      chart(results, pathlib.Path(args.json).with_suffix(".png"))


if __name__ == "__main__":
  main()
