"""Where text comes from: `pydoc`, Stack Exchange, Stack Overflow, C4.

A file that is damaged as a whole raises `DataError`; a damaged row is left out
and counted in `Corpus.skipped`. Files are read as streams.
"""

import array
import ast
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import gzip
import html
import itertools
import json
import math
import os
import pathlib
import random
import re
import sqlite3
import sys
import sysconfig
import tokenize
import types
from xml.etree import ElementTree

from hetfl import checks
from hetfl.data import fedjax_source, text
from hetfl.data.errors import reading

QUESTION, ANSWER = 0, 1
# A client's id, a domain and the words of a sentence.
_Sentences = Iterator[tuple[str, int, list[str]]]
_MAX_LINE = 1 << 24  # Characters, or bytes, of a document, at most.
_MAX_HTML = 100_000  # Characters; Stack Overflow's own limit is 30,000.
# Parts of the standard library that are data, demonstrations or programs.
_NOT_PROSE = {
  *("antigravity", "encodings", "idlelib", "lib2to3"),
  *("pydoc_data", "test", "this", "turtledemo"),
}


def pydoc(*, max_words: int) -> text.Corpus:
  """Docstrings and comments of Python's standard library; needs no download.

  A client is a module; docstrings are domain 0, comments (on lines of their
  own) domain 1. One version of Python always gives the same corpus. Doctests
  and underlines are left out.

  Args:
    max_words: see `text.collect`.

  Returns:
    The corpus.

  Raises:
    DataError: the standard library's sources are missing.
  """
  root = pathlib.Path(sysconfig.get_path("stdlib"))

  def sentences():
    for name in sorted(sys.stdlib_module_names - _NOT_PROSE):
      package = sorted((root / name).rglob("*.py"))
      for path in (root / f"{name}.py", *package):
        parts = path.relative_to(root).with_suffix("").parts
        if path.is_file() and not {"test", "tests", "__pycache__"} & {*parts}:
          yield from _python(".".join(parts), path)

  return text.collect(
    sentences(), max_words=max_words, skipped=Counter(), source=root
  )


def _python(client: str, path: pathlib.Path) -> _Sentences:
  """The docstrings and comments of a module."""
  with tokenize.open(path) as stream:
    source = stream.read()
  strings: set[int] = set()
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
      strings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    if isinstance(
      node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    ):
      docstring = ast.get_docstring(node) or ""
      yield from _prose(client, QUESTION, docstring.splitlines())
  comment = lambda at: at[1].lstrip().startswith("#") and at[0] not in strings
  numbered = enumerate(source.splitlines(), 1)
  for is_comment, lines in itertools.groupby(numbered, comment):
    if is_comment:
      block = [line.strip().lstrip("#!: ") for _, line in lines]
      yield from _prose(client, ANSWER, block)


def _prose(client: str, domain: int, lines: list[str]) -> _Sentences:
  """The sentences of paragraphs; their line breaks mean nothing."""
  for empty, group in itertools.groupby(lines, lambda line: not line.strip()):
    paragraph = [line.strip() for line in group]
    if empty or any(line.startswith((">>>", "...")) for line in paragraph):
      continue
    prose = " ".join(line for line in paragraph if line.strip("-=~*#+_ "))
    for sentence in text.sentences(prose):
      words = text.words(sentence)
      # Signatures and section marks are not sentences.
      if len(words) > 3:
        yield client, domain, words


def stackexchange(path: str | os.PathLike, *, max_words: int) -> text.Corpus:
  """A Stack Exchange dump's `Posts.xml`, read as a stream.

  A client is a post's owner; questions (`PostTypeId` 1) are domain 0, answers
  (2) domain 1. HTML and code blocks are removed. Titles are not read. Posts are
  taken in the order of their `Id`, since not all dumps are in order. Characters
  that XML cannot have, to which dumps refer nevertheless, are left out.

  Args:
    path: the file, or the folder that it is in.
    max_words: see `text.collect`.

  Returns:
    The corpus; clients are owners' numbers.

  Raises:
    DataError: the file is missing, or not well-formed XML.

  Reference: https://archive.org/details/stackexchange.
  """
  path = pathlib.Path(path).expanduser()
  if path.is_dir():
    path = path / "Posts.xml"
  skipped: Counter[str] = Counter()
  posts = array.array("q")  # The number of each sentence's post.

  def sentences():
    for attributes in _rows(path, skipped):
      kind, body = attributes.get("PostTypeId"), attributes.get("Body", "")
      number, owner = (attributes.get(n, "") for n in ("Id", "OwnerUserId"))
      if kind not in ("1", "2"):
        skipped["rows that are neither question nor answer"] += 1
      elif not _is_number(owner):
        skipped["posts without an owner"] += 1
      elif not _is_number(number):
        skipped["posts without a number"] += 1
      elif len(body) > _MAX_HTML:
        skipped[f"posts beyond {_MAX_HTML} characters"] += 1
      else:
        try:
          found = text.sentences(strip_html(body))
        except ValueError:
          skipped["posts whose HTML cannot be read"] += 1
          continue
        domain = QUESTION if kind == "1" else ANSWER
        for sentence in found:
          posts.append(int(number))
          yield owner, domain, text.words(sentence)  # One word or more.

  corpus = text.collect(
    sentences(), max_words=max_words, skipped=skipped, source=path
  )
  return corpus.ordered(posts)


