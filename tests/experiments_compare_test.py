"""experiments/compare.py as a user runs it."""

import dataclasses
import functools
import re

import compare_run
import jax
import numpy as np
import pytest
import settings
from sklearn import metrics as sklearn_metrics

from hetfl.data.compared_images import load_compared_images
from tests.runs import last_arrays, last_state, outcome, ROOT

METHODS = ("local", "pooled", "fml", "fedproto")
CLIENTS, SAMPLED = 4, 3
QUICK = (
  f"--num_clients={CLIENTS}",
  f"--clients_per_round={SAMPLED}",
  "--models=mlp,small_cnn",
  "--global_model=mlp",
  "--local_epochs=1",
  "--eval_every=2",
  "--target_accuracy=0.5",
  "--notensorboard",
)


@pytest.fixture
def compare(experiment):
  return experiment("compare")


def by_numpy(folder, client, own, row=(), **options):
  """Labels of an MLP's test images, and predictions by prototype and head."""
  _, arrays = last_arrays(folder)
  arrays = {re.sub(r"\W+", "_", p).strip("_"): a for p, a in arrays.items()}
  layer = lambda name: (
    arrays[f"{own}_variables_params_{name}_{part}"][row]
    for part in ("kernel", "bias")
  )
  images = load_compared_images(
    "digits", num_clients=CLIENTS, partition_alpha=0.5, **options
  )
  held = images.test.client(client)
  x = (held["x"].reshape(-1, 64) / 255 - 0.305) / 0.376
  for name in ("body_layers_0_Dense_0", "body_layers_0_Dense_1"):
    kernel, bias = layer(name)
    x = np.maximum(x @ kernel + bias, 0)
  kernel, bias = layer("head")
  by_head = (x @ kernel + bias).argmax(-1)
  if "server_total" not in arrays:
    return held["y"], by_head
  prototypes = arrays["server_total"] / arrays["server_count"][:, None]
  distances = np.square(x[:, None] - prototypes[None]).sum(-1)
  return held["y"], distances.argmin(-1), by_head


def test_four_methods_side_by_side_and_one_alone(compare, tmp_path):
  done = compare(*QUICK, "--rounds=4", f"--workdir={tmp_path}/all")
  for name in ("curves", "clients", "partition"):
    assert (tmp_path / f"all/{name}.png").read_bytes().startswith(b"\x89PNG")
  lines = [line.split("  ") for line in done.stdout.splitlines()]
  cells = [[cell.strip() for cell in line if cell] for line in lines]
  head, rows = cells[0], {cell[0]: cell for cell in cells if len(cell) > 5}
  results, rounds = {}, {}
  for name in METHODS:
    results[name], rounds[name] = outcome(tmp_path / "all" / name)
    assert [row["round"] for row in rounds[name]] == [2, 4]
  # An evaluation of client 2, an MLP, without hetfl's models.
  client = results["fedproto"]["clients"][2]
  # Every other client is in the first group.
  group = dict(own="clients_0_learner", row=1)
  y, *predicted = by_numpy(tmp_path / "all/fedproto", 2, **group)
  assert (client["model"], client["test_examples"]) == ("mlp", len(y))
  for way, labels in zip(("", "_by_head"), predicted):
    right = np.mean(labels == y)
    assert client[f"test_accuracy{way}"] == pytest.approx(right)
    f1 = sklearn_metrics.f1_score(y, labels, average="macro")
    assert client[f"macro_f1{way}"] == pytest.approx(f1)
  # The table, out of the clients' results.
  alone = [c["test_accuracy"] for c in results["local"]["clients"]]
  kilobytes = {"fml": 2 * 4 * 3466 * SAMPLED / 1e3}
  kilobytes["fedproto"] = 4 * (10 * 33 + 10 * 32) * SAMPLED / 1e3
  for label in (*METHODS, "fedproto by head", "fml by server"):
    name, _, way = label.partition(" ")
    metric = "_".join(["test_accuracy", *way.split()])
    own = [c[metric] for c in results[name]["clients"]]
    shown = dict(zip(head, rows[label]))
    for title, value in {
      "mean %": np.mean(own),
      "deviation": np.std(own, ddof=1),
      "worst %": min(own),
      "worst tenth %": min(own),  # One of four clients.
      "worse than alone %": np.mean(np.less(own, alone)),
    }.items():
      assert float(shown[title]) == pytest.approx(100 * value, abs=0.5)
    sent = float(shown["KB a round"].replace(",", ""))
    assert sent == pytest.approx(kilobytes.get(name, 0), abs=0.1)
    there = [r["round"] for r in rounds[name] if r[f"clients/{metric}"] >= 0.5]
    first, reached = min(there, default=None), [shown["rounds to target"]]
    assert reached == ["-" if first is None else str(first)]
    way = metric.removeprefix("test_accuracy")
    assert results[name]["all"][f"rounds_to_target{way}"] == first
    total = results[name]["all"][f"bytes_to_target{way}"]
    if first is not None:
      assert total == first * results[name]["bytes_per_round"]
      shown_total = float(shown["KB to target"].replace(",", ""))
      assert shown_total == pytest.approx(total / 1e3, abs=0.05)
  # All images are in the clients' hands; a quarter of each's are for tests.
  held = results["local"]["clients"]
  assert sum(c["examples"] + c["test_examples"] for c in held) == 1797
  for c in held:
    assert c["test_examples"] == (c["examples"] + c["test_examples"]) // 4
  shares = np.array([c["examples"] for c in held])
  effective = shares.sum() ** 2 / np.sum(shares**2)
  assert results["fml"]["effective_clients"] == pytest.approx(effective)
  assert results["pooled"]["all"]["test_accuracy"] > np.mean(alone)
  # A method by itself, resumed, is the same.
  for rounds in (2, 4):
    one = ("--method=fedproto", f"--rounds={rounds}")
    compare(*QUICK, *one, f"--workdir={tmp_path}/resumed")
  folders = tmp_path / "all/fedproto", tmp_path / "resumed"
  for found in (outcome, last_state):
    assert found(folders[0]) == found(folders[1])


