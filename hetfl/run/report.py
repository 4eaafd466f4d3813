"""Curves and tables of finished or running runs.

All take the results of several seeds, and show their mean and deviation.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
import io
import itertools
import os
import pathlib
import re
from typing import Any

import matplotlib
from matplotlib import colors, figure, ticker
import numpy as np

from hetfl.run import logs

# Rows of metrics of one run, as `logs.read_rows` reads them.
Rows = Sequence[Mapping[str, Any]]

# Okabe and Ito's colours, which (nearly) everyone can tell apart, on white.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")

# The columns of a pool's accuracies; the second and third of language models.
_ACCURACIES = {
  "test_accuracy": "test %",
  "test_accuracy_questions": "questions %",
  "test_accuracy_answers": "answers %",
  "heldout_accuracy": "held-out %",
}
_LEGEND: dict[str, Any] = dict(fontsize=8.5, frameon=False)


def curves(
  runs: Mapping[str, Sequence[Rows]],
  path: str | os.PathLike[str],
  *,
  metric: str = "test_accuracy",
  ylabel: str = "Test accuracy (%)",
  xlabel: str = "Round",
  published: Mapping[str, Mapping[str, float]] | None = None,
  dashed: str = "published",
  title: str | None = None,
  titles: Mapping[str, str] | None = None,
) -> None:
  """Draws a metric in percent over the rounds to a PNG, one panel per pool.

  The lines' names and last values are at the right of each panel. Several seeds
  are drawn as their mean, with a band of one standard deviation on each side.

  Args:
    runs: label -> the rows of each seed.
    path: the PNG; replaced atomically.
    metric: what to draw for each pool: `'pool/metric'` of the rows.
    ylabel: label of the metric's axis.
    xlabel: label of the axis of the rows' `'round'`.
    published: pool -> label -> a value, in the unit of the rows, drawn as a
      horizontal dashed line. A label of `runs` gives the line its colour.
    dashed: what these values are, for the legend.
    title: above the panels.
    titles: pool -> the title of its panel; by default `'POOL model'`.

  Raises:
    ValueError: no row has the metric.
  """
  every = [row for seeds in runs.values() for rows in seeds for row in rows]
  ends = "/" + metric
  names = dict.fromkeys(n for row in every for n in row if n.endswith(ends))
  if not names:
    raise ValueError(f"metric={metric!r}: no row of {list(runs)} has it")
  columns = min(len(names), 3)
  lines = -(-len(names) // columns)
  # Long names, as of folders, do not make the panels narrow.
  letters = max(map(len, runs)) + (len(dashed) if published else 0)
  height = max(3.8, 0.7 + 0.17 * len(runs))  # Of panels, and their legends.
  fig = _figure((4.8 + 0.06 * letters) * columns, 0.2 + height * lines)
  grid = fig.subplots(lines, columns, sharey=True, squeeze=False)
  for ax in grid.flat[len(names) :]:
    ax.remove()
  of_label = {label: _COLORS[i % len(_COLORS)] for i, label in enumerate(runs)}
  styles = [style for style in ("-", "--", ":") for _ in _COLORS]
  style_of = dict(zip(runs, itertools.cycle(styles)))
  for name, ax in zip(names, grid.flat):
    pool = name.removesuffix(ends)
    last = []
    for label, seeds in runs.items():
      x, y, deviation = _mean_line(seeds, name)
      if not x.size:
        continue
      last.append(f"{label} {y[-1]:.1f}")
      color = of_label[label]
      if len(seeds) > 1:
        last[-1] += f" ± {deviation[-1]:.1f}"
        band = y - deviation, y + deviation
        ax.fill_between(x, *band, color=color, alpha=0.2, lw=0)
      # A single point draws no line.
      marker = "o" if len(x) <= 12 else None
      style = dict(color=color, ls=style_of[label], marker=marker)
      ax.plot(x, y, lw=1.8, markersize=3.5, **style)
    for label, value in (published or {}).get(pool, {}).items():
      color = of_label.get(label, "0.35")
      ax.axhline(100 * value, color=color, linestyle="--", lw=1.2)
      last.append(f"{label}, {dashed} {100 * value:.1f}")
    ax.set_title((titles or {}).get(pool, f"{pool} model"), fontsize=11)
    ax.set_xlim(left=0)
    _dress(ax, xlabel, ylabel if ax in grid[:, 0] else "")
    beside = dict(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)
    ax.legend(ax.lines, last, handlelength=1.8, **beside, **_LEGEND)
  _save(fig, path, title)


def dependence(
  points: Mapping[str, Sequence[tuple[float | None, float]]],
  path: str | os.PathLike[str],
  *,
  axis: str,
  title: str | None = None,
) -> None:
  """Draws accuracies against a hyper-parameter to a PNG, a line per label.

  Args:
    points: label -> pairs of the hyper-parameter's value and the accuracy; with
      None as the value, it is drawn as a horizontal line.
    path: the PNG; replaced atomically.
    axis: the hyper-parameter's name; its axis is logarithmic.
    title: above the figure.
  """
  fig = _figure(6.4, 4.2)
  ax = fig.subplots()
  for color, (label, pairs) in zip(itertools.cycle(_COLORS), points.items()):
    style: dict[str, Any] = dict(color=color, label=label)
    for x, y in pairs:
      if x is None:
        ax.axhline(100 * y, linestyle=":", lw=1.4, **style)
    line = sorted((x, 100 * y) for x, y in pairs if x is not None)
    if line:
      ax.plot(*zip(*line), marker="o", markersize=4, lw=1.8, **style)
  _dress(ax, axis, "Test accuracy (%)")
  ax.set_xscale("log")
  ticks = sorted({x for of in points.values() for x, _ in of if x is not None})
  ax.set_xticks(ticks, [f"{x:,}" for x in ticks])
  ax.minorticks_off()
  ax.legend(**_LEGEND)
  _save(fig, path, title)


def collaboration(
  seeds: Sequence[Rows],
  path: str | os.PathLike[str],
  *,
  parties: Mapping[str, str],
  bounds: Mapping[str, Sequence[float | None]],
  title: str | None = None,
) -> None:
  """Draws all parties' accuracy over the rounds in one panel, to a PNG.

  A dashed line at the left marks where a party starts, in its first row; a
  dash-dotted one at the right marks its upper bound.

  Args:
    seeds: the rows of each seed, round 0 first; their mean is drawn.
    path: the PNG; replaced atomically.
    parties: a party's name in the rows -> its label.
    bounds: a party's name -> its upper bound, from 0 to 1, for each seed.
    title: above the panel.

  Reference: Li & Wang 2019, figure 2.
  """
  fig = _figure(8.6, 4.8)
  ax = fig.subplots()
  last = max(row["round"] for rows in seeds for row in rows)
  margin = max(0.12 * last, 0.5)
  ten = itertools.cycle(matplotlib.color_sequences["tab10"])
  for color, (party, label) in zip(ten, parties.items()):
    x, y, _ = _mean_line(seeds, f"{party}/test_accuracy")
    style: dict[str, Any] = dict(color=color, lw=1.4)
    ax.plot(x, y, label=f"{label} ({y[-1]:.1f})", **style)
    ax.hlines(y[0], x[0] - margin, x[0], linestyle="--", **style)
    bound = 100 * as_floats(bounds[party]).mean()
    ax.hlines(bound, last, last + margin, linestyle="-.", **style)
  ax.set_xlim(-margin, last + margin)
  xlabel = "Round (dashed: transfer learning alone; dash-dotted: pooled data)"
  _dress(ax, xlabel, "Test accuracy (%)")
  fig.legend(loc="outside right center", **_LEGEND)
  _save(fig, path, title)


def parallel_coordinates(
  axes: Mapping[str, Sequence[float]],
  scores: Sequence[float | None],
  path: str | os.PathLike[str],
  *,
  log: Container[str] = (),
  label: str = "objective",
  title: str | None = None,
) -> None:
  """Draws trials as lines across one axis per hyper-parameter, to a PNG.

  Args:
    axes: hyper-parameter -> each trial's value.
    scores: each trial's score, drawn in percent on the axis at the right and as
      the line's colour. None, for a trial that diverged or was stopped early,
      gives a thin grey line that ends before that axis.
    path: the PNG; replaced atomically.
    log: the hyper-parameters with a logarithmic axis; 0, from which a search
      may start, is then at its lower end.
    label: the score's name.
    title: above the axes.
  """
  columns = [*axes.items(), (label, [s and 100 * s for s in scores])]
  fig = _figure(1.5 + 1.25 * len(columns), 4.6)
  ax = fig.subplots()
  places = []
  for x, (name, values) in enumerate(columns):
    known = [v for v in values if v is not None and (v or name not in log)]
    low, high = min(known, default=0), max(known, default=0)
    kind = colors.LogNorm if name in log and low else colors.Normalize
    scale = kind(low, high, clip=True)
    places.append([None if v is None else float(scale(v)) for v in values])
    ax.axvline(x, color="0.3", lw=0.8)
    for y in (0, 0.25, 0.5, 0.75, 1) if low < high else (0,):
      text = f"{scale.inverse(y):.4g}"
      ax.text(x + 0.04, y, text, fontsize=7.5, va="center")
  viridis = matplotlib.colormaps["viridis"]
  # The best are drawn last, on top of the others.
  rank = lambda line: -1.0 if line[-1] is None else line[-1]
  for *line, score in sorted(zip(*places), key=rank):
    style: dict[str, Any] = dict(color="0.7", lw=0.6)
    if score is not None:
      style = dict(color=viridis(score), lw=0.8 + 1.4 * score)
      line.append(score)
    ax.plot(line, alpha=0.85, **style)
  names = [name for name, _ in columns]
  ax.set_xticks(range(len(names)), names, rotation=20, ha="right")
  ax.set_xlim(-0.1, len(names) - 0.55)
  ax.set_ylim(-0.04, 1.04)
  ax.set_yticks([])
  ax.spines[:].set_visible(False)
  _save(fig, path, title)


def clients(
  accuracies: Mapping[str, Sequence[float]],
  path: str | os.PathLike[str],
  *,
  names: Sequence[str],
  title: str | None = None,
) -> None:
  """Draws each client's accuracy by several methods to a PNG.

  Args:
    accuracies: label -> K accuracies, from 0 to 1.
    path: the PNG; replaced atomically.
    names: K clients' names.
    title: above the panel.
  """
  fig = _figure(max(6.4, 2.4 + 0.3 * len(names)), 4.4)
  ax = fig.subplots()
  markers = itertools.cycle("os^Dv")  # Not as many as colours.
  for color, mark, label in zip(itertools.cycle(_COLORS), markers, accuracies):
    values = 100 * np.array(accuracies[label], float)
    style: dict[str, Any] = dict(color=color, lw=0, marker=mark, alpha=0.8)
    text = f"{label} ({values.mean():.1f})"
    ax.plot(range(len(names)), values, markersize=6, label=text, **style)
  _dress(ax, "Client (mean over clients in parentheses)", "Test accuracy (%)")
  _name_clients(ax, names)
  beside = dict(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)
  ax.legend(**beside, **_LEGEND)
  _save(fig, path, title)


def holdings(
  counts: np.ndarray,
  path: str | os.PathLike[str],
  *,
  names: Sequence[str],
  title: str | None = None,
) -> None:
  """Draws how many examples of each class each client holds, to a PNG.

  Args:
    counts: `int[K, C]`.
    path: the PNG; replaced atomically.
    names: K clients' names.
    title: above the panel.
  """
  number, classes = counts.shape
  height = 1.8 + 0.3 * min(classes, 30)
  fig = _figure(max(6.4, 2.4 + 0.3 * number), height)
  ax = fig.subplots()
  norm = colors.PowerNorm(0.5, 0, counts.max())
  image = ax.imshow(counts.T, cmap="Blues", norm=norm, aspect="auto")
  if classes <= 30 and number <= 60:
    for (k, c), count in np.ndenumerate(counts):
      if count:
        color = "w" if norm(count) > 0.6 else "0.2"
        at = dict(ha="center", va="center")
        ax.text(k, c, str(count), at, fontsize=6.5, color=color)
  fig.colorbar(image, label="Training examples", pad=0.01)
  _dress(ax, "Client", "Class")
  ax.grid(False)
  ax.set_yticks(range(0, classes, -(-classes // 30)))
  _name_clients(ax, names)
  _save(fig, path, title)


def _name_clients(ax, names: Sequence[str]) -> None:
  """Names the clients on the horizontal axis, of many only some."""
  ticks = range(0, len(names), -(-len(names) // 40))
  ax.set_xticks(ticks, [names[k] for k in ticks], rotation=60, ha="right")
  ax.tick_params(axis="x", labelsize=7.5)


def _figure(width: float, height: float) -> figure.Figure:
  """A figure of the given size in inches; needs no display."""
  return figure.Figure(figsize=(width, height), layout="constrained", dpi=150)


def _dress(ax, xlabel: str, ylabel: str) -> None:
  """Labels the axes, x in whole numbers, on a light grid without a frame."""
  ax.set_xlabel(xlabel)
  ax.set_ylabel(ylabel)
  whole = ticker.MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True)
  ax.xaxis.set_major_locator(whole)
  ax.grid(True, color="0.9", lw=0.8)
  ax.set_axisbelow(True)
  ax.spines[["top", "right"]].set_visible(False)


def _save(
  fig: figure.Figure, path: str | os.PathLike[str], title: str | None
) -> None:
  if title:
    fig.suptitle(title, fontsize=12)
  content = io.BytesIO()
  # Without matplotlib's version, equal curves give equal files.
  fig.savefig(content, format="png", metadata={"Software": None})
  logs.write_bytes(path, content.getvalue())


def _mean_line(
  seeds: Sequence[Rows], name: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """A metric's rounds, means and deviations over seeds, in percent."""
  lines = [{r["round"]: r[name] for r in rows if name in r} for rows in seeds]
  rounds = [t for t in lines[0] if all(t in line for line in lines)]
  # A value that was not finite is None in the rows, and NaN here.
  values = np.array([[line[t] for t in rounds] for line in lines], float)
  means, deviations = mean_and_deviation(100 * values)
  return np.array(rounds), means, deviations