def _is_number(value: str) -> bool:
  return value.isascii() and value.isdigit() and len(value) < 19  # 64 bits.


# Line ends, by far the most common references in a dump, are fine.
_REFERENCE = re.compile(rb"&#(?!x[AD];)(?:x([0-9a-fA-F]{1,8})|(\d{1,8}));")
_XML = (
  *((9, 10, 13), range(32, 0xD800)),
  *(range(0xE000, 0xFFFE), range(1 << 16, 17 << 16)),
)


def _rows(
  path: pathlib.Path, skipped: Counter[str]
) -> Iterator[dict[str, str]]:
  """Attributes of the `row` elements; none of them is kept."""

  def kept(found):
    number = int(found[1], 16) if found[1] else int(found[2])
    if any(number in allowed for allowed in _XML):
      return found[0]
    skipped["characters that XML cannot have"] += 1
    return b""

  rows: list[dict[str, str]] = []

  def start(tag, attributes):
    if tag == "row":
      rows.append(attributes)

  parser = ElementTree.XMLParser(target=types.SimpleNamespace(start=start))
  dumps = "https://archive.org/details/stackexchange"
  with (
    reading(path, f"want Posts.xml of a dump of {dumps}"),
    open(path, "rb") as stream,
  ):
    # In pieces, since a damaged file may be one endless line.
    for line in iter(functools.partial(stream.readline, _MAX_LINE), b""):
      parser.feed(_REFERENCE.sub(kept, line))
      yield from rows
      rows.clear()
    parser.close()


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
  return ANSWER if 2 * answers > len(domains) else QUESTION


_STACKOVERFLOW = (
  "want stackoverflow_{train,held_out,test}.sqlite as FedJAX publishes them"
  " (fedjax.datasets.stackoverflow.load_data() fetches them)"
)


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
  spill: Callable[[text.Corpus], None] | None = None,
) -> text.Corpus:
  """Some clients of a FedJAX Stack Overflow SQLite file.

  Clients are drawn at random, and only their rows are read. Needs no
  TensorFlow.

  Args:
    path: `stackoverflow_{train,held_out,test}.sqlite`.
    seed: draws the order of the clients, and their sentences for `share`.
    max_words: see `text.collect`.
    max_clients: clients to read; `None` for all.
    max_sentences: stop after the client that brings the total to this many.
    max_sentences_per_client: sentences to keep of a client; `None` for all.
    skip_clients: how many clients to skip at the start of the drawn order,
      because they are used elsewhere.
    clients_per_domain: read until each domain prevails in this many clients,
      and keep only a client's sentences of its prevailing domain; `None` for
      clients of any domain.
    share: the share of each client's sentences to read, roughly, in (0, 1], so
      that `max_sentences` come from many clients. If all clients together give
      too few, the others are read too.
    spill: see `text.collect`.

  Returns:
    The corpus; words are the file's own tokens. Damaged clients are counted
    in `skipped`.

  Raises:
    DataError: the file is missing, damaged as a whole or of another kind, or
      no client is left after `skip_clients`.
    ValueError: an argument is out of its range.

  Reference: `fedjax/datasets/stackoverflow.py`; type `question` is domain 0,
  `answer` 1.
  """
  checks.between(0, 1, share=share)
  checks.whole(0, math.inf, skip_clients=skip_clients)
  checks.counts(
    **checks.given(max_clients=max_clients, max_sentences=max_sentences),
    **checks.given(max_sentences_per_client=max_sentences_per_client),
  )
  skipped: Counter[str] = Counter()
  prevails: Counter[int] = Counter()
  kept: Counter[int] = Counter()
  clients_read = found = 0

  def enough():
    if clients_per_domain is not None:
      return all(prevails[d] >= clients_per_domain for d in (QUESTION, ANSWER))
    return max_sentences is not None and found >= max_sentences

  def sentences():
    nonlocal clients_read, found
    end = None if max_clients is None else skip_clients + max_clients
    parts = itertools.pairwise(sorted({0, share, 1}))
    with fedjax_source.open_sqlite(path, _STACKOVERFLOW) as data:
      clients = [*enumerate(data.client_ids(), 1)]
      random.Random(f"{seed}/clients").shuffle(clients)
      turns = enumerate(clients[skip_clients:end], 1)
      for (low, high), (i, (number, name)) in itertools.product(parts, turns):
        if enough():
          return
        clients_read = max(clients_read, i)
        try:
          kinds, texts = _typed(data.get_client(name).all_examples())
        except sqlite3.Error:
          raise
        except Exception:  # zlib, msgpack and FedJAX raise many kinds.
          skipped["clients that cannot be read"] += low == 0
          continue
        domain, wanted = prevailing(kinds), {QUESTION, ANSWER}
        if clients_per_domain is not None:
          if prevails[domain] >= clients_per_domain:
            skipped["clients of a domain that has enough"] += 1
            continue
          wanted = {domain}
        draw = random.Random(f"{seed}/{number}").random if share < 1 else None
        chosen = [
          (kind, sentence)
          for kind, sentence in zip(kinds, texts)
          if kind in wanted
          and (draw is None or low <= draw() < high)
          and sentence.strip()
        ]
        if max_sentences_per_client is not None:
          chosen = chosen[: max_sentences_per_client - kept[number]]
        prevails[domain] += bool(chosen) and not kept[number]
        kept[number] += len(chosen)
        found += len(chosen)
        for kind, sentence in chosen:
          words = sentence.decode("utf-8", "replace").split()
          words = [word[: text.MAX_WORD] for word in words]
          yield fedjax_source.decoded(name), kind, words

  where = str(path)
  if skip_clients:
    where += f", of users besides the {skip_clients} of the pools"
  corpus = text.collect(
    sentences(), max_words=max_words, skipped=skipped, source=where, spill=spill
  )
  return dataclasses.replace(corpus, clients_read=clients_read)


