"""Sentences, vocabularies and the sources of text."""

from collections import Counter
import contextlib
import gzip
import json
import os
import random
import sqlite3
import sys
import time
import tracemalloc
from xml.sax import saxutils
import zlib

import numpy as np
import pytest

from hetfl.data import DataError, text, text_sources
from tests.runs import needs_real_data, REAL

APPENDIX_G = """aren ' t can ' t couldn ' t didn ' t doesn ' t don ' t hadn ' t
hasn ' t haven ' t he ' d he ' ll he ' s i ' d it ' s i ' ll i ' m i ' ve
isn ' t let ' s mightn ' t mustn ' t shan ' t she ' d she ' ll she ' s
shouldn ' t we ' d we ' re we ' ve weren ' t what ' ll what ' re what ' s
what ' ve where ' s who ' d who ' ll who ' re who ' s who ' ve won ' t
wouldn ' t you ' d you ' ll you ' re you ' ve"""


def sentences_of(corpus):
  """Each client's sentences as (domain, words)."""
  return {
    client: [
      (
        int(corpus.domains[n]),
        " ".join(
          corpus.lexicon[w]
          for w in corpus.words[corpus.offsets[n] : corpus.offsets[n + 1]]
        ),
      )
      for n in members
    ]
    for client, members in zip(corpus.ids, corpus.members)
  }


def test_every_contraction_of_appendix_g():
  apart = APPENDIX_G.split()
  forms = ["".join(apart[i : i + 3]) for i in range(0, len(apart), 3)]
  assert len(forms) == 46 == len(text.CONTRACTIONS)
  for form in forms:
    for written in (form, form.capitalize(), form.replace("'", "’")):
      assert text.words(f"So {written}.") == ["so", form, "."], written
    # As C4's tokenizer left it, in any text.
    left, right = form.split("'")
    assert text.words(f"{left} ' {right}") == [form]
  assert text.words("Ann's x's") == ["ann", "'s", "x", "'s"]
  # Others stay apart, as in the paper's list.
  assert text.words("they're 'quoted' rock'n'roll") == (
    "they ' re ' quoted ' rock ' n ' roll".split()
  )


def test_sentences():
  assert text.sentences("Is it? Yes! (It is.) Ok... fine") == (
    ["Is it?", "Yes!", "(It is.)", "Ok...", "fine"]
  )
  assert text.sentences(
    "See e.g. Fig. 3 vs. J. Doe. Version 1.2 runs.\nEnd"
  ) == (["See e.g. Fig. 3 vs. J. Doe.", "Version 1.2 runs.", "End"])
  assert text.sentences(" \n\n ") == []


def build(*sentences, max_words=20):
  """A corpus of one client's sentences."""
  of = [("a", 0, sentence.split()) for sentence in sentences]
  return text.collect(
    of, max_words=max_words, skipped=Counter(), source="a test"
  )


def test_encoding_is_fedjaxs():
  """BOS + words, words + EOS, OOV last, padded and cut."""
  corpus = build("a b c", "c d", "a " * 9, "a b c d")
  vocabulary = text.Vocabulary("word", ("a", "b", "c"))
  assert (vocabulary.size, vocabulary.oov) == (7, 6)
  tokens = vocabulary.encode(corpus, 4)
  assert tokens.tolist() == [
    [1, 3, 4, 5, 2],
    [1, 5, 6, 2, 0],
    [1, 3, 3, 3, 3],
    [1, 3, 4, 5, 6],
  ]
  # A word that cannot be cut into pieces is one OOV; cuts fall within words.
  pieces = text.Vocabulary("wordpiece", ("a", "b", "##a", "##ab"))
  corpus = build("abab a", "aaa xa b")
  assert pieces.encode(corpus, 6).tolist() == [
    [1, 7, 3, 2, 0, 0, 0],
    [1, 3, 5, 5, 7, 4, 2],
  ]
  corpus = build("aaab a")
  assert pieces.encode(corpus, 3).tolist() == [[1, 3, 5, 6]]
  assert corpus.counts(np.array([0])) == Counter(aaab=1, a=1)