def test_all_methods_run(compare, tmp_path):
  methods = "fedkd,fd,fedtgp,fedgh,lgfedavg,fedgen,fedgkt,fedmrl,ditto,scaffold"
  one = ("--models=mlp", f"--method={methods}", "--rounds=2")
  one += ("--local_epochs=2",)
  compare(*QUICK, *one, f"--workdir={tmp_path}/all")
  for name in methods.split(","):
    result, _ = outcome(tmp_path / "all" / name)
    assert result["all"]["test_accuracy"] > 0.2  # Of ten classes.
  sent = lambda name: outcome(tmp_path / "all" / name)[0]["bytes_per_round"]
  assert sent("lgfedavg") == SAMPLED * 2 * 4 * 10 * 33
  generator = 128 * (32 + 10 + 4) + 129 * 32
  assert sent("fedgen") == sent("lgfedavg") + SAMPLED * 4 * generator
  gkt = outcome(tmp_path / "all/fedgkt")[0]
  held = sum(client["examples"] for client in gkt["clients"]) // CLIENTS
  assert gkt["bytes_per_round"] == SAMPLED * held * 4 * (2 * (32 + 10 + 1) + 10)
  assert gkt["all"]["test_accuracy_by_head"] > 0.2
  small = 65 * 32 + 33 * 8 + 9 * 10  # An MLP with 8 features, and a head.
  assert sent("fedmrl") == SAMPLED * 2 * 4 * small
  assert sent("ditto") == SAMPLED * 2 * 4 * 3466
  assert sent("scaffold") == 2 * sent("ditto")
  one = ("--models=resnet", "--method=heterofl", "--rounds=2")
  compare(*QUICK, *one, "--widths=1,0.25", f"--workdir={tmp_path}/one")
  result, _ = outcome(tmp_path / "one")
  assert result["all"]["test_accuracy"] > 0.2
  blocks = lambda w: 10 * w + 6 * (9 * w + 3) * w + 2 * (w + 1) * w + 2 * w
  parameters = lambda w: blocks(w) + (w + 1) * 32 + 33 * 10
  found = [(c["width"], c["parameters"]) for c in result["clients"]]
  assert found == 2 * [(1.0, parameters(16)), (0.25, parameters(4))]
  assert result["bytes_per_round"] == SAMPLED * 4 * sum(
    parameters(w) for w in (16, 4)
  )


def test_methods_in_pools_and_on_public_images(compare, tmp_path):
  methods = "fedavg,fedprox,feddf,fedet,codist,mergedcodist,fedmd,dsfl"
  public = ("--public_dataset=digits", "--public_examples=97")
  drawn = (*public, "--public_subset=32", "--codist_period=1")
  drawn += (f"--method={methods}", "--rounds=2", "--dropout_rate=0.1")
  drawn += ("--prox_mu=1",)
  drawn += (f"--models=mlp,{ROOT}/tests/small_models.py:large",)
  compare(*QUICK, *drawn, f"--workdir={tmp_path}/all")
  results = {}
  for name in methods.split(","):
    results[name], _ = outcome(tmp_path / "all" / name)
    assert results[name]["all"]["test_accuracy"] > 0.3  # Of ten classes.
    held = results[name]["clients"]
    assert sum(c["examples"] + c["test_examples"] for c in held) == 1797 - 97
  assert results["fedprox"]["all"] != results["fedavg"]["all"]
  model = 2 * 4 * np.mean([c["parameters"] for c in held])
  for name in ("fedprox", "feddf", "fedet"):
    assert results[name]["bytes_per_round"] == SAMPLED * model
  scores = 2 * 4 * 32 * 10 + 4 * 32  # And which images.
  assert results["dsfl"]["bytes_per_round"] == SAMPLED * scores
  # Client 2, an MLP, is evaluated by the model of its pool, or its own.
  # Fed-ET's server has an MLP, too.
  for name, own, way in (
    ("fedavg", "server_0", ""),
    ("fedet", "server_0", ""),
    ("fedet", "server_2", "_by_server"),
    ("fedmd", "clients_2", ""),
  ):
    folder = tmp_path / "all" / name
    y, labels = by_numpy(folder, 2, own, public_examples=97)
    accuracy = results[name]["clients"][2][f"test_accuracy{way}"]
    assert accuracy == pytest.approx(np.mean(labels == y))
  # All clients of KT-pFL take part.
  one = ("--method=ktpfl", "--models=mlp", "--rounds=2", "--public_subset=32")
  watched = ("--validation=0.25", "--patience=1", "--eval_every=1")
  compare(*one, *public, *watched, f"--workdir={tmp_path}/one")
  result, rows = outcome(tmp_path / "one")
  for c in result["clients"]:  # A quarter, and a quarter of the rest.
    assert c["examples"] / c["test_examples"] == pytest.approx(9 / 4, rel=0.1)
  assert rows[-1]["clients/validation_accuracy"] > 0.2


