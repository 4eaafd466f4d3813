"""The papers' tables as cells, and our numbers beside the published."""

import json
import os
import pathlib
import shlex
import subprocess
import sys
import time
import types

import fedmd_run
import fml_run
import make_flags
import matplotlib.image
import pytest
import reproduce
import tables

from hetfl.run import charts, logs, report
from tests.runs import ROOT


@pytest.fixture(scope="module")
def known():
  return tables.tables()


def cell_of(table, name):
  (cell,) = (c for c in table.cells if c.name == name)
  return cell


def test_every_cell_has_a_name_of_its_own(known):
  names = [cell.name for table in known.values() for cell in table.cells]
  assert len(names) == len(set(names))
  numbers = {"codist_fig4": 9, "fml_table1": 72}
  numbers |= {"codist_table1_cifar": 15, "codist_table1_stackoverflow": 15}
  for name, number in numbers.items():
    assert len(known[name].cells) == number
  for table in known.values():
    for cell in table.cells:
      assert cell.published.keys() <= table.numbers.keys(), cell.name


def test_what_is_made_of_declarations_is_up_to_date():
  """Flag files, and docs/settings.md."""
  made = make_flags.files()
  there = {*(ROOT / "experiments/flags").iterdir(), ROOT / "docs/settings.md"}
  assert {ROOT / name for name in made} == there
  for name, text in made.items():
    assert (ROOT / name).read_text(encoding="utf-8") == text, name


def test_published_numbers_are_of_the_setting_that_was_published(known):
  environments = {}
  names = ("fedmd_fig2", "fedmd_weak")
  for name in names:
    for cell in known[name].cells:
      environments[cell.name] = {
        number.split()[-1] for number in cell.published
      }
  paper = {"public", "pooled"}
  assert environments == {
    "fedmd_mnist_letters_iid": paper,
    "fedmd_mnist_letters_by_writer": paper,
    "fedmd_cifar_iid": paper,
    "fedmd_cifar_noniid": paper,
    "fedmd_cifar_noniid_code": {"pooled"},
    "fedmd_weak_none": paper,
    "fedmd_weak_equal": set(),
    "fedmd_weak_suppressed": set(),
    "fedmd_weak_unheard": set(),
  }
  # Models 0 and 9 are suppressed in the paper's CIFAR cells only.
  for cell in known["fedmd_fig2"].cells:
    weights = cell.flags.get("consensus_weights")
    paper = cell.name in ("fedmd_cifar_iid", "fedmd_cifar_noniid")
    assert weights == ([0.5, *[1.0] * 8, 0.5] if paper else None), cell.name
  # The claims are of each party, and of the herd without its weak parties.
  each, herd = (known[name].numbers.values() for name in names)
  assert "parties.0.final_accuracy" in each
  assert "parties.0-7.final_accuracy" in herd


def test_stack_overflow_cells_ask_for_no_c4_that_may_not_be_there(known):
  for name in ("codist_table1_stackoverflow", "codist_table2_stackoverflow"):
    for cell in known[name].cells:
      examples = {"in_domain": 1_000_000}.get(cell.flags.get("distill_data"))
      assert cell.flags.get("distill_examples") == examples, cell.name


def test_fml_is_compared_with_what_the_paper_compares_it_with(known):
  paths = lambda name: {*known[name].numbers.values()}
  assert known["fml_table1"].numbers == {
    "global": "global.test_accuracy",
    "global best": "global.best_test_accuracy",
  }
  for cell in known["fml_table1"].cells:
    assert cell.published.keys() == {"global best"}
  for k in range(5):
    assert f"fml.clients.{k}.validation_accuracy" in paths("fml_fig5")
    best = f"independent.clients.{k}.best_validation_accuracy"
    assert best in paths("fml_fig5")
  # Neither the catfish nor the badly trained client.
  assert not [p for p in paths("fml_sec6") if "*" in p or ".4." in p]
  # Each cell's control is a cell of the same table.
  bad = "bad_clients"
  for name, other, differ in (
    ("fml_sec6_bad_sardine", "fml_sec6_sardines", bad),
    ("fml_sec6_bad_client", "fml_sec6_good_client", bad),
    ("fml_sec6_catfish", "fml_sec6_sardines", "client_models"),
    ("fml_dynamic", "fml_dynamic_constant", "alpha beta"),
  ):
    table = "fml_dynamic" if "dynamic" in name else "fml_sec6"
    flags, control = (cell_of(known[table], n).flags for n in (name, other))
    unlike = {n for n in flags if flags[n] != control.get(n)}
    assert unlike == {*differ.split()}, name
  weights = lambda table: {
    c.flags.get("merge_weights", "uniform") for c in known[table].cells
  }
  assert weights("fml_fig4") == {"uniform"}
  for cell in known["fml_table1"].cells:
    assert ("merge_weights" in cell.flags) == (not cell.name.endswith("fml"))


