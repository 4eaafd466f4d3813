"""Federations of text: who is in what."""

import chex
import numpy as np
import pytest

from hetfl import localize, plans
from hetfl.data import codist_text, DataError, text
from tests import data_text_test as files

load = codist_text.load_codist_text


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
  """Sixty users; user k says word `u<k>` in all of their sentences."""
  rows = []
  for k in range(60):
    # A third asks, a third answers, a third does both, answers prevailing
    # for even k.
    asked = {0: 6, 1: 0, 2: 3 if k % 2 else 2}[k % 3]
    answered = {0: 0, 1: 5, 2: 3}[k % 3]
    rows += [files.row(k, f"<p>u{k} asks the {i} .</p>") for i in range(asked)]
    rows += [
      files.row(k, f"<p>u{k} says a {i} .</p>", 2) for i in range(answered)
    ]
  folder = tmp_path_factory.mktemp("dump") / "stackexchange"
  folder.mkdir()
  (folder / "Posts.xml").write_bytes(files.posts(*rows))
  return folder.parent


def words(data, subset):
  """The words of a subset's sentences, by their own vocabulary."""
  return {
    data.vocabulary.tokens[t - 3]
    for t in np.unique(subset.bank["tokens"][subset.index])
    if 3 <= t < data.vocabulary.oov
  }


def users(population):
  return {int(i) for i in population.ids}


def test_capacity_pools(dump):
  data = load("stackexchange", data_dir=dump, high_capacity_clients=5)
  small, large = data.pools
  assert small.bank is large.bank is data.test.bank is data.distill.bank
  assert (len(small), len(large)) == (60 - 3 - 6 - 15, 5)
  assert users(large) < users(small)
  # The vocabulary knows the names of the pool's users and of nobody else.
  known = words(data, small.examples())
  assert {w for w in known if w[0] == "u"} == {f"u{k}" for k in users(small)}
  for other in (data.distill, data.heldout, data.test):
    assert not {w for w in words(data, other) if w[0] == "u"}
  # Nobody is in two parts, and all sentences are in one.
  parts = [
    small.members,
    *(s.index for s in (data.distill, data.heldout, data.test)),
  ]
  together = np.concatenate(parts)
  assert len(np.unique(together)) == len(together) == len(small.bank["domain"])
  more = load("stackexchange", data_dir=dump, high_capacity_clients=20)
  assert users(large) < users(more.pools[1])
  np.testing.assert_array_equal(more.test.index, data.test.index)
  other = load("stackexchange", data_dir=dump, partition_seed=1)
  assert users(other.pools[0]) != users(small)


def test_the_order_of_rows_means_nothing(dump, tmp_path):
  lines = (dump / "stackexchange/Posts.xml").read_text().splitlines()
  rows = [
    line.replace('Id="1"', f'Id="{n}"', 1) for n, line in enumerate(lines)
  ]
  texts = "\n".join(rows), "\n".join([*rows[:2], *rows[-2:1:-1], rows[-1]])
  made = []
  for name, content in zip(("a", "b"), texts):
    (tmp_path / name).mkdir()
    (tmp_path / name / "Posts.xml").write_text(content)
    made.append(load("stackexchange", data_dir=tmp_path / name))
  one, other = made
  assert one.vocabulary == other.vocabulary
  for part in ("distill", "heldout", "test"):
    np.testing.assert_array_equal(
      getattr(one, part).index, getattr(other, part).index
    )
  for mine, theirs in zip(one.pools, other.pools):
    assert mine.ids == theirs.ids
    for name in ("tokens", "domain"):
      np.testing.assert_array_equal(mine.bank[name], theirs.bank[name])
  # As they were when the file was taken as it is.
  in_order = load("stackexchange", data_dir=dump)
  assert in_order.pools[0].ids == one.pools[0].ids
  np.testing.assert_array_equal(
    in_order.pools[0].bank["tokens"], one.pools[0].bank["tokens"]
  )


def test_domain_pools_share_no_client(dump):
  data = load("stackexchange", data_dir=dump, pools="domain")
  answers, questions = data.pools
  assert not users(answers) & users(questions)
  assert len(answers) + len(questions) == 36
  for pool, domain in ((answers, 1), (questions, 0)):
    assert (pool.bank["domain"][pool.members] == domain).all()
  for k in users(answers) | users(questions):
    # Both kinds: the larger number, and questions if there are as many.
    both = k % 3 == 2
    assert (k in users(questions)) == (k % 3 == 0 or (both and k % 2 == 1)), k
  assert {len(answers.positions(k)) for k in range(len(answers))} == {3, 5}
  capped = load(
    "stackexchange", data_dir=dump, pools="domain", max_sentences_per_client=2
  )
  assert users(capped.pools[0]) == users(answers)
  assert max(capped.pools[0].sizes) == max(capped.pools[1].sizes) == 2
  # Test sentences of both domains, whoever trains on what.
  np.testing.assert_array_equal(
    data.test.index,
    load("stackexchange", data_dir=dump, high_capacity_clients=5).test.index,
  )


