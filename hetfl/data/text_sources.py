"""Where text comes from: `pydoc`, Stack Exchange, Stack Overflow, C4.

A file that is damaged as a whole raises `DataError`; a damaged row is left out
and counted in `Corpus.skipped`. Files are read as streams.
"""

import ast
from collections import Counter
from collections.abc import Iterator, Sequence
import dataclasses
import gzip
import html
import itertools
import json
import os
import pathlib
import random
import re
import sqlite3
import sys
import sysconfig
import tokenize
from xml.etree import ElementTree

from hetfl import checks
from hetfl.data import files, text
from hetfl.data.errors import DataError, reading

QUESTION, ANSWER = 0, 1
_MAX_HTML = 100_000  # Characters; Stack Overflow's own limit is 30,000.
# Parts of the standard library that are data, demonstrations or programs.
_NOT_PROSE = (
  *("antigravity", "encodings", "idlelib", "pydoc_data", "test"),
  *("lib2to3", "turtledemo", "this"),
)


def pydoc(*, max_words: int) -> text.Corpus:
  """Docstrings and comments of Python's standard library; needs no download.

  A client is a module; docstrings are domain 0, comments (on lines of their
  own) domain 1. One version of Python always gives the same corpus. Doctests
  and underlines are left out.

  Args:
    max_words: see `text.CorpusBuilder`.

  Returns:
    The corpus.

  Raises:
    DataError: the standard library's sources are missing.
  """
  root = pathlib.Path(sysconfig.get_path("stdlib"))
  builder = text.CorpusBuilder(max_words=max_words)
  for name in sorted(sys.stdlib_module_names):
    if name in _NOT_PROSE or name.startswith("_sysconfigdata"):
      continue
    files = [root / f"{name}.py"]
    if (root / name).is_dir():
      files = sorted((root / name).rglob("*.py"))
    for path in files:
      parts = path.relative_to(root).with_suffix("").parts
      if path.is_file() and not {"test", "tests", "__pycache__"} & {*parts}:
        _python(builder, ".".join(parts), path)
  if not len(builder):
    raise DataError(
      f"pydoc: no Python sources in {root}; install Python with its"
      " standard library as .py files"
    )
  return builder.build()


def _python(builder: text.CorpusBuilder, client: str, path: pathlib.Path):
  """Adds the docstrings and comments of a module."""
  try:
    with tokenize.open(path) as stream:
      source = stream.read()
    tree = ast.parse(source)
  except (SyntaxError, UnicodeDecodeError, ValueError, OSError):
    builder.skipped["modules that are not valid Python"] += 1
    return
  strings: set[int] = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
      strings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    if isinstance(
      node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    ):
      docstring = ast.get_docstring(node)
      if docstring:
        _prose(builder, client, QUESTION, docstring.splitlines())
  block = []
  lines = [*enumerate(source.splitlines(), 1), (0, "")]
  for number, line in lines:
    line = line.strip()
    if line.startswith("#") and number not in strings:
      block.append(line.lstrip("#!: "))
    elif block:
      _prose(builder, client, ANSWER, block)
      block = []


def _prose(builder, client, domain, lines):
  """Adds the sentences of paragraphs; their line breaks mean nothing."""
  for empty, group in itertools.groupby(lines, lambda line: not line.strip()):
    group = [line.strip() for line in group]
    if empty or any(line.startswith((">>>", "...")) for line in group):
      continue
    paragraph = " ".join(line for line in group if line.strip("-=~*#+_ "))
    for sentence in text.sentences(paragraph):
      words = text.words(sentence)
      # Signatures and section marks are not sentences.
      if len(words) > 3:
        builder.add(client, domain, words)


