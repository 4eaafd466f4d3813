"""Runs compared by their folders."""

import csv
import json

import pytest


@pytest.fixture
def summarize(experiment):
  return experiment("summarize")


def save(folder, rows, **result):
  """A run's folder."""
  folder.mkdir(parents=True)
  text = "".join(json.dumps(row) + "\n" for row in rows)
  (folder / "metrics.jsonl").write_text(text)
  if result:
    (folder / "result.json").write_text(json.dumps(result))


def write(folder, values, **result):
  """A run's folder with evaluations of one model every ten rounds."""
  rows = [
    {"round": 10 * t, "seconds": 30.0 * t, "global/accuracy": value}
    for t, value in enumerate(values, 1)
  ]
  save(folder, rows, **result)


def test_rounds_bytes_and_minutes_to_a_target(summarize, tmp_path):
  # Reached in round 30 and 20, that is after 300 and 200 kB, 1.5 and 1 min.
  write(tmp_path / "w/seed0/fml", [0.25, 0.5, 0.75], bytes_per_round=10_000)
  write(tmp_path / "w/seed1/fml", [0.5, 1.0, 0.5], bytes_per_round=10_000)
  # One seed does not reach it, and the other has not ended.
  write(tmp_path / "w/seed0/fedavg", [None, 0.25, 0.75])
  write(tmp_path / "w/seed1/fedavg", [0.25, 0.5, 0.25])
  asked = ("--metric=accuracy", "--target=75")
  done = summarize(tmp_path / "w", *asked, f"--out={tmp_path}/sum")
  lines = [line.split("  ") for line in done.stdout.splitlines()]
  lines = [[cell.strip() for cell in line if cell.strip()] for line in lines]
  assert lines[0][-3:] == ["rounds to 75 %", "MB to 75 %", "min to 75 %"]
  assert lines[2:4] == [
    # Deviations of samples of two: half the distance times the root of 2.
    ["fedavg", "global", "2", "30", "50.00 ± 35.36", "62.50 ± 17.68"]
    + ["1 of 2", "?", "1 of 2"],
    ["fml", "global", "2", "30", "62.50 ± 17.68", "87.50 ± 17.68"]
    + ["25 ± 7", "0.2 ± 0.1", "1.2 ± 0.4"],
  ]
  with open(tmp_path / "sum/summary.csv", encoding="utf-8") as file:
    table = {(row["run"], row["seed"]): row for row in csv.DictReader(file)}
  assert table["fml", "1"] == {
    "run": "fml",
    "seed": "1",
    "model": "global",
    "rounds": "30",
    "last": "0.5",
    "best": "1.0",
    "best_round": "20",
    "rounds_to_target": "20",
    "bytes_to_target": "200000",
    "seconds_to_target": "60.0",
    "bytes_per_round": "10000",
  }
  assert table["fedavg", "0"]["rounds_to_target"] == "30"
  assert table["fedavg", "0"]["bytes_to_target"] == ""
  assert table["fedavg", "1"]["rounds_to_target"] == ""
  png = (tmp_path / "sum/summary.png").read_bytes()
  assert png.startswith(b"\x89PNG")
  only_fml = [tmp_path / f"w/seed{i}/fml" for i in (0, 1)]
  over = ("--metric=accuracy", "--over=megabytes", f"--out={tmp_path}/bytes")
  done = summarize(*only_fml, *over)
  assert "\nfml  global" in done.stdout  # named after the folder
  over_bytes = (tmp_path / "bytes/summary.png").read_bytes()
  assert over_bytes != png
  summarize(*only_fml, *over, "--published", "fml/global=80")
  assert (tmp_path / "bytes/summary.png").read_bytes() != over_bytes
  assert not list((tmp_path / "w").glob("*.*"))  # Nothing beside the runs.


def test_a_seed_that_ends_early_stays_as_it_is(summarize, tmp_path):
  def picture(name, values, **result):
    w = tmp_path / name
    write(w / "seed0/fml", [0.2, 0.4, 0.6, 0.8], bytes_per_round=1)
    write(w / "seed1/fml", values, **result)
    out = tmp_path / f"{name}_out"
    summarize(w, "--metric=accuracy", f"--out={out}")
    return (out / "summary.png").read_bytes()

  whole = picture("whole", [0.2, 0.4, 0.4, 0.4], bytes_per_round=1)
  assert picture("ended", [0.2, 0.4], bytes_per_round=1) == whole
  assert picture("running", [0.2, 0.4]) != whole


def test_a_target_that_is_reached_at_the_start(summarize, tmp_path):
  for seed, rows in enumerate(([(0, 0.75)], [(0, 0.25), (4, 0.75)])):
    rows = [
      {"round": t, "seconds": 60.0 * t, "a/accuracy": value}
      for t, value in rows
    ]
    save(tmp_path / f"lr=0.1/seed{seed}/fedmd", rows)
  done = summarize(tmp_path / "lr=0.1", "--metric=accuracy", "--target=75")
  # Rounds 0 and 4, minutes 0 and 4: 2 +- 4 / sqrt(2).
  assert "  2 ± 3  " in done.stdout and "2.0 ± 2.8" in done.stdout