def test_encoding_in_blocks():
  """More sentences than are encoded at once, of all lengths."""
  rng = random.Random(0)
  sentences, expected = [], []
  for _ in range((1 << 16) + 50):
    words = rng.choices("abc", k=rng.randint(1, 4))
    sentences.append(" ".join(words))
    row = [1, *("abc".index(w) + 3 for w in words[:3]), 2, 0, 0]
    expected.append(row[:5] if len(words) < 4 else row[:4] + [2])
  # Corpora cut at three words: what was longer looks like a whole sentence.
  corpus = build(*sentences, max_words=3)
  tokens = text.Vocabulary("word", ("a", "b", "c")).encode(corpus, 4)
  np.testing.assert_array_equal(tokens, expected)


def test_wordpiece_by_hand():
  # low x 5, lower x 2, newest x 6: es, est, (w est ...) as counted here:
  # (##e, ##s) and (##s, ##t) 6 each, and (##w, ##e): 2 + 6 = 8 comes first;
  # after it (##we, ##s) 6, (##we, ##r) 2, (l, ##o) and (##o, ##w): 7 and 5
  # (lower's ##w is taken), so (l, ##o) 7 is next, then ties of 6.
  counts = Counter(low=5, lower=2, newest=6)
  tokens = text.train_wordpiece(counts, 20).tokens
  alphabet = set(tokens[:8])
  assert alphabet == {"l", "n", *(f"##{c}" for c in "oweres"), "##t"}
  # Of pairs with 6 the first by alphabet: (##e, ##we).
  assert tokens[8:12] == ("##we", "lo", "##ewe", "##ewes")
  assert len(text.train_wordpiece(counts, 11).tokens) == 11


def test_wordpiece_is_hugging_faces_up_to_ties():
  tokenizers = pytest.importorskip("tokenizers")
  rng = random.Random(1)
  counts = Counter()
  for _ in range(400):  # Unequal counts, since tokenizers breaks ties randomly.
    counts["".join(rng.choices("abcde", k=rng.randint(1, 7)))] += 1
  counts = Counter({w: n * 1000 + i for i, (w, n) in enumerate(counts.items())})
  ours = text.train_wordpiece(counts, 60)
  model = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
  model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  trainer = tokenizers.trainers.WordPieceTrainer(
    vocab_size=61, special_tokens=["[UNK]"], show_progress=False
  )
  corpus = (" ".join([word] * n) for word, n in counts.items())
  model.train_from_iterator(corpus, trainer)
  theirs = set(model.get_vocab()) - {"[UNK]"}
  assert len(theirs & set(ours.tokens)) >= 57
  # Cutting words up: exactly theirs, with our vocabulary.
  vocabulary = {t: i for t, i in ours.numbers.items()} | {"[UNK]": ours.oov}
  encoder = tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]")
  for word in [*counts, "xyz", "abx"]:
    ids = [token.id for token in encoder.tokenize(word)]
    assert ours.pieces(word) == tuple(ids), word


def test_vocabularies_are_kept_and_told_apart():
  word = text.train_words(Counter(a=2, b=3, é=1), 10)
  assert json.loads(word.to_bytes())["tokens"] == ["b", "a", "é"]
  assert word.sha256 != text.Vocabulary("wordpiece", word.tokens).sha256


# --- Stack Exchange --------------------------------------------------------


def row(owner, body, kind=1, **more):
  """A row of Posts.xml."""
  attributes = {"Id": "1", "PostTypeId": str(kind), "OwnerUserId": str(owner)}
  attributes |= {"Body": body, **more}
  return (
    "  <row "
    + " ".join(
      f"{k}={saxutils.quoteattr(v)}" for k, v in attributes.items() if v
    )
    + " />\n"
  )


def posts(*rows):
  return (
    '<?xml version="1.0" encoding="utf-8"?>\n<posts>\n'
    + "".join(rows)
    + "</posts>\n"
  ).encode()


def read(path, content, **kwargs):
  path.write_bytes(content)
  return text_sources.stackexchange(path, max_words=20, **kwargs)


def test_a_dump_by_hand(tmp_path):
  body = (
    "<p>I don&rsquo;t see why\n<code>a &lt; b</code> fails. Any idea?</p>\n"
    "<pre><code>for (;;) { secret(); }</code></pre><ul><li>One</li><li>Two"
    "</li></ul>"
  )
  corpus = read(
    tmp_path / "Posts.xml",
    posts(
      row(7, body),
      row(8, "<p>Yes.</p>", 2),
      row(7, "Thanks", 2),
      row("", "no owner"),
      row(9, " "),
      row(9, "a wiki page", 4),
      row(9, "<pre>only code</pre>"),
    ),
  )
  assert sentences_of(corpus) == {
    "7": [
      (0, "i don't see why a < b fails ."),
      (0, "any idea ?"),
      (0, "one"),
      (0, "two"),
      (1, "thanks"),
    ],
    "8": [(1, "yes .")],
  }
  assert corpus.skipped == {
    "posts without an owner": 1,
    "rows that are neither question nor answer": 1,
  }
  short = text_sources.stackexchange(tmp_path, max_words=2)
  assert sentences_of(short)["7"][:2] == [(0, "i don't"), (0, "any idea")]