def stackexchange(path: str | os.PathLike, *, max_words: int) -> text.Corpus:
  """A Stack Exchange dump's `Posts.xml`, read as a stream.

  A client is a post's owner; questions (`PostTypeId` 1) are domain 0, answers
  (2) domain 1. HTML and code blocks are removed. Titles are not read.

  Args:
    path: the file, or the folder that it is in.
    max_words: see `text.CorpusBuilder`.

  Returns:
    The corpus; clients are owners' numbers.

  Raises:
    DataError: the file is missing, or not well-formed XML.

  Reference: https://archive.org/details/stackexchange.
  """
  path = pathlib.Path(path).expanduser()
  if path.is_dir():
    path = path / "Posts.xml"
  builder = text.CorpusBuilder(max_words=max_words)
  for attributes in _rows(path):
    kind = attributes.get("PostTypeId")
    owner = attributes.get("OwnerUserId", "")
    body = attributes.get("Body", "")
    if kind not in ("1", "2"):
      builder.skipped["rows that are neither question nor answer"] += 1
    elif not (owner.isascii() and owner.isdigit() and len(owner) < 20):
      builder.skipped["posts without an owner"] += 1
    elif len(body) > _MAX_HTML:
      builder.skipped[f"posts beyond {_MAX_HTML} characters"] += 1
    elif not body.strip():
      builder.skipped["empty posts"] += 1
    else:
      try:
        found = text.sentences(strip_html(body))
      except ValueError:
        builder.skipped["posts whose HTML cannot be read"] += 1
        continue
      for sentence in found:
        domain = QUESTION if kind == "1" else ANSWER
        builder.add(owner, domain, text.words(sentence))
  if not len(builder):
    raise DataError(f"{path}: holds no posts with an owner and a body")
  return builder.build()


def _rows(path: pathlib.Path) -> Iterator[dict[str, str]]:
  """Attributes of the `row` elements; none of them is kept."""
  dumps = "https://archive.org/details/stackexchange"
  with reading(path, f"want Posts.xml of a dump of {dumps}"):
    events = ElementTree.iterparse(path, ("start", "end"))
    _, root = next(events)
    for event, element in events:
      if event == "end" and element.tag == "row":
        yield element.attrib
      if event == "end":
        root.clear()


# A tag ends at the next angle bracket, so that a scan is linear in any text
# (`html.parser` is quadratic in "<a <a <a ..."); no stack of tags is kept.
_TAG = re.compile(r"<(/?)([a-zA-Z][\w-]*+)[^<>]*+>|<[!?/][^<>]*+>")
# One that is not closed runs to the end of the body, as in browsers.
_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
_LINE_END = re.compile(r"[\r\n]+")
_DROPPED = frozenset(("pre", "script", "style"))
_INLINE = frozenset(
  "a abbr b big cite code del dfn em i ins kbd q s samp small span strike"
  " strong sub sup tt u var".split()
)


def strip_html(body: str) -> str:
  r"""The text of a post: one line per paragraph, without code blocks.

  Args:
    body: HTML, well-formed or not.

  Returns:
    The text.

  Raises:
    ValueError: it cannot be read as HTML.

  >>> strip_html('<p>Use <code>a&lt;b</code>:</p><pre>x = 1</pre><p>Done')
  '\nUse a<b:\n\n\n\nDone'
  """
  parts, dropped, at = [], 0, 0

  def keep(text):
    if not dropped:
      # Line breaks within a paragraph mean nothing.
      parts.append(_LINE_END.sub(" ", html.unescape(text)))

  body = _COMMENT.sub("", body)
  for tag in _TAG.finditer(body):
    keep(body[at : tag.start()])
    at, name = tag.end(), (tag[2] or "").lower()
    if name in _DROPPED:
      dropped = max(dropped + (-1 if tag[1] else 1), 0)
    if name not in _INLINE:
      parts.append("\n")
  keep(body[at:])
  return "".join(parts)


