"""Damaged, spliced and hostile data files: an error in one line, or a load.

  python -m tests.faults.data_files --files=1000 --seed=1

Each loader reads files of its format that were changed at random, before or
after they were packed, and files that are made to do harm: pickles, bombs and
sizes that lie. Nothing may be unpickled, and neither time nor memory run out.
The files at fault stay in --folder.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Mapping
import contextlib
import functools
import gzip
import io
import json
import os
import pathlib
import pickle
import random
import resource
import struct
import tarfile
import tempfile
import time
from typing import Any, NamedTuple
from unittest import mock
import warnings
import zipfile
import zlib

import numpy as np

from hetfl.data import (
  DataError,
  fedjax_source,
  files,
  letters,
  npz,
  text_sources,
  vision,
)
from tests import data_letters_test as emnist
from tests import data_text_test as texts
from tests import data_vision_test as images
from tests.faults import finish

SECONDS, MEGABYTES = 5, 48  # A file may take no more.
LIMIT = 1 << 22  # Bytes that a packed file, or a line, may have here.
BOMB = 1 << 26  # Bytes that a small file unpacks to.
INFO = "emnist/letters/3.1.0/dataset_info.json"
FINE = ("loaded", "loaded in part", "refused")
TOKENS = b'< & " \0 \xff <!-- ]]> <row &x; &#x0E; [ { } ] null -1 1e999 \\ud800'
Pack = Callable[[bytes], bytes]


class Format(NamedTuple):
  """A format of files.

  Attributes:
    name: of the file.
    good: its content, before it is packed.
    load: reads the folder; returns whether anything was left out.
    packs: what makes the file of the content, in turn.
    beside: other files of the folder.
  """

  name: str
  good: bytes
  load: Callable[[pathlib.Path], Any]
  packs: tuple[Pack, ...] = ()
  beside: Mapping[str, bytes] = {}

  def packed(self, content: bytes, first: int = 0) -> bytes:
    """The file of a content that the first packs have packed."""
    return functools.reduce(
      lambda c, pack: pack(c), self.packs[first:], content
    )


def saved(array: np.ndarray) -> bytes:
  """A `.npy` file; objects are pickled."""
  stream = io.BytesIO()
  np.save(stream, array)
  return stream.getvalue()


def zipped(first: str, method: int, **arrays: np.ndarray) -> Pack:
  """Puts the `.npy` file `first` into an `.npz` file with other arrays."""

  def pack(content):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
      archive.writestr(f"{first}.npy", content)
      for name, array in arrays.items():
        archive.writestr(f"{name}.npy", saved(array))
    return stream.getvalue()

  return pack


def tarred(content: bytes, **others: bytes) -> bytes:
  """A tar archive of `a.bin`, and of others."""
  stream = io.BytesIO()
  with tarfile.open(fileobj=stream, mode="w") as archive:
    for name, held in {"a": content, **others}.items():
      member = tarfile.TarInfo(f"small-bin/{name}.bin")
      member.size = len(held)
      archive.addfile(member, io.BytesIO(held))
  return stream.getvalue()


def in_sqlite(content: Any, second: Any = None) -> bytes:
  """FedJAX's file of one client or two."""
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, "a.sqlite")
    clients = [(b"a", content), (b"b", second)]
    texts.write_sqlite(path, clients[: 1 + bool(second)])
    return path.read_bytes()


def in_part(corpus) -> bool:
  """Whether some of a text was left out; checks the corpus."""
  assert len(corpus.offsets) - 1 == sum(map(len, corpus.members)) > 0
  assert corpus.words.max() < len(corpus.lexicon)
  return bool(corpus.skipped)