def table(results: Mapping[str, Rows]) -> str:
  """Formats codistillation's results as a plain-text table, one line per run.

  Args:
    results: label -> the contents of `result.json` of each seed, accuracies
      from 0 to 1.

  Returns:
    The table; a missing value is a dash, or `diverged` in a run that has.

  >>> small = {'parameters': 5, 'test_accuracy': .5, 'heldout_accuracy': .25}
  >>> result = {'rounds': 9, 'seconds': 1.25, 'pools': {'small': small}}
  >>> print(table({'fedavg': [result]}))
             small
  algorithm  parameters  test %  held-out %  rounds  seconds
  ---------  ----------  ------  ----------  ------  -------
  fedavg              5   50.00       25.00       9      1.2
  >>> other = {'rounds': 9, 'seconds': 1.25, 'pools': {
  ...     'small': small | {'test_accuracy': .75}}}
  >>> print(table({'fedavg': [result, other]}))
             small
  algorithm  parameters         test %    held-out %  rounds    seconds
  ---------  ----------  -------------  ------------  ------  ---------
  fedavg              5  62.50 ± 17.68  25.00 ± 0.00       9  1.2 ± 0.0
  """
  columns = [["", "algorithm", *results]]

  def add(head, title, name, form, factor=1, pool=None):
    def value(result):
      found = (result["pools"][pool] if pool else result)[name]
      lost = found is None and "diverged" in result
      return float("nan") if lost else found

    cells = [
      cell(list(map(value, of)), form, factor) for of in results.values()
    ]
    columns.append([head, title, *cells])

  for pool, measured in next(iter(results.values()))[0]["pools"].items():
    add(pool, "parameters", "parameters", "{:,d}", pool=pool)
    for name, title in _ACCURACIES.items():
      if name in measured:
        add("", title, name, "{:.2f}", 100, pool)
  add("", "rounds", "rounds", "{:,d}")
  add("", "seconds", "seconds", "{:,.1f}")
  return align(columns, heads=2)