def prevailing(domains: Sequence[int]) -> int:
  """The domain of most sentences; questions on a tie.

  Args:
    domains: `int[n]`, each sentence's: `QUESTION` or `ANSWER`.

  Returns:
    `QUESTION` or `ANSWER`.

  >>> prevailing([QUESTION, ANSWER]), prevailing([ANSWER, QUESTION, ANSWER])
  (0, 1)
  """
  answers = list(domains).count(ANSWER)
  return ANSWER if answers > len(domains) - answers else QUESTION


def stackoverflow(
  path: str | os.PathLike,
  *,
  seed: int,
  max_words: int,
  max_clients: int | None = None,
  max_sentences: int | None = None,
  max_sentences_per_client: int | None = None,
  skip_clients: int = 0,
  clients_per_domain: int | None = None,
  share: float = 1.0,
) -> text.Corpus:
  """Some clients of a FedJAX Stack Overflow SQLite file.

  Clients are drawn at random, and only their rows are read. Needs no
  TensorFlow.

  Args:
    path: `stackoverflow_{train,held_out,test}.sqlite`.
    seed: draws the order of the clients, and their sentences for `share`.
    max_words: see `text.CorpusBuilder`.
    max_clients: clients to read; `None` for all.
    max_sentences: stop after the client that brings the total to this many.
    max_sentences_per_client: see `text.CorpusBuilder`.
    skip_clients: how many clients to skip at the start of the drawn order,
      because they are used elsewhere.
    clients_per_domain: read until each domain prevails in this many clients,
      and keep only a client's sentences of its prevailing domain; `None` for
      clients of any domain.
    share: the share of each client's sentences to read, roughly, in (0, 1], so
      that `max_sentences` come from many clients. If all clients together give
      too few, the share is doubled, and so on.

  Returns:
    The corpus; words are the file's own tokens. Damaged clients are counted
    in `skipped`.

  Raises:
    DataError: the file is missing, damaged as a whole or of another kind, or
      no client is left after `skip_clients`.
    ValueError: `share` is not positive.

  Reference: `fedjax/datasets/stackoverflow.py`; type `question` is domain 0,
  `answer` 1.
  """
  checks.positive(share=share)
  builder = text.CorpusBuilder(
    max_words=max_words, max_sentences_per_client=max_sentences_per_client
  )
  prevails: Counter[int] = Counter()
  clients_read = 0

  def enough():
    if clients_per_domain is not None:
      return all(prevails[d] >= clients_per_domain for d in (QUESTION, ANSWER))
    return max_sentences is not None and len(builder) >= max_sentences

  remedy = (
    "want stackoverflow_{train,held_out,test}.sqlite as FedJAX publishes them"
    " (fedjax.datasets.stackoverflow.load_data() fetches them)"
  )
  with files.open_sqlite(path, remedy) as connection:
    rows = connection.execute("SELECT rowid FROM federated_data ORDER BY rowid")
    numbers = [number for (number,) in rows]
    random.Random(f"{seed}/clients").shuffle(numbers)
    end = None if max_clients is None else skip_clients + max_clients
    for low, high in _parts(share):
      for i, number in enumerate(numbers[skip_clients:end]):
        if enough():
          break
        clients_read = max(clients_read, i + 1)
        try:
          client, kinds, sentences = _fedjax_client(connection, number)
        except (sqlite3.Error, ImportError):
          raise
        except Exception:  # zlib, msgpack and FedJAX raise many kinds.
          if low == 0:
            builder.skipped["clients that cannot be read"] += 1
          continue
        domain, wanted = prevailing(kinds), {QUESTION, ANSWER}
        if clients_per_domain is not None:
          if prevails[domain] >= clients_per_domain:
            builder.skipped["clients of a domain that has enough"] += 1
            continue
          wanted = {domain}
        before = len(builder)
        draw = random.Random(f"{seed}/{number}").random if share < 1 else None
        for kind, sentence in zip(kinds, sentences):
          if kind in wanted and (draw is None or low <= draw() < high):
            words = sentence.decode("utf-8", "replace").split()
            builder.add(client, kind, [w[: text.MAX_WORD] for w in words])
        prevails[domain] += len(builder) > before
  if not len(builder) and skip_clients:
    raise DataError(
      f"{path}: has no users besides the {skip_clients} of the pools, but"
      " in-domain distillation needs others; download the whole file, or use"
      " distill_data=c4"
    )
  if not len(builder):
    raise DataError(f"{path}: holds no sentences that can be read")
  return dataclasses.replace(builder.build(), clients_read=clients_read)


