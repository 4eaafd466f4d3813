"""The text federations for codistillation.

`partition_seed` assigns users to parts: the pools, the distillation data, the
held-out data and the test data have different users, except that Stack
Overflow's test users may also be in the training split, with what they wrote
before 2018. The vocabulary is trained on the users of the pools alone.
"""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import sys
from typing import Any

import numpy as np

from hetfl import checks
from hetfl.data import disk, files, partition, text, text_sources
from hetfl.data.errors import DataError
from hetfl.population import ClientPopulation, Subset
from hetfl.streams import generator, Stream

# A corpus, the numbers of the pools' users in it and, for `distill`, `heldout`
# and `test`, the numbers of the part's sentences in it; or, for sentences from
# elsewhere, how many to use and a function that reads them.
_Parts = tuple[text.Corpus, np.ndarray, dict[str, Any]]
_FORMAT = 1  # Of banks on disk; changes when what is read changes.
LENGTH = 20  # Positions of a sentence, as in FedJAX's task.


@dataclasses.dataclass(frozen=True)
class CodistText:
  """Two pools of clients and the server's data.

  Banks have `tokens` `uint16[N, T + 1]` (BOS, words, EOS, then PAD) and
  `domain` `int32[N]`, 0 for questions and 1 for answers.

  Attributes:
    vocabulary: the tokens.
    pools: the small model's clients and the large model's. By capacity: the
      whole pool, and its clients with high capacity. By domain: clients who
      mostly answer, and clients who mostly ask; no client is in both.
    distill: the server's sentences.
    heldout: sentences of the held-out users, to choose hyper-parameters.
    test: sentences of the test users.
    skipped: how much was left out while reading, by reason.
  """

  vocabulary: text.Vocabulary
  pools: tuple[ClientPopulation, ClientPopulation]
  distill: Subset
  heldout: Subset
  test: Subset
  skipped: dict[str, int]


# Clients of the pool with high capacity, as far as the pool has so many.
_HIGH_CAPACITY = {"pydoc": 40, "stackexchange": 600, "stackoverflow": 684}
DATASETS = tuple(_HIGH_CAPACITY)
# Shares of the users held out, for testing and for distillation. For Stack
# Overflow the pool has the paper's number of users, and held-out and test
# sentences come from the official splits.
_SHARES = {"pydoc": (0.05, 0.15, 0.25), "stackexchange": (0.05, 0.10, 0.25)}
_SO_POOL_CLIENTS = 34_248
_SO_DOMAIN_CLIENTS = 30_000  # of each domain
_SO_SENTENCES = 100_000  # of the held-out split, and of the test split
# Distillation sentences by default. The paper's 122,250,952 are too many for
# most memories; on disk they take 6 GB.
SO_DISTILL_EXAMPLES = 1_000_000
# Sentences are drawn from about this many, those of 23,000 users or more: to
# get 100,000, a hundredth of each user's. Reading one takes 2 microseconds.
_SO_LOOKED_AT = 10_000_000
_C4_SENTENCES = 4_488_694