def test_rows_have_published_columns_only_where_something_is_published(known):
  rows_of, sec6 = reproduce.rows_of, known["fml_sec6"]
  cells = [cell_of(sec6, "fml_sec6_catfish")]
  clients = [{"validation_accuracy": k / 10} for k in range(5)]
  result = {"clients": clients, "global": {"test_accuracy": 0.5}}
  result |= {"rounds": 9, "seconds": 90.0}
  head, row = rows_of(sec6, {"fml_sec6_catfish": [result]})
  assert dict(zip(head, row)) == {
    "run": cells[0].title,
    "clients 0-3": "15.00",
    "clients 0": "0.00",
    "clients 1": "10.00",
    "clients 2": "20.00",
    "clients 3": "30.00",
    "global": "50.00",
    "rounds": "9",
    "minutes": "1.5",
  }
  table1 = known["fml_table1"]
  (name, *_), ran = (c.name for c in table1.cells), {"rounds": 1, "seconds": 1}
  result = {"global": {"test_accuracy": 0.5, "best_test_accuracy": 0.9844}}
  head, row = rows_of(table1, {name: [result | ran]})
  assert head[1:5] == [
    "global",
    "global best",
    "global best, published",
    "difference",
  ]
  assert row[1:5] == ["50.00", "98.44", "98.44", "+0.00"]
  # Of two seeds: the mean of 50 and 52, and the root of (1 + 1) / 1.
  other = {"global": {"test_accuracy": 0.52, "best_test_accuracy": 0.9644}}
  _, row = rows_of(table1, {name: [result | ran, other | ran]})
  assert row[1:5] == ["51.00 ± 1.41", "97.44 ± 1.41", "98.44", "-1.00"]


def test_fedmd_table_has_each_party_and_a_column_a_run(known, tmp_path):
  table = known["fedmd_fig2"]
  cell = cell_of(table, "fedmd_mnist_letters_iid")
  parties = [{"pooled_accuracy": k / 10} for k in range(10)]
  result = {"parties": parties, "rounds": 1, "seconds": 60.0}
  result["phase_seconds"] = {"public": 30.0, "pooled": 90.0}
  rows = reproduce.rows_of(table, {cell.name: [result]})
  reproduce.write(tmp_path, "FedMD", rows, ["--rounds=1"])
  lines = (tmp_path / "table.md").read_text().splitlines()
  assert lines[2] == "All runs with `--rounds=1`."
  assert lines[4:6] == [f"| run | {cell.title} |", "|---|---|"]
  # Table 4's fourth number of MNIST / FEMNIST, i.i.d.; 30 - 88.9.
  at = lines.index("| parties 3 pooled | 30.00 |")
  assert lines[at + 1 : at + 3] == [
    "| parties 3 pooled, published | 88.90 |",
    "| difference | -58.90 |",
  ]
  assert lines[-1] == "| minutes | 3.0 |"