def _typed(examples) -> tuple[list[int], list[bytes]]:
  """The domains and sentences of a client; raises any error if damaged."""
  domain = {b"question": QUESTION, b"answer": ANSWER}
  kinds, sentences = examples["type"], [*examples["tokens"]]
  if len(kinds) != len(sentences) or {*map(type, sentences)} - {bytes}:
    raise ValueError("not a type and a string for each sentence")
  return [domain[kind] for kind in kinds], sentences


_C4_PATH = "want a C4 shard (*.json.gz), a text file or a folder of such"


def c4_mod(
  path: str | os.PathLike,
  *,
  max_words: int,
  max_sentences: int | None = None,
  tokenizer: str = "rules",
  spill: Callable[[text.Corpus], None] | None = None,
) -> text.Corpus:
  """C4-MOD, the out-of-domain distillation text, as one client.

  It holds the first sentence of each paragraph.

  Args:
    path: a C4 shard (`*.json.gz` or `*.json`: one JSON object with `text` per
      line), any other text file (one paragraph per line), or a folder of such.
    max_words: see `text.collect`.
    max_sentences: how many to read at most; 4,488,694 in the paper.
    tokenizer: see `text.first_sentences`.
    spill: see `text.collect`.

  Returns:
    The corpus.

  Raises:
    DataError: there is no file, it cannot be read, or NLTK's data is missing.

  Reference: Lichtarge et al. 2023, appendix C.2 and G.
  """
  path = pathlib.Path(path).expanduser()
  shards = [path]
  if path.is_dir():
    # Copying by way of another system leaves hidden files beside the shards.
    shards = [p for p in sorted(path.glob("[!.]*")) if p.is_file()]
  skipped: Counter[str] = Counter()

  def paragraphs():
    for shard in shards:
      opened = gzip.open if shard.suffix == ".gz" else open
      with (
        reading(shard, _C4_PATH),
        opened(shard, "rt", encoding="utf-8", errors="replace") as stream,
      ):
        # In pieces, since a damaged file may be one endless line.
        for line in iter(functools.partial(stream.readline, _MAX_LINE), ""):
          try:
            if ".json" in shard.name:
              line = json.loads(line)["text"].strip()
          except Exception:  # JSON's, or it is not a document.
            skipped["lines that are not C4 documents"] += 1
          else:
            yield from line.split("\n")

  found = text.first_sentences(paragraphs(), tokenizer)
  sentences = itertools.islice(found, max_sentences)
  return text.collect(
    (("c4", ANSWER, words) for words in sentences),
    max_words=max_words,
    skipped=skipped,
    source=path,
    spill=spill,
  )
