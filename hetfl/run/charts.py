"""Charts of finished or running runs.

All take the results of several seeds, and show their mean and deviation.
"""

from collections.abc import Container, Iterable, Mapping, Sequence, Sized
import io
import itertools
import os
from typing import Any

from cycler import cycler
import matplotlib
from matplotlib import colors, figure, ticker
import numpy as np

from hetfl.run import logs
from hetfl.run.report import as_floats, mean_and_deviation, Rows

# Okabe and Ito's colours, which (nearly) everyone can tell apart, on white.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_STYLES = ("-", "--", ":", (0, (6, 1, 1, 1, 1, 1)), "-.")
_LEGEND: dict[str, Any] = dict(fontsize=8.5, frameon=False)


def curves(
  runs: Mapping[str, Sequence[Rows]],
  path: str | os.PathLike[str],
  *,
  metric: str | Sequence[str] = "test_accuracy",
  ylabel: str = "Test accuracy (%)",
  xlabel: str = "Round",
  published: Mapping[str, Mapping[str, float]] | None = None,
  dashed: str = "published",
  title: str | None = None,
  titles: Mapping[str, str] | None = None,
  sharey: bool = True,
) -> None:
  """Draws a metric in percent over the rounds to a PNG, one panel per pool.

  The lines' names and last values are at the right of each panel. Several seeds
  are drawn as their mean, with a band of one standard deviation on each side.

  Args:
    runs: label -> the rows of each seed.
    path: the PNG; replaced atomically.
    metric: what to draw for each pool: `'pool/metric'` of the rows; or several,
      of which a pool has one.
    ylabel: label of the metric's axis.
    xlabel: label of the axis of the rows' `'round'`.
    published: pool -> label -> a value, in the unit of the rows, drawn as a
      horizontal dashed line. A label of `runs` gives the line its colour.
    dashed: what these values are, for the legend.
    title: above the panels.
    titles: pool -> the title of its panel, for the pools to draw, in order; by
      default all, as `'POOL model'`.
    sharey: whether the panels have one vertical axis.

  Raises:
    ValueError: no row has the metric.
  """
  every = [row for seeds in runs.values() for rows in seeds for row in rows]
  metrics = (metric,) if isinstance(metric, str) else metric
  parts = (name.rpartition("/") for row in every for name in row)
  name_of = {pool: f"{pool}/{of}" for pool, _, of in parts if of in metrics}
  names = [name_of[pool] for pool in titles or name_of if pool in name_of]
  if not names:
    raise ValueError(f"metric={metric!r}: no row of {list(runs)} has it")
  columns = min(len(names), 3)
  lines = -(-len(names) // columns)
  # Long names, as of folders, do not make the panels narrow.
  letters = max(map(len, runs)) + (len(dashed) if published else 0)
  width = (4.8 + 0.06 * letters) * columns
  height = _height(3.8, runs)
  shape = dict(nrows=lines, ncols=columns, sharey=sharey, squeeze=False)
  fig, grid = _figure(width, 0.2 + height * lines, **shape)
  for ax in grid.flat[len(names) :]:
    ax.remove()
  look_of = _looks(sorted(runs))  # The same in other charts of them.
  for name, ax in zip(names, grid.flat):
    pool = name.rpartition("/")[0]
    last = []
    for label, seeds in runs.items():
      x, y, deviation = _mean_line(seeds, name)
      if not x.size:
        continue
      last.append(f"{label} {y[-1]:.1f}")
      look = look_of[label]
      if len(seeds) > 1:
        last[-1] += f" ± {deviation[-1]:.1f}"
        band = y - deviation, y + deviation
        ax.fill_between(x, *band, color=look["color"], alpha=0.2, lw=0)
      # A single point draws no line.
      marker = "o" if len(x) <= 12 else None
      ax.plot(x, y, lw=1.8, marker=marker, markersize=3.5, **look)
    for label, value in (published or {}).get(pool, {}).items():
      color = look_of.get(label, {"color": "0.35"})["color"]
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
  fig, ax = _figure(7.6, 4.2)
  for color, (label, pairs) in zip(itertools.cycle(_COLORS), points.items()):
    style: dict[str, Any] = dict(color=color, label=label)
    for x, y in pairs:
      if x is None:
        ax.axhline(100 * y, linestyle=":", lw=1.4, **style)
    line = sorted((x, 100 * y) for x, y in pairs if x is not None)
    ax.plot(*zip(*line), marker="o", markersize=4, lw=1.8, **style)
  _dress(ax, axis, "Test accuracy (%)")
  ax.set_xscale("log")
  ticks = sorted({x for of in points.values() for x, _ in of if x is not None})
  ax.set_xticks(ticks, [f"{x:,}" for x in ticks])
  ax.minorticks_off()
  fig.legend(loc="outside right center", **_LEGEND)
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
  fig, ax = _figure(8.6, _height(4.8, parties))
  last = max(row["round"] for rows in seeds for row in rows)
  margin = max(0.12 * last, 0.5)
  looks = _looks(parties, matplotlib.color_sequences["tab10"])
  for party, label in parties.items():
    look = looks[party]
    x, y, _ = _mean_line(seeds, f"{party}/test_accuracy")
    ax.plot(x, y, lw=1.4, label=f"{label} ({y[-1]:.1f})", **look)
    style: dict[str, Any] = dict(color=look["color"], lw=1.4)
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
  fig, ax = _figure(1.5 + 1.25 * len(columns), 4.6)
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
  width = max(6.4, 2.4 + 0.3 * len(names))
  fig, ax = _figure(width, _height(4.4, accuracies))
  markers = itertools.cycle("os^Dv")  # Not as many as colours.
  for color, mark, label in zip(itertools.cycle(_COLORS), markers, accuracies):
    values = 100 * np.array(accuracies[label], float)
    style: dict[str, Any] = dict(color=color, lw=0, marker=mark, alpha=0.8)
    text = f"{label} ({values.mean():.1f})"
    ax.plot(range(len(names)), values, markersize=6, label=text, **style)
  _dress(ax, "Client (mean over clients in parentheses)", "Test accuracy (%)")
  _name_clients(ax, names)
  fig.legend(loc="outside right upper", **_LEGEND)
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
  fig, ax = _figure(max(6.4, 2.4 + 0.3 * number), height)
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


def _looks(
  labels: Iterable[str], palette: Sequence[Any] = _COLORS
) -> dict[str, dict[str, Any]]:
  """Lines' looks, distinct for up to four times as many lines as colours."""
  looks = cycler(ls=_STYLES) * cycler(color=palette)
  return dict(zip(labels, itertools.cycle(looks)))


def _height(least: float, labels: Sized) -> float:
  """A panel's height in inches, with room for a legend beside it."""
  return max(least, 0.7 + 0.17 * len(labels))


def _name_clients(ax, names: Sequence[str]) -> None:
  """Names the clients on the horizontal axis, of many only some."""
  ticks = range(0, len(names), -(-len(names) // 40))
  ax.set_xticks(ticks, [names[k] for k in ticks], rotation=60, ha="right")
  ax.tick_params(axis="x", labelsize=7.5)


def _figure(width: float, height: float, **grid: Any) -> tuple[Any, Any]:
  """A figure of a size in inches, and its panels; needs no display."""
  fig = figure.Figure((width, height), layout="constrained", dpi=150)
  return fig, fig.subplots(**grid)


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