def test_distillation_data(dump, tmp_path):
  kwargs = dict(data_dir=dump, high_capacity_clients=5)
  few = load("stackexchange", **kwargs, distill_examples=4)
  more = load("stackexchange", **kwargs, distill_examples=9)
  assert set(few.distill.index) < set(more.distill.index)
  again = load("stackexchange", **kwargs, distill_examples=4, seed=1)
  assert set(again.distill.index) != set(few.distill.index)
  paragraphs = tmp_path / "c4.txt"
  paragraphs.write_text("The user asks. More.\nNo, the user says it\n")
  data = load("stackexchange", **kwargs, distill_data="c4", c4_path=paragraphs)
  v = data.vocabulary
  numbers = v.numbers
  assert data.distill.bank["tokens"][0, :6].tolist() == [
    1,
    numbers["the"],
    v.oov,
    numbers["asks"],
    numbers["."],
    2,
  ]
  assert len(data.distill.index) == 2


@pytest.mark.parametrize(
  "kwargs, message",
  [
    (dict(vocabulary="bytes"), "vocabulary=bytes"),
    (dict(vocabulary_size=0), "vocabulary_size=0"),
    (dict(pools="three"), "pools=three"),
    (dict(distill_data="cifar10"), "distill_data=cifar10.*in_domain, c4"),
    (dict(distill_data="c4"), "distill_data=c4: give c4_path=PATH"),
    (dict(high_capacity_clients=99), "high_capacity_clients=99.*at most 36"),
    (
      dict(high_capacity_clients=3, pools="domain"),
      "high_capacity_clients=3: pools by domain have none",
    ),
    (dict(distill_examples=10_000), "distill_examples=10000.*1 to"),
    (dict(data_dir=None), "data_dir=None: give the folder"),
  ],
)
def test_arguments_out_of_range(dump, kwargs, message):
  with pytest.raises(ValueError, match=message):
    load("stackexchange", **{"data_dir": dump, **kwargs})


def stackoverflow(folder, train, *, held_out=5, test=6, each=3):
  """FedJAX's three files; of `train` each user's domains are said."""
  parts = {"train": dict(enumerate(train))}
  both = ["question", *["answer"] * (each - 1)]
  parts["held_out"] = {k: both for k in range(held_out)}
  parts["test"] = {k: both for k in range(test)}
  for split, of in parts.items():
    files.write_sqlite(
      folder / f"stackoverflow_{split}.sqlite",
      [
        (
          f"{split}{k}".encode(),
          files.packed(kinds, [f"{split}{k} n{i}" for i in range(len(kinds))]),
        )
        for k, kinds in of.items()
      ],
    )
  return dict(dataset="stackoverflow", data_dir=folder, vocabulary_size=5000)


def test_stackoverflow_files(tmp_path, monkeypatch):
  """The official splits serve for what they are for."""
  files_there = stackoverflow(tmp_path, [["question", "answer", "answer"]] * 40)
  monkeypatch.setattr(codist_text, "_SO_POOL_CLIENTS", 30)
  data = load(**files_there, high_capacity_clients=7, distill_examples=20)
  assert [len(p) for p in data.pools] == [30, 7]
  assert len(data.distill.index) == 20
  assert len(data.heldout.index) == 15 and len(data.test.index) == 18
  assert data.vocabulary.size == 4 + 30 + 3  # Names, n0, n1, n2.
  assert not words(data, data.test) & {f"test{k}" for k in range(6)}
  # By default all there are, of ten users; a requested number must exist.
  assert len(load(**files_there).distill.index) == 30
  with pytest.raises(ValueError, match="distill_examples=31.*1 to 30"):
    load(**files_there, distill_examples=31)
  monkeypatch.setattr(codist_text, "SO_DISTILL_EXAMPLES", 12)
  assert len(load(**files_there).distill.index) == 12
  monkeypatch.setattr(codist_text, "_SO_POOL_CLIENTS", 40)
  with pytest.raises(DataError, match="besides the 40 of the pools"):
    load(**files_there)