def _parts(share: float) -> Iterator[tuple[float, float]]:
  """[0, share), then as much again as there is so far, and so on up to 1.

  >>> list(_parts(0.3))
  [(0.0, 0.3), (0.3, 0.6), (0.6, 1.0)]
  """
  low, high = 0.0, min(share, 1.0)
  while low < 1:
    yield low, high
    low, high = high, min(2 * high, 1.0)


def _fedjax_client(
  connection: sqlite3.Connection, number: int
) -> tuple[str, list[int], list[bytes]]:
  """One client's id, domains and sentences; raises any error if damaged."""
  from fedjax.core import sqlite_federated_data

  client_id, data = connection.execute(
    "SELECT client_id, data FROM federated_data WHERE rowid = ?", (number,)
  ).fetchone()
  examples = sqlite_federated_data.decompress_and_deserialize(data)
  domain = {b"question": QUESTION, b"answer": ANSWER}
  kinds = [domain[kind] for kind in examples["type"]]
  sentences = list(examples["tokens"])
  types = set(map(type, sentences))
  if len(kinds) != len(sentences) or types - {bytes}:
    raise ValueError("not a type and a string for each sentence")
  if isinstance(client_id, bytes):
    client_id = client_id.decode("utf-8", "surrogateescape")
  return str(client_id), kinds, sentences


_C4_PATH = "want a C4 shard (*.json.gz), a text file or a folder of such"


def c4_mod(
  path: str | os.PathLike,
  *,
  max_words: int,
  max_sentences: int | None = None,
  tokenizer: str = "rules",
) -> text.Corpus:
  """C4-MOD, the out-of-domain distillation text, as one client.

  It holds the first sentence of each paragraph.

  Args:
    path: a C4 shard (`*.json.gz` or `*.json`: one JSON object with `text` per
      line), any other text file (one paragraph per line), or a folder of such.
    max_words: see `text.CorpusBuilder`.
    max_sentences: how many to read at most; 4,488,694 in the paper.
    tokenizer: see `text.first_sentences`.

  Returns:
    The corpus.

  Raises:
    DataError: there is no file, it cannot be read, or NLTK's data is missing.

  Reference: Lichtarge et al. 2023, appendix C.2 and G.
  """
  path = pathlib.Path(path).expanduser()
  shards = [path]
  if path.is_dir():
    # A copy by way of another system leaves hidden files beside the shards.
    shards = [p for p in sorted(path.glob("[!.]*")) if p.is_file()]
  builder = text.CorpusBuilder(max_words=max_words)

  def paragraphs():
    for shard in shards:
      opened = gzip.open if shard.suffix == ".gz" else open
      with (
        reading(shard, _C4_PATH),
        opened(shard, "rt", encoding="utf-8", errors="replace") as stream,
      ):
        for line in stream:
          try:
            if ".json" in shard.name:
              line = json.loads(line)["text"].strip()
          except (ValueError, LookupError, TypeError, AttributeError):
            builder.skipped["lines that are not C4 documents"] += 1
          else:
            yield from line.split("\n")

  for words in text.first_sentences(paragraphs(), tokenizer):
    if max_sentences is not None and len(builder) >= max_sentences:
      break
    builder.add("c4", ANSWER, words)
  if not len(builder):
    raise DataError(f"{path}: holds no text: {_C4_PATH}")
  return builder.build()
