import matplotlib.image
import numpy as np
import pytest

from hetfl.run import charts, report


def rows(final):
  return [
    {
      "round": r,
      "small/test_accuracy": None if r == 100 else final * r / 200,
      "large/test_accuracy": final,
      "seconds": 1.0,
    }
    for r in (50, 100, 150, 200)
  ]


def test_curves_are_a_readable_png(tmp_path):
  path = tmp_path / "curves.png"
  runs = {"codist": [rows(0.8)], "fedavg": [rows(0.7)], "just started": [[]]}
  published = {"large": {"codist": 0.81}}
  charts.curves(runs, path, published=published, title="EMNIST")
  image = matplotlib.image.imread(path)
  assert image.shape[0] > 400 and image.shape[1] > 1000
  # Both colours are there: #0072B2 and #D55E00.
  for color in ((0, 0x72, 0xB2), (0xD5, 0x5E, 0)):
    distance = np.abs(image[..., :3] - np.array(color) / 255).max(-1)
    assert (distance < 0.02).sum() > 100
  first = path.read_bytes()
  charts.curves(runs, path, published=published, title="EMNIST")
  assert path.read_bytes() == first
  assert [p.name for p in tmp_path.iterdir()] == ["curves.png"]


@pytest.fixture
def figures(monkeypatch):
  """The figures that are drawn, in place of files."""
  drawn = []
  monkeypatch.setattr(charts, "_save", lambda fig, *_: drawn.append(fig))
  return drawn


def test_clients_are_named_and_their_means_are_in_the_legend(figures):
  accuracies = {"local": [0.5, 1.0], "fedproto by head": [0.25, 0.5]}
  charts.clients(accuracies, "", names=["0: mlp", "1: cnn"])
  counts = np.array([[3, 0, 9], [0, 2, 4]])
  charts.holdings(counts, "", names=["0: mlp", "1: cnn"])
  clients, holdings = figures
  for fig in figures:
    ax = fig.axes[0]
    assert [label.get_text() for label in ax.get_xticklabels()] == [
      "0: mlp",
      "1: cnn",
    ]
  ax = clients.axes[0]
  assert texts(*clients.legends) == ["local (75.0)", "fedproto by head (37.5)"]
  assert [line.get_ydata().tolist() for line in ax.lines] == [
    [50.0, 100.0],
    [25.0, 50.0],
  ]
  # Client 0 holds 9 examples of class 2.
  ax = holdings.axes[0]
  assert {(*t.get_position(), t.get_text()) for t in ax.texts} == {
    (0, 0, "3"),
    (0, 2, "9"),
    (1, 1, "2"),
    (1, 2, "4"),
  }


def texts(legend):
  return [text.get_text() for text in legend.get_texts()]


def test_the_legends_of_curves_are_beside_the_panels(figures):
  few = [{"round": 1, "small/test_accuracy": 0.125}]
  runs = {"codist": [rows(0.8)], "fedavg": [rows(0.7)], "few": [few]}
  charts.curves(runs, "", published={"large": {"codist": 0.81}})
  (fig,) = figures
  fig.draw_without_rendering()
  small, large = fig.axes
  names = ["codist 80.0", "fedavg 70.0", "few 12.5"]
  assert texts(small.get_legend()) == names
  names = ["codist 80.0", "fedavg 70.0", "codist, published 81.0"]
  assert texts(large.get_legend()) == names
  assert [ax.get_title() for ax in fig.axes] == ["small model", "large model"]
  panels = [ax.get_window_extent() for ax in fig.axes]
  for legend in (small.get_legend(), large.get_legend()):
    assert not any(legend.get_window_extent().overlaps(p) for p in panels)


def test_several_seeds_are_a_mean_and_a_band(figures):
  runs = {"codist": [rows(0.5), rows(0.7), rows(0.9)], "fedavg": [rows(0.6)]}
  charts.curves(runs, "")
  _, large = figures[0].axes
  assert texts(large.get_legend()) == ["codist 70.0 ± 20.0", "fedavg 60.0"]
  np.testing.assert_allclose(large.lines[0].get_ydata(), 70)
  (band,) = large.collections
  (path,) = band.get_paths()
  assert {round(y) for y in path.vertices[:, 1]} == {50, 90}


@pytest.mark.parametrize("last", [1, 2, 5, 200])
def test_rounds_are_marked_at_whole_numbers(last, figures):
  few = [{"round": r, "a/test_accuracy": 0.5} for r in (0, last)]
  charts.curves({"x": [few]}, "")
  charts.collaboration([few], "", parties={"a": "A"}, bounds={"a": 0.9})
  for fig in figures:
    ticks = fig.axes[0].get_xticks()
    assert len(ticks) > 1 and all(tick == round(tick) for tick in ticks)


def test_parallel_coordinates(figures):
  axes = {"lr": [0.1, 0.01, 1.0, 0.0], "alpha": [1, 2, 3, 5]}
  scores = [0.25, None, 0.5, 0.375]
  charts.parallel_coordinates(axes, scores, "", log=["lr"])
  (ax,) = figures[0].axes
  # The axes of the chart are lines too, before the trials', the best last. By
  # hand: 0.1 is halfway from 0.01 to 1, and 0, of a start, at the end.
  lines = [tuple(line.get_ydata()) for line in ax.lines[3:]]
  assert lines == [
    pytest.approx(line)
    for line in ((0, 0.25), (0.5, 0, 0), (0, 1, 0.5), (1, 0.5, 1))
  ]
  marks = [text.get_text() for text in ax.texts]
  assert marks[:5] == ["0.01", "0.03162", "0.1", "0.3162", "1"]
  assert marks[-5:] == ["25", "31.25", "37.5", "43.75", "50"]


def test_curves_without_the_metric_are_an_error(tmp_path):
  with pytest.raises(ValueError, match="metric='f1': no row"):
    charts.curves({"a": [rows(0.5)]}, tmp_path / "x.png", metric="f1")


def test_table():
  pool = {"parameters": 1234567, "test_accuracy": 0.8125}
  pools = {
    "small": pool | {"heldout_accuracy": None},
    "large": pool | {"heldout_accuracy": 1.0},
  }
  result = {"rounds": 1500, "seconds": 4321.06, "pools": pools}
  text = report.table({"codist": [result]}).split("\n")
  assert text[0].split() == ["small", "large"]
  assert text[1].split()[:3] == ["algorithm", "parameters", "test"]
  assert text[3].split() == (
    "codist 1,234,567 81.25 - 1,234,567 81.25 100.00 1,500 4,321.1".split()
  )
  assert len(set(map(len, text[1:4]))) == 1
  private = report.table({"codist": [result | {"epsilon": 8.0}]}).split("\n")
  assert private[1].split()[-3:] == ["epsilon", "rounds", "seconds"]
  assert private[3].split()[-3:] == ["8.00", "1,500", "4,321.1"]