def test_c4_needs_no_more_sentences_than_there_are(tmp_path, monkeypatch):
  files_there = stackoverflow(tmp_path, [["question", "answer"]] * 4)
  monkeypatch.setattr(codist_text, "_SO_POOL_CLIENTS", 4)
  (tmp_path / "c4.txt").write_text("One.\nTwo.\nThree.\n")
  c4 = dict(**files_there, distill_data="c4", c4_path=tmp_path / "c4.txt")
  # All users are in the pool: C4 takes none for the distillation.
  few = dict(c4, high_capacity_clients=2)
  assert len(load(**few).distill.index) == 3
  with pytest.raises(ValueError, match="distill_examples=4.*1 to 3"):
    load(**few, distill_examples=4)
  monkeypatch.setattr(codist_text, "_C4_SENTENCES", 2)
  assert len(load(**few).distill.index) == 2


def same(one, other):
  """Whether two federations of text are the same."""
  assert one.vocabulary == other.vocabulary and one.skipped == other.skipped
  sets = [
    [*data.pools, data.distill, data.heldout, data.test]
    for data in (one, other)
  ]
  for mine, theirs in zip(*sets):
    assert [*mine.bank] == [*theirs.bank]
    for name, array in mine.bank.items():
      np.testing.assert_array_equal(array, theirs.bank[name])
      assert array.dtype == theirs.bank[name].dtype
  for mine, theirs in zip(*(pools[:2] for pools in sets)):
    assert mine.ids == theirs.ids
    np.testing.assert_array_equal(mine.members, theirs.members)
    np.testing.assert_array_equal(mine.offsets, theirs.offsets)
  for mine, theirs in zip(*(rest[2:] for rest in sets)):
    np.testing.assert_array_equal(mine.index, theirs.index)


def test_banks_on_disk_are_those_in_memory(tmp_path, monkeypatch):
  """Written once, again if the source or a file has changed; never pickled."""
  kinds = [["question", *["answer"] * (k % 7)] for k in range(40)]
  options = dict(stackoverflow(tmp_path, kinds), high_capacity_clients=7)
  monkeypatch.setattr(codist_text, "_SO_POOL_CLIENTS", 30)
  monkeypatch.setattr(text, "_PART", 4)  # Sentences in memory at once.
  read, reader = [], codist_text.text_sources.stackoverflow
  monkeypatch.setattr(
    codist_text.text_sources,
    "stackoverflow",
    lambda path, **kwargs: read.append(path) or reader(path, **kwargs),
  )
  usual = load(**options)
  number = len(read)

  def stored(makes=False, **changes):
    read.clear()
    data = load(**{**options, **changes}, on_disk=True)
    assert len(read) == number * makes
    same(load(**{**options, **changes}), data)
    return data

  data = stored(makes=True)
  same(stored(seed=5), usual)
  assert data.distill.bank["tokens"].base is not None  # Mapped.
  assert not data.distill.bank["tokens"].flags.writeable
  (folder,) = (tmp_path / "hetfl_banks").iterdir()
  # Two rounds, bit for bit.
  for round in (1, 2):
    cut = []
    for of in (usual, data):
      sets = dict(a=of.pools[0], b=of.pools[1], distill=of.distill)
      few = dict(clients_per_round=3, batch_size=2, distill_batch_size=4)
      plan = plans.plan_round(
        {n: sets[n] for n in "ab"}, of.distill, seed=0, round=round, **few
      )
      cut.append(localize(plan, sets))
    chex.assert_trees_all_equal(*cut)
  # Cut, changed, without its end, or of another source.
  tokens, index = folder / "train.tokens.bin", folder / "index.json"
  content = tokens.read_bytes()
  for damaged in (content[:-1], b"", b"\xff" + content[1:]):
    tokens.write_bytes(damaged)
    stored(makes=True)
    stored()
  for damaged in (None, "", index.read_text()[:-9], "[1]"):
    index.unlink() if damaged is None else index.write_text(damaged)
    stored(makes=True)
  stackoverflow(tmp_path, kinds[::-1])
  stored(makes=True)
  assert [*(tmp_path / "hetfl_banks").iterdir()] == [folder]
  # Other settings, another folder.
  stored(makes=True, vocabulary="wordpiece", vocabulary_size=30)
  stored()
  folder.joinpath("distill.index.bin").unlink()
  stored(makes=True)
  monkeypatch.setattr(codist_text, "_SO_POOL_CLIENTS", 40)
  with pytest.raises(DataError, match="besides the 40 of the pools"):
    load(**options, max_sentences_per_client=2, on_disk=True)
  with pytest.raises(DataError, match="data_dir=None: give a folder for the"):
    load("pydoc", on_disk=True)


