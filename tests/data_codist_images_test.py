import numpy as np
import pytest

from hetfl.data import codist_images, partition, vision

load = codist_images.load_codist_images


def _check_parts(images):
  """Who holds what never overlaps, and all are over one bank."""
  small, large = images.pools
  assert small.bank is large.bank is images.heldout.bank
  assert small.bank["x"].dtype == np.uint8
  assert set(small.bank) == set(images.test.bank) == {"x", "y"}
  assert set(large.ids) <= set(small.ids)
  for k, client_id in enumerate(large.ids):
    np.testing.assert_array_equal(
      large.positions(k), small.positions(small.ids.index(client_id))
    )
  parts = [small.members, images.heldout.index]
  if images.distill.bank is small.bank:
    parts.append(images.distill.index)
  together = np.concatenate(parts)
  assert len(np.unique(together)) == len(together)
  return len(together)


def test_digits():
  images = load("digits")
  assert _check_parts(images) == 1437
  assert [len(p) for p in images.pools] == [42, 8]
  assert min(images.pools[0].sizes) >= 1
  assert images.partition == "dirichlet" and images.num_classes == 10
  assert images.image_shape == images.test.bank["x"].shape[1:] == (8, 8, 1)
  assert len(images.test.index) == 360
  assert images.distill.bank is images.pools[0].bank


def test_the_federation_does_not_depend_on_the_run():
  a = load("digits", distill_examples=50)
  b = load("digits", seed=1, distill_examples=50, high_capacity_clients=20)
  assert a.pools[0].ids == b.pools[0].ids
  np.testing.assert_array_equal(a.pools[0].members, b.pools[0].members)
  np.testing.assert_array_equal(a.heldout.index, b.heldout.index)
  assert set(a.pools[1].ids) < set(b.pools[1].ids)
  # The run's seed draws the distillation images alone.
  assert set(a.distill.index) != set(b.distill.index)
  all_of_them = load("digits").distill.index
  fewer = load("digits", distill_examples=20).distill.index
  assert len(fewer) == 20
  assert set(fewer) < set(a.distill.index) < set(all_of_them)
  c = load("digits", partition_seed=1)
  assert set(a.pools[0].ids) != set(c.pools[0].ids)


@pytest.mark.parametrize("dataset", ["digits", "cifar10", "cifar100"])
def test_partition_alpha_sets_the_skew(dataset, full_size):
  share = {}
  for alpha in (0.02, None, 1000.0):
    pool = load(dataset, partition_alpha=alpha).pools[0]
    y = pool.bank["y"] // (5 if dataset == "cifar100" else 1)  # coarse there
    counts = [np.bincount(y[pool.positions(k)]) for k in range(len(pool))]
    share[alpha] = np.mean([c.max() / c.sum() for c in counts])
  assert share[0.02] > share[None] + 0.1 and share[None] > share[1000.0] + 0.1


@pytest.mark.parametrize(
  "kwargs, message",
  [
    (dict(high_capacity_clients=43), "high_capacity_clients=43.*at most 42"),
    (dict(high_capacity_clients=0), "high_capacity_clients=0.*least 1"),
    (dict(distill_data="cifar10"), "distill_data=cifar10: .*in_domain"),
    (dict(distill_examples=0), "distill_examples=0"),
    (dict(distill_examples=10_000), "distill_examples=10000.*1 to "),
  ],
)
def test_arguments_out_of_range(kwargs, message):
  with pytest.raises(ValueError, match=message):
    load("digits", **kwargs)
  with pytest.raises(ValueError, match="dataset=svhn.*digits.*cifar100"):
    load("svhn")
  # Before any data is looked for.
  with pytest.raises(
    ValueError, match="distill_data=cifar100: .*in_domain, cifar10"
  ):
    load("cifar100", distill_data="cifar100", data_dir="/nowhere")


@pytest.fixture
def full_size(monkeypatch):
  """Both CIFARs at their full size, with one pixel for each image."""

  def load(name, **_):
    def bank(n):
      y = np.random.default_rng(0).permutation(n) % classes
      bank = {"x": np.zeros((n, 1, 1, 3), np.uint8), "y": y.astype(np.int32)}
      return bank | ({"coarse": bank["y"] // 5} if classes == 100 else {})

    if name == "digits":
      return vision.load_digits()
    classes = int(name.removeprefix("cifar"))
    return vision.VisionDataset(name, bank(50_000), bank(10_000), classes)

  monkeypatch.setattr(vision, "load", load)


@pytest.mark.parametrize(
  "dataset, other, classes, name",
  [
    ("cifar100", "cifar10", 100, "pachinko"),
    ("cifar10", "cifar100", 10, "dirichlet"),
  ],
)
def test_both_cifars_have_the_papers_split(
  full_size, dataset, other, classes, name
):
  images = load(dataset)
  assert _check_parts(images) == 50_000
  assert [len(p) for p in images.pools] == [315, 47]
  assert set(images.pools[0].sizes) == {100}
  assert len(images.distill.index) == 13_500
  assert len(images.heldout.index) == 5_000
  assert len(images.test.index) == 10_000
  assert (images.num_classes, images.partition) == (classes, name)
  labels = images.pools[0].bank["y"]
  commonest = [
    np.bincount(labels[images.pools[0].positions(k)]).max() for k in range(315)
  ]
  assert np.mean(commonest) > 2 * 100 / classes  # of 100; shuffled: few more

  out = load(dataset, distill_data=other, distill_examples=600)
  np.testing.assert_array_equal(out.pools[0].members, images.pools[0].members)
  assert out.distill.bank is not out.pools[0].bank
  assert set(out.distill.bank) == {"x", "y"}
  assert len(out.distill.index) == 600
  assert len(load(dataset, distill_data=other).distill.index) == 50_000


def test_tffs_own_clients_are_used_where_they_are(full_size, tmp_path):
  import fedjax

  def write(split, clients, per_client):
    n = clients * per_client
    y = np.random.default_rng(0).permutation(n) % 100
    arrays = {"image": np.zeros((n, 32, 32, 3), np.uint8), "label": y}
    arrays["coarse_label"] = y // 5
    parts = partition.iid(n, num_clients=clients, seed=0)
    path = tmp_path / f"federated_cifar100_{split}.sqlite"
    with fedjax.SQLiteFederatedDataBuilder(str(path)) as builder:
      builder.add_many(
        (b"%d" % k, {name: a[own] for name, a in arrays.items()})
        for k, own in enumerate(parts)
      )
    return y[np.concatenate(parts)]

  y = write("train", 500, 100)
  images = load("cifar100", data_dir=tmp_path)
  assert images.partition == "tff"
  with pytest.raises(ValueError, match="partition_alpha=0.3.*cifar100 says wh"):
    load("cifar100", data_dir=tmp_path, partition_alpha=0.3)
  assert _check_parts(images) == 50_000
  small = images.pools[0]
  assert [len(p) for p in images.pools] == [315, 47]
  np.testing.assert_array_equal(small.bank["y"], y)
  for k, number in enumerate(map(int, small.ids)):
    np.testing.assert_array_equal(small.positions(k) // 100, [number] * 100)
  assert images.image_shape == (32, 32, 3)
  assert images.test.bank["x"].shape == (10_000, 1, 1, 3)  # of the CIFAR there
  write("test", 2, 10)
  images = load("cifar100", data_dir=tmp_path)
  assert images.test.bank["x"].shape == (20, 32, 32, 3)
