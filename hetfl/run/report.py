"""Curves and tables of finished or running runs."""

from collections.abc import Container, Mapping, Sequence
import io
import math
import os
import statistics
from typing import Any

import matplotlib
from matplotlib import colors, figure, ticker
from matplotlib.backends import backend_agg
import numpy as np

from hetfl.run import logs

Rows = Sequence[Mapping[str, Any]]

# Okabe and Ito's colours, which (nearly) everyone can tell apart, on white.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# Tol's muted scheme and grey, for ten lines in one panel.
_MANY_COLORS = (
  *("#332288", "#CC6677", "#117733", "#DDCC77", "#88CCEE"),
  *("#882255", "#44AA99", "#999933", "#AA4499", "#777777"),
)

# The columns of a pool's accuracies; the second and third of language models.
_ACCURACIES = {
  "test_accuracy": "test %",
  "test_accuracy_questions": "questions %",
  "test_accuracy_answers": "answers %",
  "heldout_accuracy": "held-out %",
}
_LEGEND: dict[str, Any] = dict(fontsize=8.5, frameon=False)


def curves(
  runs: Mapping[str, Rows | Sequence[Rows]],
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

  The lines' names and last values are at the right of each panel.

  Args:
    runs: label -> rows of metrics, as `logs.read_rows` reads them; or a list of
      such rows, one per seed, drawn as their mean with a band of one standard
      deviation on each side.
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
  seeds = {label: _of_seeds(rows) for label, rows in runs.items()}
  every = [row for of in seeds.values() for rows in of for row in rows]
  ends = "/" + metric
  names = dict.fromkeys(n for row in every for n in row if n.endswith(ends))
  if not names:
    raise ValueError(f"metric={metric!r}: no row of {list(runs)} has it")
  columns = min(len(names), 3)
  lines = -(-len(names) // columns)
  # Long names, as of folders, do not make the panels narrow.
  letters = max(map(len, runs)) + (len(dashed) if published else 0)
  fig = _figure((4.8 + 0.06 * letters) * columns, 0.2 + 3.8 * lines)
  grid = fig.subplots(lines, columns, sharey=True, squeeze=False)
  for ax in grid.flat[len(names) :]:
    ax.remove()
  of_label = {label: _COLORS[i % len(_COLORS)] for i, label in enumerate(runs)}
  for name, ax in zip(names, grid.flat):
    pool = name.removesuffix(ends)
    last = []
    for label, of_seeds in seeds.items():
      x, y, deviation = _mean_line(of_seeds, name)
      if not x.size:
        continue
      last.append(f"{label} {y[-1]:.1f}")
      color = of_label[label]
      if len(of_seeds) > 1:
        last[-1] += f" ± {deviation[-1]:.1f}"
        band = y - deviation, y + deviation
        ax.fill_between(x, *band, color=color, alpha=0.2, lw=0)
      # A single point draws no line.
      marker = "o" if len(x) <= 12 else None
      ax.plot(x, y, color=color, lw=1.8, marker=marker, markersize=3.5)
    for label, value in (published or {}).get(pool, {}).items():
      color = of_label.get(label, "0.35")
      ax.axhline(100 * value, color=color, linestyle="--", lw=1.2)
      last.append(f"{label}, {dashed} {100 * value:.1f}")
    ax.set_title((titles or {}).get(pool, f"{pool} model"), fontsize=11)
    ax.set_xlim(left=0)
    _dress(ax, xlabel, ylabel if ax in grid[:, 0] else "")
    beside = dict(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)
    ax.legend(ax.lines, last, handlelength=1.2, **beside, **_LEGEND)
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
  for i, (label, pairs) in enumerate(points.items()):
    style: dict[str, Any] = dict(color=_COLORS[i % len(_COLORS)], label=label)
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


def _figure(width: float, height: float) -> figure.Figure:
  """A figure of the given size in inches; needs no display."""
  fig = figure.Figure(figsize=(width, height), layout="constrained", dpi=150)
  backend_agg.FigureCanvasAgg(fig)
  return fig


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


def collaboration(
  rows: Rows | Sequence[Rows],
  path: str | os.PathLike[str],
  *,
  parties: Mapping[str, str],
  bounds: Mapping[str, float],
  title: str | None = None,
) -> None:
  """Draws all parties' accuracy over the rounds in one panel, to a PNG.

  A dashed line at the left marks where a party starts, in its first row; a
  dash-dotted one at the right marks its upper bound.

  Args:
    rows: rows of metrics, as `logs.read_rows` reads them, round 0 first; or a
      list of such rows, one per seed, whose mean is drawn.
    path: the PNG; replaced atomically.
    parties: a party's name in the rows -> its label.
    bounds: a party's name -> its upper bound, from 0 to 1.
    title: above the panel.

  Raises:
    ValueError: no row has the accuracy of a party, `'party/test_accuracy'`.

  Reference: Li & Wang 2019, figure 2.
  """
  fig = _figure(8.6, 4.8)
  ax = fig.subplots()
  seeds = _of_seeds(rows)
  last = max((row["round"] for rows in seeds for row in rows), default=0)
  margin = max(0.12 * last, 0.5)
  for i, (party, label) in enumerate(parties.items()):
    x, y, _ = _mean_line(seeds, f"{party}/test_accuracy")
    if not x.size:
      raise ValueError(
        f"metric='test_accuracy': no row has this metric for {party}"
      )
    color = _MANY_COLORS[i % len(_MANY_COLORS)]
    style: dict[str, Any] = dict(color=color, lw=1.4)
    ax.plot(x, y, label=f"{label} ({y[-1]:.1f})", **style)
    ax.hlines(y[0], x[0] - margin, x[0], linestyle="--", **style)
    if party in bounds:
      bound = 100 * bounds[party]
      ax.hlines(bound, last, last + margin, linestyle="-.", **style)
  ax.set_xlim(-margin, last + margin)
  xlabel = "Round (dashed: transfer learning alone; dash-dotted: pooled data)"
  _dress(ax, xlabel, "Test accuracy (%)")
  fig.legend(loc="outside right center", **_LEGEND)
  _save(fig, path, title)


def parties_table(parties: Rows | Sequence[Rows]) -> str:
  """Formats each party's results as a plain-text table.

  Args:
    parties: dicts of `name`, `model`, `parameters`, and accuracies from 0 to
      1: `public_accuracy`, `transfer_accuracy`, `final_accuracy`,
      `pooled_accuracy`; or a list of such sequences, one per seed.

  Returns:
    The table, with the mean accuracies in its last line.

  >>> print(parties_table([
  ...     dict(name='a', model='mlp(9)', parameters=5, public_accuracy=.5,
  ...          transfer_accuracy=.25, final_accuracy=.5, pooled_accuracy=1.),
  ...     dict(name='b', model='mlp(3)', parameters=2, public_accuracy=.25,
  ...          transfer_accuracy=.25, final_accuracy=.5, pooled_accuracy=.5)]))
  party  model   parameters  public %  transfer %  final %  pooled %
  -----  ------  ----------  --------  ----------  -------  --------
  a      mlp(9)           5     50.00       25.00    50.00    100.00
  b      mlp(3)           2     25.00       25.00    50.00     50.00
  mean                          37.50       25.00    50.00     75.00
  """
  seeds = _of_seeds(parties)
  columns = [
    ["party", *(p["name"] for p in seeds[0]), "mean"],
    ["model", *(p["model"] for p in seeds[0]), ""],
    ["parameters", *(f"{p['parameters']:,d}" for p in seeds[0]), ""],
  ]
  for name in ("public", "transfer", "final", "pooled"):
    values = [[p[f"{name}_accuracy"] for p in of_seed] for of_seed in seeds]
    values = [[*of_seed, statistics.fmean(of_seed)] for of_seed in values]
    cells = [cell(of_party, "{:.2f}", 100) for of_party in zip(*values)]
    columns.append([f"{name} %", *cells])
  return align(columns, names=2)


def parallel_coordinates(
  axes: Mapping[str, Sequence[float]],
  scores: Sequence[float | None],
  path: str | os.PathLike[str],
  *,
  log: Mapping[str, bool],
  halved: Container[int] = (),
  label: str = "objective",
  title: str | None = None,
) -> None:
  """Draws trials as lines across one axis per hyper-parameter, to a PNG.

  Args:
    axes: hyper-parameter -> each trial's value.
    scores: each trial's score, drawn in percent on the axis at the right and as
      the line's colour; None, as of a diverged trial, gives a dotted line that
      ends before that axis.
    path: the PNG; replaced atomically.
    log: hyper-parameter -> whether its axis is logarithmic.
    halved: trials that were stopped early, so that their scores are not
      comparable with the others'; dashed lines that end before the score axis.
    label: the score's name.
    title: above the axes.
  """
  scores = [None if i in halved else s for i, s in enumerate(scores)]
  scaled = [None if s is None else 100 * s for s in scores]
  columns = {**axes, label: scaled}
  places, marks = zip(
    *(_axis(values, log.get(name, False)) for name, values in columns.items())
  )
  fig = _figure(1.5 + 1.25 * len(columns), 4.6)
  ax = fig.subplots()
  viridis = matplotlib.colormaps["viridis"]
  apart = {}
  # The best are drawn last, on top of the others.
  ranks = [-math.inf if score is None else score for score in scores]
  for i in sorted(range(len(scores)), key=lambda i: ranks[i]):
    line = [of_each[i] for of_each in places if of_each[i] is not None]
    style: dict[str, Any] = dict(color="0.6", linestyle=":", lw=0.8)
    if scores[i] is not None:
      style = dict(color=viridis(line[-1]), lw=0.8 + 1.4 * line[-1])
    elif i in halved:
      style["linestyle"] = "--"
    (drawn,) = ax.plot(range(len(line)), line, alpha=0.85, **style)
    if scores[i] is None:
      apart["halved: stopped early" if i in halved else "diverged"] = drawn
  for x, labels in enumerate(marks):
    ax.axvline(x, color="0.3", lw=0.8)
    for y, text in labels:
      ax.text(x + 0.04, y, text, fontsize=7.5, va="center")
  ax.set_xticks(range(len(columns)), list(columns), rotation=20, ha="right")
  ax.set_xlim(-0.1, len(columns) - 0.55)
  ax.set_ylim(-0.04, 1.04)
  ax.set_yticks([])
  ax.spines[:].set_visible(False)
  if apart:
    place: dict[str, Any] = dict(loc="outside lower center", ncols=2)
    fig.legend(apart.values(), apart, **place, **_LEGEND)
  _save(fig, path, title)


def _axis(
  values: Sequence[float | None], log: bool
) -> tuple[list[float | None], list[tuple[float, str]]]:
  """Each value's place on an axis from 0 to 1, and the axis's ticks.

  A logarithmic axis has 0, from which a search may start, at its lower end.
  """
  given = [v for v in values if v is not None]
  positive = [v for v in given if v > 0]
  log = log and bool(positive)
  ends = (positive if log else given) or [0.0]
  low, high = min(ends), max(ends)
  scale = (colors.LogNorm if log else colors.Normalize)(low, high, clip=True)
  places = [None if v is None else float(scale(v)) for v in values]
  marks = (0, 0.25, 0.5, 0.75, 1) if low < high else (0,)
  for digits in range(3, 8):  # Enough that no two ticks read the same.
    texts = [f"{scale.inverse(m):.{digits}g}" for m in marks]
    if len(set(texts)) == len(marks):
      break
  if log and min(given) <= 0:
    texts[0] = f"0, {texts[0]}"
  return places, list(zip(marks, texts))


def table(
  results: Mapping[str, Mapping[str, Any] | Rows],
) -> str:
  """Formats results as a plain-text table, one line per run.

  Args:
    results: label -> the contents of `result.json`, accuracies from 0 to 1; or
      a list of these, one per seed, for mean ± standard deviation.

  Returns:
    The table; a missing value is a dash.

  >>> small = {'parameters': 5, 'test_accuracy': .5, 'heldout_accuracy': .25}
  >>> result = {'rounds': 9, 'seconds': 1.25, 'pools': {'small': small}}
  >>> print(table({'fedavg': result}))
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
  seeds = {
    label: [result] if isinstance(result, Mapping) else result
    for label, result in results.items()
  }
  every = [r for of in seeds.values() for r in of]
  pools = dict.fromkeys(pool for r in every for pool in r.get("pools", {}))
  columns = [["", "algorithm", *seeds]]

  def of_pool(result, pool):
    return result.get("pools", {}).get(pool, {}) if pool else result

  def add(head, name, title, form, factor=1, pool=None):
    cells = [
      cell([of_pool(r, pool).get(name) for r in of], form, factor)
      for of in seeds.values()
    ]
    columns.append([head, title, *cells])

  for pool in pools:
    add(pool, "parameters", "parameters", "{:,d}", pool=pool)
    for name, title in _ACCURACIES.items():
      always = title in ("test %", "held-out %")
      if always or any(name in of_pool(r, pool) for r in every):
        add("", name, title, "{:.2f}", 100, pool)
  add("", "rounds", "rounds", "{:,d}")
  add("", "seconds", "seconds", "{:,.1f}")
  heads = 2 if pools else 1
  return align([column[-heads - len(seeds) :] for column in columns], heads)


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
  widths = [max(map(len, column)) for column in columns]
  columns = [
    [*column[:heads], "-" * width, *column[heads:]]
    for column, width in zip(columns, widths)
  ]
  lines = []
  for i, cells in enumerate(zip(*columns)):
    # Names are aligned left, numbers and their headers right.
    lines.append(
      "  ".join(
        cell.ljust(w) if j < names or i < heads - 1 else cell.rjust(w)
        for j, (cell, w) in enumerate(zip(cells, widths))
      ).rstrip()
    )
  return "\n".join(lines)


def _of_seeds(rows: Rows | Sequence[Rows]) -> Sequence[Rows]:
  """A list of rows per seed, of length one if the rows of one are given."""
  one = all(isinstance(row, Mapping) for row in rows)
  return [rows] if one else rows  # type: ignore[list-item, return-value]


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


def cell(
  values: Sequence[float | None], form: str = "{:.2f}", factor: float = 1
) -> str:
  """A cell of a table: a number, or mean ± standard deviation of several.

  Args:
    values: of one run or of several seeds; integers are the same for all seeds.
    form: the format string of a number.
    factor: from the values' unit to the table's.

  Returns:
    The cell; a dash, if a value is missing.

  >>> cell([0.5], factor=100), cell([0.25, 0.5], factor=100), cell([None])
  ('50.00', '37.50 ± 17.68', '-')
  """
  known = [value for value in values if value is not None]
  if len(known) < len(values):
    return "-"
  if len(known) == 1 or isinstance(known[0], int):
    return form.format(factor * known[0])
  return " ± ".join(form.format(factor * v) for v in mean_and_deviation(known))
