import matplotlib.image
import numpy as np
import pytest

from hetfl import report


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
  runs = {"codist": rows(0.8), "fedavg": rows(0.7), "just started": []}
  published = {"large": {"codist": 0.81}}
  report.curves(runs, path, published=published, title="EMNIST")
  image = matplotlib.image.imread(path)
  assert image.shape[0] > 400 and image.shape[1] > 1000
  # Both colours are there: #0072B2 and #D55E00.
  for color in ((0, 0x72, 0xB2), (0xD5, 0x5E, 0)):
    distance = np.abs(image[..., :3] - np.array(color) / 255).max(-1)
    assert (distance < 0.02).sum() > 100
  first = path.read_bytes()
  report.curves(runs, path, published=published, title="EMNIST")
  assert path.read_bytes() == first
  assert [p.name for p in tmp_path.iterdir()] == ["curves.png"]


def test_curves_without_the_metric_are_an_error(tmp_path):
  with pytest.raises(ValueError, match="metric='f1': no row"):
    report.curves({"a": rows(0.5)}, tmp_path / "x.png", metric="f1")


def test_table():
  pool = {"parameters": 1234567, "test_accuracy": 0.8125}
  results = {
    "codist": {
      "rounds": 1500,
      "seconds": 4321.06,
      "pools": {
        "small": pool | {"heldout_accuracy": None},
        "large": pool | {"heldout_accuracy": 1.0},
      },
    },
    "a": {"rounds": 3, "pools": {"small": pool}},
  }
  text = report.table(results).split("\n")
  assert text[0].split() == ["small", "large"]
  assert text[1].split()[:3] == ["algorithm", "parameters", "test"]
  assert text[3].split() == (
    "codist 1,234,567 81.25 - 1,234,567 81.25 100.00 1,500 4,321.1".split()
  )
  assert text[4].split() == "a 1,234,567 81.25 - - - - 3 -".split()
  assert len(set(map(len, text[1:4]))) == 1