def load_codist_text(
  dataset: str,
  *,
  vocabulary: str = "word",
  vocabulary_size: int = 10_000,
  pools: str = "capacity",
  data_dir: str | os.PathLike | None = None,
  high_capacity_clients: int | None = None,
  max_sentences_per_client: int | None = None,
  distill_data: str = "in_domain",
  distill_examples: int | None = None,
  c4_path: str | os.PathLike | None = None,
  c4_tokenizer: str = "rules",
  seed: int = 0,
  partition_seed: int = 0,
  on_disk: bool = False,
) -> CodistText:
  """Two pools of clients over one bank, and the server's data.

  - `pydoc`: docstrings and comments of the installed Python's standard
    library; a client is a module. 25 % of the modules are for distillation, 5 %
    held out, 15 % for testing. Not in the paper; for trying out,
    without a download.
  - `stackexchange`: users of a dump, `Posts.xml` in `data_dir` or in a folder
    of it; the shares are 25 %, 5 % and 10 %. Not in the paper.
  - `stackoverflow`: FedJAX's files. The pool is 34,248 users of the training
    split; by domain, users are drawn until each domain has 30,000. Distillation
    sentences come from users that were not drawn; held-out and test sentences,
    100,000 each, from the official splits. All of these are a share of each
    user's sentences, so that they come from thousands of users; the paper draws
    from all sentences.

  By capacity, the large model's clients are a sample of the pool; a smaller
  sample is nested in a larger one. By domain, a user belongs to the domain of
  most of their sentences (questions on a tie), and only those are kept.

  Args:
    dataset: 'pydoc', 'stackexchange' or 'stackoverflow'.
    vocabulary: 'word' or 'wordpiece'.
    vocabulary_size: words or pieces at most; V counts four more.
    pools: 'capacity' or 'domain'.
    data_dir: the folder of the files.
    high_capacity_clients: clients of the pool that train the large model too.
    max_sentences_per_client: how many sentences of a user to keep, at most (by
      domain, of the user's domain); by default all. For Stack Overflow of the
      pools' users only.
    distill_data: 'in_domain', sentences of the distillation users, or 'c4'.
    distill_examples: how many distillation sentences to keep. By default all,
      but at most 4,488,694 of C4, as in the paper, and at most 1,000,000 of
      Stack Overflow's own, of which the paper has 122,250,952.
    c4_path: for 'c4', see `text_sources.c4_mod`.
    c4_tokenizer: for 'c4', 'rules' or 'nltk'.
    seed: the run's seed; it only draws the sentences that `distill_examples`
      keeps of pydoc and Stack Exchange. Those of Stack Overflow are drawn by
      `partition_seed`; of C4 they are the first.
    partition_seed: assigns users to parts; for Stack Overflow it also draws the
      sentences of the distillation, held-out and test data.
    on_disk: whether the arrays stay on disk, where they are read as they are
      used: in a folder `hetfl_banks` of `data_dir`, written once for the same
      files and arguments.

  Returns:
    The pools and the server's data.

  Raises:
    DataError: the data is missing or damaged.
    ValueError: an argument is out of its range.

  Reference: Lichtarge et al. 2023, sections 3.1 to 3.3, appendix C.2, C.5 and
  Tables 3 to 5.
  """
  settings = locals().copy()  # All that the arrays depend on.
  for name in ("data_dir", "seed", "on_disk"):
    settings.pop(name)
  checks.one_of(DATASETS, dataset=dataset)
  checks.one_of(text.KINDS, vocabulary=vocabulary)
  checks.one_of(("capacity", "domain"), pools=pools)
  checks.one_of(("in_domain", "c4"), distill_data=distill_data)
  if distill_data == "c4" and c4_path is None:
    raise ValueError("distill_data=c4: give c4_path=PATH, where C4 is")
  if pools == "domain" and high_capacity_clients is not None:
    raise ValueError(
      f"high_capacity_clients={high_capacity_clients}: pools by domain have"
      " none"
    )
  optional = checks.given(
    max_sentences_per_client=max_sentences_per_client,
    distill_examples=distill_examples,
    high_capacity_clients=high_capacity_clients,
  )
  checks.counts(vocabulary_size=vocabulary_size, **optional)
  if (dataset != "pydoc" or on_disk) and data_dir is None:
    what = f"the folder of {dataset}'s files"
    if dataset == "pydoc":  # They are Python's own.
      what = "a folder for the bank"
    raise DataError(f"data_dir=None: give {what}")

  make = functools.partial(_make, data_dir=data_dir, **settings)
  if on_disk:
    key = json.dumps(settings, default=str)
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    folder = pathlib.Path(data_dir or "").expanduser() / "hetfl_banks"
    source = [_FORMAT, key, _stamps(dataset, data_dir, c4_path)]
    facts, arrays = disk.stored(folder / f"{dataset}-{name}", source, make)
  else:
    facts, arrays = disk.in_memory(make)

  def bank(name):
    return {n: arrays[f"{name}.{n}"] for n in ("tokens", "domain")}

  train, subsets = bank("train"), {}
  for name in ("distill", "heldout", "test"):
    own = bank(name) if f"{name}.tokens" in arrays else train
    subsets[name] = Subset(own, arrays[f"{name}.index"])
  if distill_examples is not None:
    subsets["distill"] = subsets["distill"].draw(
      distill_examples,
      seed=[Stream.DISTILL_SENTENCES, seed],
      name="distill_examples",
    )
  held = [
    ClientPopulation(
      train, arrays[f"{i}.members"], arrays[f"{i}.offsets"], tuple(ids)
    )
    for i, ids in enumerate(facts["ids"])
  ]
  return CodistText(
    text.Vocabulary(vocabulary, tuple(facts["tokens"])),
    (held[0], held[1]),
    **subsets,
    skipped=facts["skipped"],
  )