def test_models_with_numbers_and_parties_that_diverge(summarize, tmp_path):
  rows = [
    {"cnn1/test_accuracy": 0.5, "cnn2/test_accuracy": 0.75},
    {"party0/test_accuracy": 0.5, "party1/test_accuracy": 0.25},
    {"party0/test_accuracy": 1.0, "party1/test_accuracy": None},
  ]
  save(tmp_path / "run", [{"round": i} | r for i, r in enumerate(rows)])
  done = summarize(tmp_path / "run")
  lines = [" ".join(line.split()) for line in done.stdout.splitlines()[2:]]
  assert lines == [
    "run cnn1 1 0 50.00 50.00",
    "run cnn2 1 0 75.00 75.00",
    "run mean of 2 parties 1 2 diverged 37.50",
  ]


def test_a_pool_sends_what_its_own_clients_do(summarize, tmp_path):
  for name, known in (("new", {"bytes_per_round": 1_500_000}), ("old", {})):
    rows = [
      {"round": t, "small/test_accuracy": 0.5, "large/test_accuracy": 0.25 * t}
      for t in (2, 3)
    ]
    pools = {"small": known, "large": {n: 4 * v for n, v in known.items()}}
    save(tmp_path / name, rows, bytes_per_round=7_500_000, pools=pools)
  target, out = "--target=50", f"--out={tmp_path}/out"
  done = summarize(tmp_path / "new", tmp_path / "old", target)
  lines = [line.split() for line in done.stdout.splitlines()]
  # Two rounds of 1.5 and 6 MB.
  megabytes = {(line[0], line[1]): line[-2] for line in lines[2:]}
  assert megabytes == {
    ("new", "small"): "3.0",
    ("new", "large"): "12.0",
    ("old", "small"): "?",
    ("old", "large"): "?",
  }
  over = ("--over=megabytes", out)
  summarize(tmp_path / "new", *over)
  line = summarize.fails(tmp_path / "new", tmp_path / "old", *over)
  assert "what old, small, sends in a round" in line


def test_parties_and_clients_count_in_the_mean(summarize, tmp_path):
  row = {"round": 1, "party0/test_accuracy": 0.5, "party1/test_accuracy": 1.0}
  save(tmp_path / "md", [row], bytes_per_round=3_000_000)
  # FedMD's phases have folders, and no accuracies over rounds.
  save(tmp_path / "md/public", [])
  out = f"--out={tmp_path}/out"
  done = summarize(tmp_path / "md", "--target=70", "--over=megabytes", out)
  line = [c.strip() for c in done.stdout.splitlines()[2].split("  ") if c]
  assert (
    line == ["md", "mean of 2 parties"] + "1 1 75.00 75.00 1 3.0 0.0".split()
  )
  values = {"client0": 0.25, "clients": 0.5}
  row = {f"{name}/validation_accuracy": x for name, x in values.items()}
  save(tmp_path / "fml", [{"round": 2} | row])
  done = summarize(tmp_path / "fml", "--metric=validation_accuracy")
  assert [s.split()[:2] for s in done.stdout.splitlines()[2:]] == [
    ["fml", "clients"]
  ]


@pytest.mark.parametrize(
  "args, message",
  [
    (("{}/empty",), "empty: no run found"),
    (("{}/run",), "--metric=test_accuracy: no run has it; there are: accuracy"),
    (("{}/run", "--metric=loss"), "--metric=loss: name an accuracy"),
    (
      ("{}/run", "--metric=accuracy", "--out={}/o", "--published", "fml=9"),
      "--published=fml=9: give RUN/MODEL=PERCENT",
    ),
    (
      ("{}/run", "--metric=accuracy", "--out={}/o", "--published", "a/b=9"),
      "--published=a/b=...: there are run/global",
    ),
    (("{}/run", "--over=megabytes"), "for the chart; give --out=DIR too"),
    (("{}/torn",), "torn/result.json is damaged (Expecting"),
    (
      ("{}/run", "--metric=accuracy", "--out={}/torn/result.json"),
      "torn/result.json: cannot be made ([Errno 17] File exists",
    ),
    (
      ("{}/run", "--metric=accuracy", "--over=megabytes", "--out={}/out"),
      "--over=megabytes: no result.json says what run, global, sends",
    ),
  ],
)
def test_what_cannot_be_compared_is_one_line(
  summarize, tmp_path, args, message
):
  write(tmp_path / "run", [0.5])
  write(tmp_path / "torn", [0.5])
  (tmp_path / "torn/result.json").write_text("{")
  assert message in summarize.fails(*(arg.format(tmp_path) for arg in args))
  assert not (tmp_path / "o").exists()