def test_networks_of_full_size_make_a_round():
  """It is only traced; batches that are not full would be refused."""
  flags = ("--models=resnet18,mlp", "--method=fedtgp", "--engine=inline")
  flags, cls = (*flags, "--num_clients=4"), compare_run.SETTINGS
  values = settings.parse(flags, cls).values
  s = cls.resolve(values, compare_run.words(values, "fedtgp"))
  s = dataclasses.replace(s, method="fedtgp")
  experiment = compare_run.Experiment(s)
  algorithm, data = experiment.algorithm(s), experiment.device_data(s)
  state = jax.eval_shape(algorithm.init, jax.random.key(0))
  step = lambda state: algorithm.step(state, experiment.plan(s, 1), data)
  after, _ = jax.eval_shape(step, state)
  assert jax.tree.map(np.shape, after) == jax.tree.map(np.shape, state)


def test_fewer_examples_keep_the_shares_of_classes():
  load = functools.partial(
    load_compared_images, "digits", num_clients=2, partition="iid"
  )
  held = lambda images: sum(
    np.bincount(one.bank["y"][one.members])
    for one in (images.train, images.test)
  )
  everything, some = held(load()), held(load(examples=600))
  assert some.sum() == 600
  assert np.abs(some - everything * 600 / 1797).max() < 1
  with pytest.raises(ValueError, match="examples=1798: .* at most 1797"):
    load(examples=1798)


def test_a_file_says_who_has_which_images(tmp_path):
  path = tmp_path / "clients.json"
  path.write_text("[[0, 1796, 2], [1, 3]]")
  load = functools.partial(
    load_compared_images, "digits", partition="file", partition_file=path
  )
  images = load(num_clients=2)
  held = [
    [*images.train.positions(k), *images.test.positions(k)] for k in (0, 1)
  ]
  assert list(map(sorted, held)) == [[0, 2, 1796], [1, 3]]
  with pytest.raises(ValueError, match="num_clients=3: .* has 2"):
    load(num_clients=3)
  for text in ("[[0, 5, 5], [1, 3]]", "[[0, 5], [5, 3]]"):
    path.write_text(text)  # It would train on what is tested.
    with pytest.raises(ValueError, match="position 5 is there twice"):
      load(num_clients=2)
  path.write_text("[[0, 1797], [1, 3]]")
  with pytest.raises(ValueError, match="client 0: position 1797 is outside"):
    load(num_clients=2)


def test_bad_input_is_one_line(compare, tmp_path):
  cases = [
    (("--method=local,local",), "--method=local,local: name each once"),
    (("--models=vgg",), "--models=vgg: choose from cnn4, mixed3, htfe2"),
    (("--method=heterofl",), "--models=mlp,small_cnn: clients of --method=het"),
    (
      ("--method=heterofl", "--models=lenet5"),
      "--widths=0.5: lenet5 has no narrower copies",
    ),
    (
      ("--method=heterofl", "--models=resnet", "--widths=0.3"),
      "--widths=0.3: give a share in eighths",
    ),
    (
      ("--method=ditto",),
      "--models=mlp,small_cnn: the clients of",
    ),
    (
      ("--method=scaffold",),
      "--models=mlp,small_cnn: the clients of --method=",
    ),
    (("--clients_per_round=5",), "--clients_per_round=5: pool 0 has 4"),
    (("--method=dsfl",), "--method=dsfl: needs public images; give --public_"),
    (
      ("--method=ktpfl", "--public_dataset=digits"),
      "--method=ktpfl: all clients take part in each round; leave out",
    ),
    (
      ("--method=dsfl", "--public_dataset=digits", "--public_subset=999"),
      "--public_subset=999: exceeds the 300 public examples",
    ),
    (
      ("--method=codist", "--models=mlp", "--public_dataset=digits"),
      "--models=mlp: with --method=codist architectures teach each other",
    ),
    (("--late_clients=2",), "--late_clients=2 --late_round=1: give both"),
    (("--patience=2",), "--patience=2: needs images to measure by; give --val"),
    (("--num_clients=900", "--partition_alpha=0.01"), "has 1 of the 2 images"),
  ]
  compare.refuse(cases, *QUICK, "--rounds=1", fresh=tmp_path / "fresh")