def test_a_figure_is_drawn_against_its_axis(known, tmp_path, monkeypatch):
  table = known["codist_fig4"]
  drawn, titles = {}, []

  def dependence(points, path, *, title, **kwargs):
    drawn[path.name] = points
    titles.append(title)

  results = {
    cell.name: [{"pools": {"small": {"test_accuracy": 0.1 * i}}}]
    for i, cell in enumerate(table.cells)
    if "merged" not in cell.name
  }
  # Searches of two cells; one's trials are of a version without test data.
  for algorithm, more in (
    ("periodic_600", {"test": {"small": 0.7}}),
    ("fedavg", {}),
  ):
    folder = tmp_path / "search" / f"fig4_cifar_{algorithm}"
    folder.mkdir(parents=True)
    logs.write_json(folder / "result.json", {"top": 25, **more})
  reproduce.draw(tmp_path, table, results)
  for name in ("figure", "figure_trials"):
    image = matplotlib.image.imread(tmp_path / f"{name}.png")
    assert image.shape[0] > 400
  monkeypatch.setattr(charts, "dependence", dependence)
  reproduce.draw(tmp_path, table, results)
  assert drawn["figure_trials.png"] == {"periodic, small": [(600, 0.7)]}
  assert titles[1].endswith("Figure 4: means of the best 25 trials")
  assert drawn["figure.png"] == {
    "fedavg, small": [(None, 0.0)],
    "periodic, small": [
      (n, pytest.approx(0.1 * i))
      for i, n in enumerate((150, 600, 2_400, 13_500), 1)
    ],
  }


def test_curves_say_whose_model_they_are_of(tmp_path, monkeypatch):
  drawn = {}
  s = types.SimpleNamespace(
    client_models=("mlp", "cnn1"), dataset=("x",), partition="iid"
  )
  rows = [
    {"round": t, "global/test_accuracy": 0.1 * t}
    | {f"client{k}/validation_accuracy": 0.3 - 0.1 * t for k in range(2)}
    for t in (1, 2)
  ]
  runs = {"fml": [rows], "independent": [rows]}
  fml_run.draw(runs, s, tmp_path)
  image = matplotlib.image.imread(tmp_path / "curves.png")
  assert image.shape[0] > 400
  monkeypatch.setattr(
    fml_run.charts,
    "curves",
    lambda runs, path, **kw: drawn.update(kw, runs=runs),
  )
  fml_run.draw(runs, s, tmp_path)
  assert [*drawn["titles"]] == ["global", "client0", "client1"]
  assert drawn["titles"]["client1"] == "client 1's images (its own model: cnn1)"
  # The best of two rounds, the first.
  assert drawn["published"]["client1"]["independent"] == pytest.approx(0.2)
  fml_run.draw({"fedavg": [rows], "fml": [rows]}, s, tmp_path)
  assert not drawn["published"]
  assert drawn["title"] == (
    "x, iid\nOn clients' images: fedavg with the global model, fml with their"
    " own model"
  )


def test_the_table_names_a_model_only_if_all_have_it():
  def result(*models):
    clients = [{"model": m, "validation_accuracy": 0.5} for m in models]
    best = {"test_accuracy": 0.5, "best_test_accuracy": 0.75}
    return {"clients": clients, "global": best, "rounds": 1, "seconds": 1.0}

  def table(results):
    return fml_table({name: [result] for name, result in results.items()})

  fml_table = lambda results: report.clients_table(results, ("fml",))
  results = {"fml": result("mlp", "lenet5"), "independent": result("mlp", "x")}
  assert "0: mlp" in table(results) and "1: " not in table(results)
  results = {"fedavg": result("lenet5", "lenet5"), "fml": result("mlp", "mlp")}
  assert "mlp" not in table(results) and "lenet5" not in table(results)
  lines = [line.split() for line in table(results).splitlines()]
  assert lines[1][5:7] == ["model", "mean"]
  assert [line[:4] for line in lines[3:]] == [
    ["fedavg", "50.00", "75.00", "global"],
    ["fml", "50.00", "75.00", "own"],
  ]


def test_sigterm_is_handed_on_to_the_cell(tmp_path):
  """The run saves and ends, and the table with it: none is left behind."""
  script = tmp_path / "cell.py"
  script.write_text(
    "import pathlib, signal, sys, time\n"
    f"here = pathlib.Path({str(tmp_path)!r})\n"
    "def end(number, _):\n"
    "  (here / 'saved').touch()\n"
    "  sys.exit(143)\n"
    "signal.signal(signal.SIGTERM, end)\n"
    "(here / 'begun').touch()\n"
    "time.sleep(60)\n"
  )
  process = subprocess.Popen(
    [
      *(sys.executable, "-c"),
      "import sys, reproduce\n"
      f"reproduce.run_cell([sys.executable, {str(script)!r}])",
    ],
    cwd=ROOT / "experiments",
    env={**os.environ, "PYTHONPATH": str(ROOT)},
    stdout=subprocess.DEVNULL,
  )
  deadline = time.monotonic() + 60
  while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
    time.sleep(0.05)
  process.terminate()
  assert process.wait(60) == 143
  assert (tmp_path / "saved").exists()