def parties_table(seeds: Sequence[Rows]) -> str:
  """Formats each party's results as a plain-text table.

  Args:
    seeds: for each seed and party a dict of `name`, `model`, `parameters`, and
      accuracies from 0 to 1: `public_accuracy`, `transfer_accuracy`,
      `final_accuracy`, `pooled_accuracy`; `None` if it has diverged.

  Returns:
    The table, with the mean accuracies in its last line.

  >>> print(parties_table([[
  ...     dict(name='a', model='mlp(9)', parameters=5, public_accuracy=.5,
  ...          transfer_accuracy=.25, final_accuracy=.5, pooled_accuracy=1.),
  ...     dict(name='b', model='mlp(3)', parameters=2, public_accuracy=.25,
  ...          transfer_accuracy=.25, final_accuracy=.5, pooled_accuracy=.5)]]))
  party  model   parameters  public %  transfer %  final %  pooled %
  -----  ------  ----------  --------  ----------  -------  --------
  a      mlp(9)           5     50.00       25.00    50.00    100.00
  b      mlp(3)           2     25.00       25.00    50.00     50.00
  mean                          37.50       25.00    50.00     75.00
  """
  columns = [
    ["party", *(p["name"] for p in seeds[0]), "mean"],
    ["model", *(p["model"] for p in seeds[0]), ""],
    ["parameters", *(f"{p['parameters']:,d}" for p in seeds[0]), ""],
  ]
  for name in ("public", "transfer", "final", "pooled"):
    values = as_floats(
      [[p[f"{name}_accuracy"] for p in parties] for parties in seeds]
    )
    values = np.column_stack([values, values.mean(axis=1)])
    cells = [cell(of_party, factor=100) for of_party in values.T]
    columns.append([f"{name} %", *cells])
  return align(columns, names=2)