def test_characters_that_xml_cannot_have_are_left_out(tmp_path):
  """Real dumps refer to some, and expat ends at the first."""
  path = tmp_path / "Posts.xml"
  body = (
    "<p>One&#x0E; &#14;two&#x00E9;.&#xD83D;&#xFFFE;&#0; a&#x1F600;b&#9;c</p>"
  )
  forbidden = posts(row(1, body)).replace(b"&amp;#", b"&#")
  corpus = read(path, forbidden)
  assert sentences_of(corpus) == {"1": [(0, "one twoé ."), (0, "a 😀 b c")]}
  assert corpus.skipped == {"characters that XML cannot have": 5}
  # Most mean nothing in HTML either.
  body = body.replace("&#xD83D;", "").replace("&#0;", "")
  written = read(path, posts(row(1, body)))
  assert sentences_of(written) == sentences_of(corpus)
  # Wherever the file is cut into parts.
  start = forbidden.index(b"&#x0E;")
  for before in range((1 << 16) - 8, (1 << 16) + 3):
    comment = b"<!--" + b" " * (before - start - 7) + b"-->"
    content = forbidden.replace(b"<posts>", comment + b"<posts>")
    assert content.index(b"&#x0E;") == before
    assert sentences_of(read(path, content)) == sentences_of(corpus)
  for other in (b"&#x0E", b"&#x0G;", b"&#x;", b"&#99999999999;"):
    with pytest.raises(DataError, match="Posts.xml: cannot be read"):
      read(path, posts(row(1, "x")).replace(b'"x"', b'"' + other + b'"'))


def test_the_order_of_rows_means_nothing(tmp_path):
  rows = [
    row(k % 5, f"<p>Post {k} of {k % 5}. And more</p>", 1 + k % 2, Id=f"{k}")
    for k in range(8, 120)
  ]
  path = tmp_path / "Posts.xml"
  in_order = read(path, posts(*rows))
  assert list(in_order.ids) == ["3", "4", "0", "1", "2"]
  random.Random(0).shuffle(rows)
  shuffled = read(path, posts("<!-- Of 2025. -->", *rows))
  assert list(sentences_of(shuffled).items()) == list(
    sentences_of(in_order).items()
  )
  for one, other in zip(shuffled.members, in_order.members):
    np.testing.assert_array_equal(one, other)
  no_number = read(path, posts(row(1, "x", Id="1"), row(2, "y", Id="-")))
  assert no_number.skipped == {"posts without a number": 1}


@pytest.mark.parametrize(
  "content, message",
  [
    (b"", "cannot be read .no element"),
    (posts(row(1, "x"))[:-10], "cannot be read .no element"),
    (posts(row(1, "x")).replace(b"utf-8", b"utf-17"), "cannot be read"),
    (posts(row(1, "x")).replace(b">\n  <row", b">\xff<row"), "cannot be read"),
    (posts().replace(b"posts>", b"other>"), "holds no sentences"),
    (
      b'<!DOCTYPE posts [<!ENTITY a "aaaaaaaaaa">'
      + b"".join(
        b'<!ENTITY %c "&%c;&%c;&%c;">' % (98 + i, 97 + i, 97 + i, 97 + i)
        for i in range(20)
      )
      + b']><posts><row Body="&u;" /></posts>',
      "limit on input amplification",
    ),
  ],
  ids=["empty", "cut", "coding", "byte", "other", "bomb"],
)
def test_dumps_that_are_none(tmp_path, content, message):
  with pytest.raises(DataError, match=f"Posts.xml: .*{message}"):
    read(tmp_path / "Posts.xml", content)
  with pytest.raises(DataError, match="nowhere.*no such file: want Posts.xml"):
    text_sources.stackexchange(tmp_path / "nowhere", max_words=20)