def test_results_of_several_algorithms_are_read_by_name(tmp_path):
  read, names = reproduce.read_result, ("fml", "independent")
  assert read(tmp_path) is None
  for name in names:
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text('{"config": {"rounds": 3}}')
  for name in names:
    assert read(tmp_path) is None  # Not yet, while one is under way.
    clients = [{"best_validation_accuracy": 0.5}]
    (tmp_path / name / "result.json").write_text(
      json.dumps({"rounds": 3, "seconds": 2.0, "clients": clients})
    )
  result = read(tmp_path)
  assert (result["rounds"], result["seconds"]) == (3, 4.0)
  path = "independent.clients.0.best_validation_accuracy"
  assert tables.lookup(result, path) == 0.5
  # A run that is being lengthened has its old result until it ends.
  (tmp_path / "fml" / "config.json").write_text('{"config": {"rounds": 9}}')
  assert read(tmp_path) is None
  # With --patience 9 are the most.
  config = {"config": {"rounds": 9, "patience": 2}}
  (tmp_path / "fml" / "config.json").write_text(json.dumps(config))
  assert read(tmp_path)["rounds"] == 3


def make_run(folder, **result):
  """What a finished run leaves that tables read."""
  folder.mkdir(parents=True)
  (folder / "config.json").write_text('{"config": {"rounds": 1}}')
  result = {"rounds": 1, "seconds": 60.0, **result}
  (folder / "result.json").write_text(json.dumps(result))


def test_a_cell_is_tuned_and_run_with_the_best(tmp_path, monkeypatch, capsys):
  commands = []

  def run_cell(command):
    commands.append([pathlib.Path(command[1]).name, *command[2:]])
    (tmp_path / "table1_cifar_3100_fedavg").mkdir(exist_ok=True)
    return 0

  def table(*args):
    names = ("--table=codist_table1_cifar", "--only=3100_fedavg")
    search = ("--search=8", "--search_rounds=30", "--search_flags=--block=4")
    run = ("--seeds=0,1", "--data_dir=/data", "--", "--recipe=crop24")
    reproduce.main([*names, f"--workdir={tmp_path}", *search, *args, *run])

  monkeypatch.setattr(reproduce, "run_cell", run_cell)
  monkeypatch.setattr(
    reproduce,
    "read_results",
    lambda folder, _: [{"rounds": 1500, "seconds": 9.0}] * folder.exists(),
  )
  table()
  tuning, run = commands
  folder = tmp_path / "search/table1_cifar_3100_fedavg"
  shared = ["--recipe=crop24", "--data_dir=/data"]
  # Trials have one seed each, and flags of theirs after the cell's.
  assert tuning[:5] == [
    "tune.py",
    "--experiment=codist",
    "--trials=8",
    f"--workdir={folder}",
    "--block=4",
  ]
  assert tuning[6].endswith("table1_cifar_3100_fedavg.flags")
  assert tuning[7:] == [*shared, "--rounds=30"]
  assert run == [
    "codist.py",
    f"--flagfile={folder}/best.flags",
    "--rounds=1500",
    f"--workdir={tmp_path}/table1_cifar_3100_fedavg",
    "--seeds=0,1",
    *shared,
  ]
  shown = "`--search=8 --seeds=0,1 --recipe=crop24`"
  assert shown in (tmp_path / "table.md").read_text()
  capsys.readouterr()
  table("--commands")
  # One word for `exec`.
  *bash, both = shlex.split(capsys.readouterr().out)
  first, then = both.split(" && exec ")
  assert bash == ["bash", "-c"] and shlex.split(first)[2:] == tuning[1:]
  assert shlex.split(then)[2:] == run[1:]
  for args, message in (
    (
      ("--table=fedmd_fig2", "--search=8"),
      "--search=8: fedmd.py has no search",
    ),
    (("--table=fml_fig6", "--search_rounds=8"), "only with --search"),
    (("--table=fml_fig6", "--", "--seed=5"), "--seed=5: give --workdir and"),
  ):
    with pytest.raises(SystemExit, match=message):
      reproduce.main(args)