def align(
  columns: Sequence[Sequence[str]], heads: int = 1, names: int = 1
) -> str:
  """Formats columns of cells as a plain-text table.

  Args:
    columns: the columns, each starting with its headers.
    heads: how many header lines there are.
    names: how many of the first columns hold names.

  Returns:
    The table, with a rule below the headers.

  >>> print(align([['algorithm', 'fml'], ['test %', '50.0']]))
  algorithm  test %
  ---------  ------
  fml          50.0
  """
  padded = []
  for j, column in enumerate(columns):
    width = max(map(len, column))
    column = [*column[:heads], "-" * width, *column[heads:]]
    # Names are aligned left, numbers and their headers right.
    padded.append(
      [
        cell.ljust(width) if j < names or i < heads - 1 else cell.rjust(width)
        for i, cell in enumerate(column)
      ]
    )
  return "\n".join("  ".join(cells).rstrip() for cells in zip(*padded))


def mean_and_deviation(values: Any) -> tuple[Any, Any]:
  """The mean and the sample standard deviation, which is 0 for one number.

  Args:
    values: `[n, ...]`, n numbers or arrays, at least one.

  Returns:
    The mean and the deviation, whose sum of squares is divided by n - 1.

  >>> mean, deviation = mean_and_deviation([1.0, 2.0, 3.0])
  >>> float(mean), float(deviation)
  (2.0, 1.0)
  """
  mean = np.mean(values, axis=0)
  if len(values) == 1:
    return mean, np.zeros_like(mean)
  return mean, np.std(values, axis=0, ddof=1)