def _stamps(dataset, data_dir, c4_path) -> list[Any]:
  """What tells whether the sources have changed since."""
  names = ["Posts.xml"]
  if dataset == "stackoverflow":
    names = [f"{dataset}_{x}.sqlite" for x in ("train", "held_out", "test")]
  found = [files.find(data_dir, name) for name in names] + [c4_path]
  paths = [pathlib.Path(path).expanduser() for path in found if path]
  paths += [p for path in paths if path.is_dir() for p in path.iterdir()]
  stats = [(str(p), p.stat()) for p in sorted(paths) if p.is_file()]
  stamps = [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats]
  return [sys.version, *stamps] if dataset == "pydoc" else stamps


def _make(
  append: disk.Append,
  *,
  dataset,
  vocabulary,
  vocabulary_size,
  pools,
  data_dir,
  high_capacity_clients,
  max_sentences_per_client,
  distill_data,
  distill_examples,
  c4_path,
  c4_tokenizer,
  partition_seed,
) -> dict[str, Any]:
  """Reads all sentences and makes the arrays; see `disk.stored`."""
  cap = max_sentences_per_client
  if dataset == "stackoverflow":
    wanted = None
    if distill_data == "in_domain":
      wanted = distill_examples or SO_DISTILL_EXAMPLES
    train, users, others = _stackoverflow(
      data_dir, pools, cap, wanted, partition_seed
    )
  else:
    train, users, others = _shared_out(dataset, data_dir, cap, partition_seed)
  if distill_data == "c4":
    most = distill_examples or _C4_SENTENCES
    others["distill"] = (
      most,
      functools.partial(
        text_sources.c4_mod,
        c4_path,
        max_words=LENGTH,
        max_sentences=most,
        tokenizer=c4_tokenizer,
      ),
    )
  if pools == "domain":
    held = _by_domain(train, users, cap)
  else:
    everyone = _of_users(train, users, cap)
    most = min(_HIGH_CAPACITY[dataset], len(users))
    split = partition.codist_split(
      len(users),
      seed=partition_seed,
      high_capacity_clients=high_capacity_clients or most,
    )
    held = [everyone, everyone.take(split.high_capacity)]
  learnt = np.concatenate([pool.members for pool in held])
  tokens = text.KINDS[vocabulary](train.counts(learnt), vocabulary_size)

  def write(name, corpus):
    append(f"{name}.tokens", tokens.encode(corpus, LENGTH))
    append(f"{name}.domain", corpus.domains.astype(np.int32))
    return len(corpus.domains)

  write("train", train)
  for i, pool in enumerate(held):
    append(f"{i}.members", pool.members)
    append(f"{i}.offsets", pool.offsets)
  skipped = dict(train.skipped)
  del train  # Which may be most of the memory.
  for name, part in others.items():
    if isinstance(part, np.ndarray):
      append(f"{name}.index", part.astype(np.int32))
      continue
    # A corpus of its own, which may be larger than the memory.
    most, read = part
    counts: list[int] = []
    spill = lambda corpus, name=name, counts=counts: counts.append(
      write(name, corpus)
    )
    last = read(spill=spill)
    spill(last)
    append(f"{name}.index", np.arange(min(most, sum(counts)), dtype=np.int32))
    skipped |= {f"{name}: {why}": n for why, n in last.skipped.items()}
  return {
    "tokens": tokens.tokens,
    "ids": [pool.ids for pool in held],
    "skipped": skipped,
  }