def test_hostile_html_takes_no_time_and_no_memory():
  n = 99_999
  for hostile in (
    "<div>" * (n // 5),
    "<pre>" * (n // 5) + "x",
    "</pre>" * (n // 6) + "x",
    "<" * n,
    "<!--" * (n // 4),
    "<![CDATA[" * (n // 9),
    "<![foo" * (n // 6),
    "<a " * (n // 3),
    "<a b='" * (n // 6),
    "</" * (n // 2),
    "<?" * (n // 2),
    "&" * n,
    "&#x" * (n // 3),
    "&#99999999999;" * (n // 14),
    "&#" + "9" * n,
    "<script>" * (n // 8),
    "." * n,
    "'" * n,
    ".'" * (n // 2),
    "a. " * (n // 3),
  ):
    tracemalloc.start()
    begun = time.process_time()
    with contextlib.suppress(ValueError):
      text.sentences(text_sources.strip_html(hostile))
    seconds, peak = time.process_time() - begun, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 5 and peak[1] < 100 << 20, (hostile[:9], seconds, peak)


def test_one_user_with_a_million_words(tmp_path):
  body = "word " * 15_000
  rows = [row(1, body)] * 67 + [row(2, "<p>" + "x" * 200_000 + "</p>")]
  rows.append(row(3, "y" * 50_000))
  corpus = read(tmp_path / "Posts.xml", posts(*rows))
  assert [len(m) for m in corpus.members] == [67, 1]
  assert len(corpus.words) == 67 * 20 + 1
  assert corpus.lexicon == ("word", "y" * text.MAX_WORD)
  assert corpus.skipped == {"posts beyond 100000 characters": 1}


# --- Stack Overflow --------------------------------------------------------


def packed(kinds, sentences):
  """One client's data as FedJAX writes it."""
  import msgpack

  strings = lambda values: msgpack.ExtType(
    4,
    msgpack.packb(
      ([len(values)], [v.encode() for v in values]), use_bin_type=True
    ),
  )
  return zlib.compress(
    msgpack.packb({"tokens": strings(sentences), "type": strings(kinds)})
  )


def write_sqlite(path, clients):
  path.unlink(missing_ok=True)
  connection = sqlite3.connect(path)
  connection.execute(
    "CREATE TABLE federated_data (client_id BLOB NOT NULL PRIMARY KEY, data"
    " BLOB NOT NULL, num_examples INTEGER NOT NULL)"
  )
  connection.executemany("INSERT INTO federated_data VALUES (?, ?, 1)", clients)
  connection.commit()
  connection.close()


def test_what_fedjax_writes_is_read(tmp_path):
  fedjax = pytest.importorskip("fedjax")
  path = tmp_path / "stackoverflow_train.sqlite"
  with fedjax.SQLiteFederatedDataBuilder(str(path)) as builder:
    builder.add_many(
      (
        f"user{k}".encode(),
        {
          "tokens": np.array([f"hello w{k} !".encode(), b""], object),
          "type": np.array([b"question", b"answer"], object),
          "score": np.array([k, 2]),
        },
      )
      for k in range(6)
    )
  assert "tensorflow" not in sys.modules
  read = lambda **kwargs: sentences_of(
    text_sources.stackoverflow(path, seed=3, max_words=5, **kwargs)
  )
  everyone = read()
  assert everyone == {f"user{k}": [(0, f"hello w{k} !")] for k in range(6)}
  first, rest = read(max_clients=2), read(skip_clients=2)
  assert {**first, **rest} == everyone and len(first) == 2
  assert list(first) + list(rest) == list(everyone)
  assert len(read(max_sentences=3)) == 3
  with pytest.raises(
    DataError, match="users besides the 6 of the pools: holds"
  ):
    read(skip_clients=6)


def test_a_share_of_each_users_sentences(tmp_path):
  path = tmp_path / "a.sqlite"
  data = packed(["answer"] * 50, [f"n{i}" for i in range(50)])
  write_sqlite(path, [(b"%d" % k, data) for k in range(40)])
  read = lambda n, share, **kwargs: text_sources.stackoverflow(
    path, seed=0, max_words=5, max_sentences=n, share=share, **kwargs
  )
  few = sentences_of(read(100, 0.1))
  assert 15 < len(few) < 30  # Five of each, about.
  everything = sentences_of(read(None, 0.1))
  assert {len({*own}) for own in everything.values()} == {50}
  assert sentences_of(read(None, 1.0)).keys() == everything.keys()
  capped = sentences_of(read(None, 1.0, max_sentences_per_client=2))
  assert set(capped["7"]) == {(1, "n0"), (1, "n1")} and len(capped) == 40
  both = sentences_of(read(None, 0.5, max_sentences_per_client=2))
  assert {len(own) for own in both.values()} == {2}  # Not two in each pass.


def test_clients_that_are_damaged_are_counted(tmp_path):
  path = tmp_path / "a.sqlite"
  good = packed(["answer"], ["fine day"])
  write_sqlite(
    path,
    [
      (b"good", good),
      (b"cut", good[:-9]),
      (b"type", packed(["comment"], ["x"])),
      (b"text", "not bytes"),
      (b"uneven", packed(["answer"], ["x", "y"])),
    ],
  )
  corpus = text_sources.stackoverflow(path, seed=0, max_words=5)
  assert sentences_of(corpus) == {"good": [(1, "fine day")]}
  assert corpus.skipped == {"clients that cannot be read": 4}
  path.write_bytes(path.read_bytes()[:5000])
  with pytest.raises(DataError, match="a.sqlite: "):
    text_sources.stackoverflow(path, seed=0, max_words=5)
  with pytest.raises(DataError, match="no such file.*held_out"):
    text_sources.stackoverflow(tmp_path / "b", seed=0, max_words=5)


# --- C4 and pydoc ----------------------------------------------------------


def test_c4_mod(tmp_path):
  documents = [
    {"text": "It Isn't so. Second.\n\nNew paragraph!  More", "url": "u"},
    {"text": ""},
    {"no": "text"},
  ]
  shard = tmp_path / "c4-train.00000.json.gz"
  lines = "".join(json.dumps(d) + "\n" for d in documents) + "{broken\n"
  lines += "[" * 100_000 + "\n"
  shard.write_bytes(gzip.compress(lines.encode()))
  # A copy by way of another system leaves such beside it.
  (tmp_path / "._c4-train.00000.json.gz").write_bytes(b"no text")
  corpus = text_sources.c4_mod(tmp_path, max_words=20)
  assert [s for _, s in sentences_of(corpus)["c4"]] == [
    "it isn't so .",
    "new paragraph !",
  ]
  assert corpus.skipped == {"lines that are not C4 documents": 3}
  plain = tmp_path / "plain.txt"
  plain.write_text("One. Two.\nThree\n")
  corpus = text_sources.c4_mod(plain, max_words=20, max_sentences=1)
  assert sentences_of(corpus) == {"c4": [(1, "one .")]}
  with pytest.raises(DataError, match="missing: no such file: want a C4"):
    text_sources.c4_mod(tmp_path / "missing", max_words=20)
  plain.write_text(" \n")
  with pytest.raises(DataError, match="holds no sentences"):
    text_sources.c4_mod(plain, max_words=20)


def test_nltks_data_is_never_fetched(tmp_path, monkeypatch):
  nltk = pytest.importorskip("nltk")
  monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
  monkeypatch.setattr(nltk, "download", lambda *_: pytest.fail("a download"))
  file = tmp_path / "a.txt"
  file.write_text("One. Two.")
  with pytest.raises(
    DataError, match="tokenizer=nltk: cannot.*nltk.downloader"
  ):
    text_sources.c4_mod(file, max_words=9, tokenizer="nltk")
  monkeypatch.setattr(nltk, "sent_tokenize", lambda line: line.split(" | "))
  file.write_text("We don't. Do | x")
  corpus = text_sources.c4_mod(file, max_words=9, tokenizer="nltk")
  assert sentences_of(corpus)["c4"] == [(1, "we don't . do")]


def test_pydoc_is_the_standard_librarys_prose():
  corpus = text_sources.pydoc(max_words=20)
  found = sentences_of(corpus)
  assert len(found) > 200
  assert found["copy"][0] == (
    0,
    "generic ( shallow and deep ) copying operations .",
  )
  domains = {d for sentences in found.values() for d, _ in sentences}
  assert domains == {0, 1}


@needs_real_data
def test_a_real_dump():
  path = os.path.join(REAL, "stackexchange")
  if not os.path.exists(path):
    pytest.skip("no stackexchange/Posts.xml in HETFL_DATA_DIR")
  corpus = text_sources.stackexchange(path, max_words=20)
  assert len(corpus.ids) > 5000 and len(corpus.domains) > 70_000
  common = [w for w, _ in corpus.counts(np.arange(70_000)).most_common(20)]
  assert {"the", "to", "i", "."} <= set(common)