def formats(folder: pathlib.Path) -> dict[str, Format]:
  """The formats; any hash of a file is right."""
  from fedjax.core import serialization

  rng = np.random.default_rng(0)
  draw = functools.partial(rng.integers, 0, 10, dtype=np.uint8)
  x, y = draw((12, 8, 8)), np.arange(12) % 3
  own = dict(y_train=y, x_test=x, y_test=y, clients_train=y)
  mnist = vision._MNIST._replace(
    train=dict.fromkeys(vision._MNIST.train, mock.ANY),
    test=dict.fromkeys(vision._MNIST.test, mock.ANY),
  )
  idx = {
    name: images._idx(draw((6, 28, 28)[: 3 if "images" in name else 1]))
    for name in mnist.train | mnist.test
  }
  cifar = vision._CIFAR100._replace(
    archive="small.tar.gz",
    folders=("small-bin",),
    train={"a.bin": mock.ANY},
    test={"test.bin": mock.ANY},
    parse=functools.partial(vision._parse_cifar, {"coarse": 2, "y": 4}),
  )
  rows, test = (images._rows(n, n).tobytes() for n in (4, 8))
  loaded = lambda official, folder: vision._load(official, folder, False) and 0
  letter = lambda folder: letters.load_letters(folder) and 0
  emnist_idx = {
    f"emnist-letters-{split}-{what}-ubyte": images._idx(array.astype(np.uint8))
    for split, (drawn, label, _) in emnist._expected().items()
    for what, array in (("images-idx3", drawn), ("labels-idx1", label + 1))
  }
  emnist._write_mat(folder / "mat")
  client = serialization.msgpack_serialize({"x": x, "y": y.astype(np.int32)})
  writer = texts.packed(["question", "answer"] * 2, ["a b", "c", "d", "e f"])
  posts = [
    texts.row(k % 4, f"<p>Post {k}: <b>is</b> it?</p>", 1 + k % 2, Id=str(k))
    for k in range(9)
  ]
  documents = [{"text": f"One {k}. Two.\nThree"} for k in range(9)]
  shard = "".join(json.dumps(d) + "\n" for d in documents).encode()
  c4 = lambda name: (
    lambda folder: in_part(text_sources.c4_mod(folder / name, max_words=5))
  )
  all_of = [
    Format(
      name,
      saved(x),
      lambda folder, name=name: npz.load_npz(folder / name) and 0,
      (zipped("x_train", method, **own),),
    )
    for name, method in (
      ("own.npz", zipfile.ZIP_STORED),
      ("packed.npz", zipfile.ZIP_DEFLATED),
    )
  ]
  all_of += [
    Format(
      "letters.npz",
      saved(x),
      letter,
      (zipped("images", zipfile.ZIP_STORED, labels=y, writers=y),),
    ),
    Format(
      "train-images-idx3-ubyte",
      idx["train-images-idx3-ubyte"],
      functools.partial(loaded, mnist),
      beside=idx,
    ),
    Format(
      "t10k-labels-idx1-ubyte.gz",
      idx["t10k-labels-idx1-ubyte"],
      functools.partial(loaded, mnist),
      (gzip.compress,),
      beside=idx,
    ),
    Format(
      "emnist-letters-train-images-idx3-ubyte",
      emnist_idx["emnist-letters-train-images-idx3-ubyte"],
      letter,
      beside=emnist_idx,
    ),
    Format("emnist-letters.mat", (folder / "mat").read_bytes(), letter),
    Format(
      "small-bin/a.bin",
      rows,
      functools.partial(loaded, cifar),
      beside={"small-bin/test.bin": test},
    ),
    Format(
      "small.tar.gz",
      rows,
      functools.partial(loaded, cifar),
      (functools.partial(tarred, test=test), gzip.compress),
    ),
    Format(
      "clients.sqlite",
      client,
      lambda folder: fedjax_source.read_sqlite(folder / "clients.sqlite") and 0,
      (zlib.compress, in_sqlite),
    ),
    Format(
      "words.sqlite",
      zlib.decompress(writer),
      lambda folder: in_part(
        text_sources.stackoverflow(folder / "words.sqlite", seed=0, max_words=5)
      ),
      (zlib.compress, functools.partial(in_sqlite, second=writer)),
    ),
    Format(
      "Posts.xml",
      texts.posts(*posts),
      lambda folder: in_part(text_sources.stackexchange(folder, max_words=5)),
    ),
    Format("c4.json", shard, c4("c4.json")),
    Format("c4.json.gz", shard, c4("c4.json.gz"), (gzip.compress,)),
    Format(
      INFO,
      json.dumps({"fileFormat": "array_record"}).encode(),
      lambda folder: files.find_tfds("emnist/letters", folder) and 0,
    ),
  ]
  return {one.name: one for one in all_of}