def test_other_text_may_be_on_disk(dump, tmp_path):
  (tmp_path / "c4.txt").write_text("One user.\nTwo users.\nThree users.\n")
  c4 = dict(distill_data="c4", c4_path=tmp_path / "c4.txt")
  for options in ({}, c4, dict(pools="domain"), dict(distill_examples=9)):
    options = dict(data_dir=dump, **options)
    for _ in range(2):
      data = load("stackexchange", **options, on_disk=True)
      same(load("stackexchange", **options), data)
      assert data.pools[0].bank is data.pools[1].bank is data.test.bank


def test_stackoverflow_sentences_are_of_many_users(tmp_path, monkeypatch):
  kinds = [["answer"] * 100] * 60
  files_there = stackoverflow(tmp_path, kinds, held_out=50, test=50, each=100)
  monkeypatch.setattr(codist_text, "_SO_POOL_CLIENTS", 10)
  monkeypatch.setattr(codist_text, "_SO_SENTENCES", 100)
  monkeypatch.setattr(codist_text, "_SO_LOOKED_AT", 4_000)
  few = dict(**files_there, high_capacity_clients=2)
  data = load(**few, distill_examples=200)
  assert [len(s.index) for s in (data.distill, data.heldout)] == [200, 100]
  read = codist_text._stackoverflow
  train, _, others = read(tmp_path, "capacity", None, 200, 0)
  for name, n in (("distill", 200), ("heldout", 100), ("test", 100)):
    most, read_it = others[name]
    corpus = read_it()
    chosen = np.arange(min(most, len(corpus.domains)))
    assert len(chosen) == len(np.unique(chosen)) == n
    used = sum(bool(np.isin(m, chosen).any()) for m in corpus.members)
    # Whole users would be two for 200 sentences and one for 100.
    assert used > 25, name
    if name == "distill":
      assert not {*train.ids} & {*corpus.ids}
  assert len(train.ids) == 10
  # More than a first draw gives: further sentences, none of them twice.
  _, _, others = read(tmp_path, "capacity", None, 4_900, 0)
  corpus = others["distill"][1]()
  sentences = np.split(corpus.words, corpus.offsets[1:-1])[:4_900]
  assert len({*map(tuple, sentences)}) == 4_900


def test_stackoverflow_by_domain(tmp_path, monkeypatch):
  """Users are read until both domains have their number, and no further."""
  # One of five asks.
  train = [
    ["question", "question", "answer"] if k % 5 == 0 else ["answer"] * 3
    for k in range(100)
  ]
  files_there = dict(stackoverflow(tmp_path, train), pools="domain")
  monkeypatch.setattr(codist_text, "_SO_DOMAIN_CLIENTS", 8)
  data = load(**files_there)
  answers, questions = data.pools
  assert len(answers) == len(questions) == 8
  assert set(answers.sizes) == {3} and set(questions.sizes) == {2}
  asks = lambda client: int(client.removeprefix("train")) % 5 == 0
  assert all(map(asks, questions.ids)) and not any(map(asks, answers.ids))
  train, _, parts = codist_text._stackoverflow(tmp_path, "domain", None, 999, 0)
  others = {*parts["distill"][1]().ids}
  used = {*answers.ids, *questions.ids}
  passed_over = train.skipped["clients of a domain that has enough"]
  assert data.skipped == train.skipped
  # Who was read serves for nothing else, and all others distil.
  assert not others & used and passed_over > 8
  assert len(others) == 100 - train.clients_read
  assert train.clients_read == len(used) + passed_over
  capped = load(**files_there, max_sentences_per_client=1)
  assert set(capped.pools[0].sizes) == set(capped.pools[1].sizes) == {1}
  # Too few who ask, and nobody left for distillation.
  monkeypatch.setattr(codist_text, "_SO_DOMAIN_CLIENTS", 30)
  (tmp_path / "c4.txt").write_text("One.\n")
  c4 = dict(distill_data="c4", c4_path=tmp_path / "c4.txt")
  assert [len(p) for p in load(**files_there, **c4).pools] == [30, 20]
  with pytest.raises(DataError, match="besides the 100 of the pools"):
    load(**files_there)
  stackoverflow(tmp_path, [["question", "answer", "answer"]] * 40)
  with pytest.raises(DataError, match="of 30 users none writes mostly questio"):
    load(**files_there, **c4)