def test_a_table_has_cells_that_others_finish_meanwhile(
  known, tmp_path, monkeypatch, capsys
):
  """And goes on after a failure."""
  begun = []
  cells = [cell.name for cell in known["codist_table1_cifar"].cells][:4]
  accuracy = {"pools": {"small": {"test_accuracy": 0.5}}}

  def run_cell(command):
    begun.append(pathlib.Path(command[3].partition("=")[2]).name)
    if begun[-1] == cells[0]:
      make_run(tmp_path / cells[3], **accuracy)  # By another process.
    if begun[-1] == cells[1]:
      return 3
    make_run(tmp_path / begun[-1], **accuracy)
    return 0

  def table(*args):
    names = f"--only={','.join(cells[:3])}"
    args = ("--table=codist_table1_cifar", f"--workdir={tmp_path}", *args)
    reproduce.main([names] * ("--tabulate" not in args) + [*args])

  monkeypatch.setattr(reproduce, "run_cell", run_cell)
  with pytest.raises(SystemExit, match=rf"{cells[1]} \(status 3\); after"):
    table()
  assert begun == cells[:3]
  rows = (tmp_path / "table.csv").read_text().splitlines()
  assert len(rows) == 4  # The head, and all but the one that failed.
  (tmp_path / "table.csv").unlink()
  with pytest.raises(SystemExit, match="no cell is done in"):
    table("--tabulate", "--seeds=0,1")
  capsys.readouterr()
  table("--tabulate")
  assert (tmp_path / "table.csv").read_text().splitlines() == rows
  assert "| 50.00 |" in capsys.readouterr().out
  table("--commands", "--download", "--data_dir=/my data", "--seeds=1,2")
  lines = capsys.readouterr().out.splitlines()
  assert len(begun) == 3
  runs = [(name, seed) for name in cells[:3] for seed in (1, 2)]
  for (name, seed), line in zip(runs, lines, strict=True):
    python, script, *args = shlex.split(line)
    assert pathlib.Path(script).name == "codist.py"
    assert pathlib.Path(args[0].partition("=")[2]).stem == name
    assert args[1:] == [
      f"--workdir={tmp_path / name / f'seed{seed}'}",
      *(f"--seed={seed}", "--data_dir=/my data", "--download"),
    ]
  table("--commands", "--seeds=1,2", "--", "--pretrained=/a/b")
  lines = capsys.readouterr().out.splitlines()
  assert [line.endswith("--pretrained=/a/b/seed1") for line in lines] == (
    [True, False] * 3
  )


def test_cells_of_one_public_training_share_it(known, tmp_path):
  cells = {c.name: c for c in known["fedmd_fig2"].cells}
  cells |= {c.name: c for c in known["fedmd_weak"].cells}

  def public(cell):
    s = fedmd_run.FedMD.resolve(cell.flags, fedmd_run.words(cell.flags))
    return fedmd_run.of_phase(s, "public").of_kind("result")

  for cell in cells.values():
    if cell.like is not None:
      assert public(cell) == public(cells[cell.like]), cell.name
  other = cells["fedmd_cifar_noniid_code"]
  assert public(other) != public(cells["fedmd_cifar_iid"])

  def shared(seeds=()):
    given = {"workdir": str(tmp_path), "seeds": seeds}
    args = reproduce.Reproduce.resolve(given, ())
    run = reproduce.Cells(known["fedmd_fig2"], args, [])
    return run.shared_phases(cells["fedmd_cifar_noniid"])

  assert shared() == []
  make_run(tmp_path / "fedmd_cifar_iid/public")
  assert shared() == [f"--pretrained={tmp_path / 'fedmd_cifar_iid'}"]
  assert shared((0, 1)) == []
  for seed in (0, 1):
    make_run(tmp_path / f"fedmd_cifar_iid/seed{seed}/public")
  assert len(shared((0, 1))) == 1
  # One that has begun its own goes on with it.
  (tmp_path / "fedmd_cifar_noniid/public").mkdir(parents=True)
  assert shared() == []