class _Mark:
  """Makes a folder when it is unpickled."""

  def __init__(self, path):
    self._path = path

  def __reduce__(self):
    return os.mkdir, (str(self._path),)


def bomb(pack: Callable[[bytes], bytes], flush: Callable[[], bytes]) -> bytes:
  """Very many zeros, packed piece by piece."""
  pieces = [pack(bytes(LIMIT)) for _ in range(BOMB // LIMIT)]
  return b"".join([*pieces, flush()])


def tar_bomb() -> bytes:
  """A `.tar.gz` whose `a.bin` is a bomb."""
  stream = zlib.compressobj(wbits=31)
  member = tarfile.TarInfo("small-bin/a.bin")
  member.size = BOMB
  return stream.compress(member.tobuf()) + bomb(stream.compress, stream.flush)


def hostile(known: Mapping[str, Format], mark: pathlib.Path):
  """Yields files that are made to do harm, as their format and content."""
  gzipped, zlibbed = (zlib.compressobj(wbits=wbits) for wbits in (31, 15))
  packed = bomb(gzipped.compress, gzipped.flush)
  deep, pickled = b"[" * 100_000, pickle.dumps(_Mark(mark))
  for name in known:
    yield name, b""
    yield name, pickled
    yield name, packed
    yield name, gzip.compress(pickled)
  yield "small.tar.gz", tar_bomb()
  yield "clients.sqlite", in_sqlite(bomb(zlibbed.compress, zlibbed.flush))
  objects = saved(np.full(12, _Mark(mark), object))
  twelve, lie = b"(12,), }" + b" " * 12, b"(999999999999,), }  "
  huge = saved(np.zeros(12, np.uint8)).replace(twelve, lie)
  assert lie in huge
  for name in ("own.npz", "packed.npz", "letters.npz"):
    for content in (objects, huge, pickled):
      yield name, known[name].packed(content)
  for sizes in ((2**32 - 1,) * 3, (0, 28, 28), (1,) * 255, ()):
    head = bytes([0, 0, 8, len(sizes)]) + struct.pack(f">{len(sizes)}I", *sizes)
    yield "train-images-idx3-ubyte", head
    yield "emnist-letters-train-images-idx3-ubyte", head
  for kind in (tarfile.SYMTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
      member = tarfile.TarInfo("small-bin/a.bin")
      member.type, member.linkname = kind, "a.bin"
      archive.addfile(member)
    yield "small.tar.gz", stream.getvalue()
  for name in ("clients.sqlite", "words.sqlite"):
    for content in (b"\x91" * 100_000, pickled):
      yield name, known[name].packed(content)
    for value in ("text", 7, b""):
      yield name, in_sqlite(value)
  for content in (
    b"<a>" * 100_000,
    b"<posts>" + b"<!--" * 100_000,
    b'<posts><row Body="' + b"&lt;" * 1_000_000 + b'"/></posts>',
    b"<posts>" + b"&#x0E;" * 100_000 + b"</posts>",
    b"<posts>&#99999999999999999999;</posts>",
    known["Posts.xml"].good.decode().encode("utf-16"),
  ):
    yield "Posts.xml", content
  for content in (deep, b'{"text": ' * 50_000, b"9" * 100_000, b"[]"):
    for name in ("c4.json", "c4.json.gz", INFO):
      yield name, known[name].packed(content)
  for other in known.values():
    for name in known:
      yield name, other.packed(other.good)


def changed(rng: random.Random, content: bytes, other: bytes) -> bytes:
  """The content with some bytes changed, lost, doubled, or another file's."""
  found = bytearray(content)
  for _ in range(rng.randint(1, 3)):
    at = rng.randrange(min(len(found), rng.choice((32, 1 << 30))) + 1)
    end = at + rng.randint(1, 40)
    sizes = (0, 1, 1 << 16, (1 << 31) - 1, (1 << 32) - 1)
    size = struct.pack(rng.choice("<>") + "I", rng.choice(sizes))
    stop, new = rng.choice(
      (
        (at + 1, rng.randbytes(1)),
        (len(found), b""),
        (end, b""),
        (at, found[at:end]),
        (at, rng.choice(TOKENS.split())),
        (at + 4, size),
        (end, bytes(end - at)),
        (len(found), other[at:]),
      )
    )
    found[at:stop] = new
  return bytes(found)


def drawn(known: Mapping[str, Format], rng: random.Random):
  """Yields changed files, as their format and content; has no end."""
  while True:
    one, other = (rng.choice([*known.values()]) for _ in range(2))
    packs = rng.randint(0, len(one.packs))
    content = one.good
    for pack in one.packs[:packs]:
      content = pack(content)
    content = changed(rng, content, other.packed(other.good))
    yield one.name, one.packed(content, packs)


def outcome(load: Callable[[pathlib.Path], Any], folder: pathlib.Path) -> str:
  """One of `FINE`, or what was not."""
  held = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
  begun, before = time.process_time(), held()
  try:
    found = FINE[bool(load(folder))]
  except DataError as error:
    found = FINE[-1]
    if str(folder) not in str(error) or "\n" in str(error):
      found = f"was refused as {error!r}"
  except Exception as error:
    found = f"raised {error!r}"
  seconds, more = time.process_time() - begun, held() - before
  if seconds > SECONDS or more > MEGABYTES:
    found = f"took {seconds:.1f} s and {more} MB"
  return found


def run(
  folder: pathlib.Path, number: int, seed: int
) -> tuple[Counter[tuple[str, str]], list[str]]:
  """Has files read.

  Args:
    folder: for the files; those at fault stay there.
    number: how many changed ones, besides those that are good or made to do
      harm.
    seed: draws the changes.

  Returns:
    How many of a format had which outcome, and what was at fault.
  """
  known, mark = formats(folder), folder / "mark"
  cases = [(one.name, one.packed(one.good)) for one in known.values()]
  cases += hostile(known, mark)
  changes = drawn(known, random.Random(seed))
  counts: Counter[tuple[str, str]] = Counter()
  faults = []
  with contextlib.ExitStack() as patched:
    for module, name in (
      (files, "_MAX_BYTES"),
      (fedjax_source, "_MAX_BYTES"),
      (text_sources, "_MAX_LINE"),
    ):
      patched.enter_context(mock.patch.object(module, name, LIMIT))
    patched.enter_context(mock.patch.object(letters, "SIZES", emnist.SIZES))
    nowhere = {"TFDS_DATA_DIR": str(folder / "nowhere")}
    patched.enter_context(mock.patch.dict(os.environ, nowhere))
    patched.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")  # Of SciPy and NumPy.
    for i in range(len(cases) + number):
      name, content = cases[i] if i < len(cases) else next(changes)
      one = known[name]
      place = folder / name.replace("/", "-")
      for path, held in {**one.beside, name: content}.items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_bytes(held)
      found = outcome(one.load, place)
      if mark.exists():
        found = "was unpickled"
        mark.rmdir()
      if found not in FINE:
        (folder / f"fault{i}").write_bytes(content)
        faults.append(f"fault{i}, as {name}: {found}")
        found = "at fault"
      counts[name, found] += 1
  return counts, faults


def main() -> None:
  """Reads many files, and says how that went."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--files", type=int, default=1000)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--folder", type=pathlib.Path)
  flags = parser.parse_args()
  folder = flags.folder or pathlib.Path(tempfile.mkdtemp())
  folder.mkdir(exist_ok=True, parents=True)
  counts, faults = run(folder, flags.files, flags.seed)
  finish(f"files in {folder}", counts, faults)


if __name__ == "__main__":
  main()