def _shared_out(dataset, data_dir, cap, partition_seed) -> _Parts:
  """Divides the users of one corpus among the parts."""
  if dataset == "pydoc":
    corpus = text_sources.pydoc(max_words=LENGTH)
  else:
    path = files.find(data_dir, "Posts.xml") or data_dir
    corpus = text_sources.stackexchange(path, max_words=LENGTH)
  n = len(corpus.ids)
  sizes = [max(int(share * n), 1) for share in _SHARES[dataset]]
  if sum(sizes) >= n:
    raise DataError(f"{dataset}: {n} users are too few for all parts")
  order = generator(Stream.TEXT_USERS, partition_seed).permutation(n)
  *others, pool = np.split(order, np.cumsum(sizes))
  parts = {}
  for name, users in zip(("heldout", "test", "distill"), others):
    parts[name] = np.sort(_of_users(corpus, users, cap).members)
  return corpus, np.sort(pool), parts


def _stackoverflow(
  data_dir, pools, cap, distill_examples, partition_seed
) -> _Parts:
  """Reads only what is needed of each of FedJAX's three files."""

  def read(split, **kwargs):
    name = f"stackoverflow_{split}.sqlite"
    path = files.find(data_dir, name) or os.path.join(data_dir, name)
    return text_sources.stackoverflow(
      path, seed=partition_seed, max_words=LENGTH, **kwargs
    )

  def sample(split, n, **kwargs):
    share = min(n / _SO_LOOKED_AT, 1.0)
    options = dict(max_sentences=n, share=share, **kwargs)
    return n, functools.partial(read, split, **options)

  users = {"max_clients": _SO_POOL_CLIENTS}
  if pools == "domain":
    users = {"clients_per_domain": _SO_DOMAIN_CLIENTS}
  train = read("train", max_sentences_per_client=cap, **users)
  others = {
    "heldout": sample("held_out", _SO_SENTENCES),
    "test": sample("test", _SO_SENTENCES),
  }
  if distill_examples is not None:
    others["distill"] = sample(
      "train", distill_examples, skip_clients=train.clients_read
    )
  return train, np.arange(len(train.ids)), others


def _of_users(
  corpus: text.Corpus, users: np.ndarray, cap: int | None, *domain: int
) -> ClientPopulation:
  """Some users' sentences, all or of a domain, before these are tokens."""
  held = [corpus.members[k] for k in users]
  if domain:
    held = [own[np.isin(corpus.domains[own], domain)] for own in held]
  return ClientPopulation.from_lists(
    {"domain": corpus.domains},
    [own[:cap] for own in held],
    [corpus.ids[k] for k in users],
  )


def _by_domain(
  corpus: text.Corpus, users: np.ndarray, cap: int | None
) -> list[ClientPopulation]:
  """Users by the domain of most of their sentences, with only those."""
  prevails = np.array(
    [text_sources.prevailing(corpus.domains[corpus.members[k]]) for k in users]
  )
  pools = []
  for domain in (text_sources.ANSWER, text_sources.QUESTION):
    own = users[prevails == domain]
    if not len(own):
      name = "answers" if domain == text_sources.ANSWER else "questions"
      raise DataError(
        f"pools=domain: of {len(users)} users none writes mostly {name}; use"
        " pools=capacity, or the whole file"
      )
    pools.append(_of_users(corpus, own, cap, domain))
  return pools