def as_floats(values: Any) -> np.ndarray:
  """An array in which `None`, a float that was not finite, is NaN."""
  return np.array(values, float)


def cell(
  values: Sequence[float | None], form: str = "{:.2f}", factor: float = 1
) -> str:
  """A cell of a table: a number, or mean ± standard deviation of several.

  Args:
    values: of one run or of several seeds; integers are the same for all seeds;
      `None` is missing, and NaN of a model that has diverged.
    form: the format string of a number.
    factor: from the values' unit to the table's.

  Returns:
    The cell.

  >>> cell([0.5], factor=100), cell([0.25, 0.5], factor=100)
  ('50.00', '37.50 ± 17.68')
  >>> cell([0.5, None]), cell([0.5, float('nan')])
  ('-', 'diverged')
  """
  known = [value for value in values if value is not None]
  if len(known) < len(values):
    return "-"
  if np.isnan(known).any():
    return "diverged"
  if len(known) == 1 or isinstance(known[0], int):
    return form.format(factor * known[0])
  return " ± ".join(form.format(factor * v) for v in mean_and_deviation(known))


def last_and_best(
  evaluation: Mapping[str, Any], rows: Rows, owner: str
) -> dict[str, Any]:
  """A model's metrics in the last evaluation, and its best accuracies of all.

  Args:
    evaluation: the last: `'owner/metric'` -> value.
    rows: all evaluations' rows.
    owner: whose metrics.

  Returns:
    Each metric by its name, and `'best_'` with that of an accuracy.

  >>> rows = [{'a/test_accuracy': x} for x in (0.5, None, 0.25)]
  >>> last_and_best({'a/test_accuracy': 0.25, 'a/test_loss': 2.0}, rows, 'a')
  {'test_accuracy': 0.25, 'best_test_accuracy': 0.5, 'test_loss': 2.0}
  """
  found = {}
  for name, value in evaluation.items():
    whose, _, metric = name.partition("/")
    if whose != owner:
      continue
    found[metric] = value
    if re.match("(test|heldout)_accuracy", metric):
      known = [row[name] for row in rows if row.get(name) is not None]
      found[f"best_{metric}"] = max(known, default=None)
  return found


def write_summary(
  workdir: pathlib.Path,
  results: Mapping[str, Sequence[dict]],
  seeds: Sequence[int],
) -> None:
  """Writes the results of several seeds to `summary.json`.

  For each accuracy and perplexity of an algorithm, by its path in the results,
  it has the mean, the standard deviation and all values.

  Args:
    workdir: the folder of the seeds' folders.
    results: algorithm -> the content of `result.json` of each seed.
    seeds: the seeds.
  """
  algorithms = {}
  for name, of_seeds in results.items():
    leaves, found = [dict(_measures(result)) for result in of_seeds], {}
    for place in leaves[0]:
      values = [leaf.get(place) for leaf in leaves]
      if None not in values:
        mean, deviation = mean_and_deviation(values)
        found[place] = dict(mean=mean, deviation=deviation, values=values)
    algorithms[name] = found
  summary = {"seeds": seeds, "algorithms": algorithms}
  logs.write_json(workdir / "summary.json", summary)


def _measures(result: Any, place: str = "") -> Iterator[tuple[str, Any]]:
  """A result's accuracies and perplexities by path: `pools.small.test_...`."""
  parts = result.items() if isinstance(result, Mapping) else enumerate(result)
  for name, value in parts:
    if isinstance(value, Mapping | list):
      yield from _measures(value, f"{place}{name}.")
    elif re.search("accuracy|perplexity", str(name)):
      yield f"{place}{name}", value
