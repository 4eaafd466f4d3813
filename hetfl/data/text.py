"""Text as data: sentences, words, corpora and vocabularies.

All sources (`hetfl.data.text_sources`) give a `Corpus` of sentences and words.
By default the rules here split text that is not tokenized already; they need no
trained models. Words are lower-case runs of letters, digits and underscores,
every other character is a word of its own, and the contractions listed in the
paper's appendix G are rejoined.
"""

import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
import dataclasses
import functools
import hashlib
import heapq
import json
import os
import re

import numpy as np

from hetfl import checks
from hetfl.data.errors import DataError, reading
from hetfl.models.next_word import BOS, EOS, PAD

MAX_WORD = 64  # Characters; longer ones are cut.
_PART = 1 << 18  # Sentences of a part of a corpus.
_LEARNT = 50_000  # The commonest words, from which pieces are made.
# Lichtarge et al. 2023, appendix G, which has spaces around the apostrophe.
CONTRACTIONS = tuple(
  """aren't can't couldn't didn't doesn't don't hadn't hasn't haven't he'd he'll
  he's i'd it's i'll i'm i've isn't let's mightn't mustn't shan't she'd she'll
  she's shouldn't we'd we're we've weren't what'll what're what's what've
  where's who'd who'll who're who's who've won't wouldn't you'd you'll you're
  you've""".split()
)
_APART = [*(word.replace("'", " ' ") for word in CONTRACTIONS), "' s"]
_CONTRACTION = re.compile(rf"(?<!\S)(?:{'|'.join(_APART)})(?!\S)")
_WORD = re.compile(r"\w+|[^\w\s]")
# Starts at the first stop of a run and never backtracks: linear in any text.
_STOP = re.compile(r"(?<![.!?])[.!?]++[\"')\]]*+\s+")
_LAST_WORD = re.compile(r"[^\s(]*$")
_ABBREVIATIONS = frozenset("e.g i.e etc vs cf mr mrs dr no fig approx".split())


def sentences(text: str) -> list[str]:
  r"""Splits text at line ends, and at `.`, `!`, `?` before a space.

  Abbreviations such as "e.g." and single letters do not end a sentence.

  Args:
    text: any text.

  Returns:
    The sentences that are not empty, stripped.

  >>> sentences('Use it, e.g. here. Then stop!\n\nDone')
  ['Use it, e.g. here.', 'Then stop!', 'Done']
  """
  found = []
  for line in text.splitlines():
    start = 0
    for stop in _STOP.finditer(line):
      # Looks back by one word at most, however long the line.
      before = line[max(start, stop.start() - MAX_WORD) : stop.start()]
      last = _LAST_WORD.search(before)[0].lower()  # type: ignore[index]
      if stop[0][0] == "." and (last in _ABBREVIATIONS or len(last) == 1):
        continue
      found.append(line[start : stop.end()].strip())
      start = stop.end()
    found.append(line[start:].strip())
  return [s for s in found if s]


def words(
  sentence: str, tokenize: Callable[[str], Sequence[str]] = _WORD.findall
) -> list[str]:
  """Lower-case words, with contractions rejoined as in appendix G.

  Args:
    sentence: one sentence.
    tokenize: splits the sentence into words, with apostrophes apart.

  Returns:
    The words.

  Reference: Lichtarge et al. 2023, appendix C.2 and G.

  >>> words("I don't know Ann's (x_1) yet.")
  ['i', "don't", 'know', 'ann', "'s", '(', 'x_1', ')', 'yet', '.']
  """
  tokens = [t[:MAX_WORD] for t in tokenize(sentence.lower().replace("’", "'"))]
  if "'" not in tokens:
    return tokens
  together = lambda found: found[0].replace(" ", "")
  return _CONTRACTION.sub(together, " ".join(tokens)).split(" ")


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
  """Sentences of clients, as indices of words in the corpus's own lexicon.

  Attributes:
    lexicon: W different words.
    words: `int32[M]`, positions in the lexicon, sentence after sentence.
    offsets: `int64[N + 1]`; sentence `n` is `words[offsets[n]:offsets[n + 1]]`.
    domains: `int8[N]`, 0 for questions (docstrings) and 1 for answers
      (comments).
    members: for each of K clients, `int64[n_k]`, its sentences.
    ids: K client ids.
    skipped: how much was left out, by reason.
    clients_read: for a file with one row per client, how many rows were read,
      including those that gave nothing.
  """

  lexicon: tuple[str, ...]
  words: np.ndarray
  offsets: np.ndarray
  domains: np.ndarray
  members: tuple[np.ndarray, ...]
  ids: tuple[str, ...]
  skipped: dict[str, int]
  clients_read: int = 0

  def counts(self, chosen: np.ndarray) -> Counter:
    """How often each word occurs in some sentences.

    Args:
      chosen: `int[n]`, the sentences' indices; repeated ones count once.

    Returns:
      Words and counts, without words that do not occur.

    >>> three = [('ann', 0, words) for words in ('aba', 'c', 'b')]
    >>> corpus = collect(three, max_words=9, skipped=Counter(), source='here')
    >>> sorted(corpus.counts(np.array([0, 2])).items())
    [('a', 2), ('b', 2)]
    """
    inside = np.zeros(len(self.offsets) - 1, bool)
    inside[chosen] = True
    words = self.words[np.repeat(inside, np.diff(self.offsets))]
    numbers = np.bincount(words, minlength=len(self.lexicon)).tolist()
    return +Counter(dict(zip(self.lexicon, numbers)))  # Without zeros.

  def ordered(self, keys: Sequence[int]) -> "Corpus":
    """The same sentences in another order.

    Args:
      keys: `int[N]`, of each sentence; smaller ones come first, equal ones stay
        in their order.

    Returns:
      The corpus, with clients in the order of their first sentences.

    >>> two = ('ann', 0, ['b', 'a']), ('bob', 1, ['c'])
    >>> corpus = collect(two, max_words=9, skipped=Counter(), source='here')
    >>> corpus = corpus.ordered([7, 5])
    >>> corpus.words, corpus.offsets, corpus.ids
    (array([2, 0, 1], dtype=int32), array([0, 1, 3]), ('bob', 'ann'))
    """
    if (np.diff(np.asarray(keys)) >= 0).all():
      return self  # A copy may be most of the memory.
    order = np.argsort(keys, kind="stable")
    place, lengths = np.argsort(order), np.diff(self.offsets)[order]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    moved = np.repeat(self.offsets[order] - offsets[:-1], lengths)
    members = [np.sort(place[own]) for own in self.members]
    clients = sorted(range(len(members)), key=lambda k: members[k][0])
    return dataclasses.replace(
      self,
      words=self.words[moved + np.arange(len(moved))],
      offsets=offsets,
      domains=self.domains[order],
      members=tuple(members[k] for k in clients),
      ids=tuple(self.ids[k] for k in clients),
    )


def collect(
  sentences: Iterable[tuple[str, int, Sequence[str]]],
  *,
  max_words: int,
  skipped: Counter[str],
  source: str | os.PathLike,
  spill: Callable[[Corpus], None] | None = None,
) -> Corpus:
  """Collects sentences, client by client or in any order.

  Args:
    sentences: for each the client's id, the domain (see `Corpus`) and the
      words. One without words is counted as skipped.
    max_words: words to keep of a sentence; models see no more.
    skipped: how much was left out before, by reason; it may change meanwhile.
    source: where they come from, for errors.
    spill: given the sentences in parts, of 262,144 each and with lexicons of
      their own, so that memory holds only one; `None` for all in one.

  Returns:
    The corpus, or its last part, with clients in the order of their first
    sentences.

  Raises:
    DataError: there are no sentences.
    ValueError: `max_words` is not at least 1.

  >>> two = ('ann', 0, ['a', 'b', 'a']), ('bob', 1, ['b'])
  >>> corpus = collect(two, max_words=2, skipped=Counter(), source='here')
  >>> corpus.lexicon, corpus.words, corpus.members
  (('a', 'b'), array([0, 1, 1], dtype=int32), (array([0]), array([1])))
  """
  checks.counts(max_words=max_words)

  def nothing():  # Few bytes each, of very many words and sentences.
    members = defaultdict(lambda: array.array("q"))
    return {}, array.array("i"), array.array("i"), bytearray(), members

  def corpus():
    return Corpus(
      lexicon=tuple(lexicon),
      words=np.frombuffer(found, np.int32),
      offsets=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
      domains=np.array(domains, np.int8),
      members=tuple(np.array(own, np.int64) for own in members.values()),
      ids=tuple(members),
      skipped=dict(sorted(skipped.items())),
    )

  lexicon, found, lengths, domains, members = nothing()
  for client, domain, words in sentences:
    if not words:
      skipped["empty sentences"] += 1
      continue
    if spill and len(lengths) == _PART:
      spill(corpus())
      lexicon, found, lengths, domains, members = nothing()
    words = words[:max_words]
    found.extend(lexicon.setdefault(word, len(lexicon)) for word in words)
    members[client].append(len(lengths))
    lengths.append(len(words))
    domains.append(domain)
  if not lengths:
    raise DataError(f"{source}: holds no sentences that can be read")
  return corpus()


@dataclasses.dataclass(frozen=True)
class Vocabulary:
  """The tokens of a language model.

  Tokens are numbered PAD 0, BOS 1, EOS 2, then `tokens`, and OOV last. A
  `wordpiece` vocabulary splits a word from the left into the longest pieces
  that it has; pieces after the first start with `##`. A word that cannot be
  split like this is OOV.

  Attributes:
    kind: 'word' or 'wordpiece'.
    tokens: words or pieces.

  >>> vocabulary = Vocabulary('wordpiece', ('un', '##do', '##ing'))
  >>> vocabulary.size, vocabulary.pieces('undoing'), vocabulary.pieces('do')
  (7, (3, 4, 5), (6,))
  """

  kind: str
  tokens: tuple[str, ...]

  @property
  def size(self) -> int:
    """V: the tokens, PAD, BOS, EOS and OOV."""
    return len(self.tokens) + 4

  @property
  def oov(self) -> int:
    """The number of OOV."""
    return self.size - 1

  @functools.cached_property
  def numbers(self) -> dict[str, int]:
    """Each token's number."""
    return {token: i + EOS + 1 for i, token in enumerate(self.tokens)}

  def pieces(self, word: str) -> tuple[int, ...]:
    """The tokens of one word.

    Args:
      word: in lower case, as `words` gives it.

    Returns:
      The tokens' numbers; only OOV's if the word cannot be spelt.

    >>> vocabulary = Vocabulary('word', ('a', 'b'))
    >>> vocabulary.pieces('b'), vocabulary.pieces('c'), vocabulary.oov
    ((4,), (5,), 5)
    """
    if self.kind == "word":
      return (self.numbers.get(word, self.oov),)
    found, start = [], 0
    while start < len(word):
      prefix = "##" if start else ""
      for end in range(len(word), start, -1):
        piece = prefix + word[start:end]
        if piece in self.numbers:
          found.append(self.numbers[piece])
          start = end
          break
      else:
        return (self.oov,)
    return tuple(found)

  def encode(self, corpus: Corpus, length: int) -> np.ndarray:
    """Sentences as tokens: BOS, the words, EOS, then PAD; long ones are cut.

    The inputs `x` are all columns but the last, the labels `y` all but the
    first.

    Args:
      corpus: N sentences.
      length: T, positions of a sentence.

    Returns:
      `uint16[N, T + 1]`, or `int32` for vocabularies beyond 65,536.
    """
    kind = np.uint16 if self.size <= 1 << 16 else np.int32
    pieces = [self.pieces(word)[:length] for word in corpus.lexicon]
    spelt = np.full((len(pieces), max(map(len, pieces), default=0)), PAD, kind)
    for row, found in zip(spelt, pieces):
      row[: len(found)] = found
    n = len(corpus.offsets) - 1
    out = np.full((n, length + 1), PAD, kind)
    out[:, 0] = BOS
    block = 1 << 16  # Sentences at once, so that temporary arrays stay small.
    for first in range(0, n, block):
      offsets = corpus.offsets[first : first + block + 1]
      tokens = spelt[corpus.words[offsets[0] : offsets[-1]]]
      is_piece = tokens != PAD
      ends = np.cumsum(is_piece.sum(axis=1))
      ends = np.concatenate([[0], ends])[offsets - offsets[0]]
      counts = np.diff(ends)[:, None]
      place = np.arange(max(length, counts.max()))
      rows = np.where(place == counts, EOS, PAD)
      rows[place < counts] = tokens[is_piece]
      out[first : first + block, 1:] = rows[:, :length]
    return out

  def to_bytes(self) -> bytes:
    """The content of a `vocabulary.json`."""
    value = {
      "kind": self.kind,
      "special": {"PAD": PAD, "BOS": BOS, "EOS": EOS, "OOV": self.oov},
      "tokens": list(self.tokens),
    }
    lines = json.dumps(value, indent=0, ensure_ascii=False) + "\n"
    return lines.encode("utf-8", "surrogatepass")

  @property
  def sha256(self) -> str:
    """The hash of `to_bytes()`."""
    return hashlib.sha256(self.to_bytes()).hexdigest()


def train_words(counts: Counter, size: int) -> Vocabulary:
  """The most common words; ties are broken alphabetically.

  Args:
    counts: how often each word occurs in the training split.
    size: words at most; the model's V is larger by four.

  Returns:
    The vocabulary, the commonest word first.

  >>> train_words(Counter(b=2, a=2, c=1), 2).tokens
  ('a', 'b')
  """
  order = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
  return Vocabulary("word", tuple(word for word, _ in order[:size]))


def train_wordpiece(counts: Counter, size: int) -> Vocabulary:
  """Trains word pieces: characters, then the commonest pairs, joined in turn.

  Does what Hugging Face's `WordPieceTrainer` does. That one gives a different
  vocabulary in each process, since it breaks ties by a random hash; here ties
  are broken alphabetically.

  Args:
    counts: how often each word occurs in the training split.
    size: pieces at most; the model's V is larger by four. At most the first
      half of them are single characters, the commonest.

  Returns:
    The vocabulary: characters, then pairs in the order they were joined.

  Reference: Schuster & Nakajima 2012, with the criterion of Sennrich et al.
  2016 (frequency), as in Hugging Face's `tokenizers`.

  >>> train_wordpiece(Counter(abab=3, ab=2), 6).tokens  # ab: 5, ##ab: 3
  ('##b', 'a', '##a', 'ab', '##ab', 'abab')
  """
  words = [w for w in train_words(counts, _LEARNT).tokens if w]
  spelt = [[w[0], *(f"##{c}" for c in w[1:])] for w in words]
  characters: Counter[str] = Counter()
  for word, pieces in zip(words, spelt):
    for piece in pieces:
      characters[piece] += counts[word]
  # A dictionary, for its ordered keys.
  tokens = dict.fromkeys(train_words(characters, max(size // 2, 1)).tokens)
  pairs: Counter[tuple[str, str]] = Counter()
  where: dict[tuple[str, str], set[int]] = defaultdict(set)

  def count(i: int, sign: int) -> set[tuple[str, str]]:
    """Adds the pairs of word i to the counts, or takes them away."""
    both = zip(spelt[i], spelt[i][1:])
    found = [(a, b) for a, b in both if a in tokens and b in tokens]
    for pair in found:
      pairs[pair] += sign * counts[words[i]]
      where[pair].add(i)
    return set(found)

  for i in range(len(words)):
    count(i, 1)
  heap = [(-n, pair) for pair, n in pairs.items()]
  heapq.heapify(heap)
  while heap and len(tokens) < size:
    n, pair = heapq.heappop(heap)
    if -n != pairs[pair]:
      continue  # Its count has changed; the new count is in the heap too.
    joined = pair[0] + pair[1].removeprefix("##")
    tokens[joined] = None
    changed = set()
    for i in where.pop(pair):
      changed |= count(i, -1)
      merged: list[str] = []
      for piece in spelt[i]:
        if (*merged[-1:], piece) == pair:
          merged[-1] = joined
        else:
          merged.append(piece)
      spelt[i] = merged
      changed |= count(i, 1)
    for other in changed:
      if pairs[other] > 0:
        heapq.heappush(heap, (-pairs[other], other))
  return Vocabulary("wordpiece", tuple(tokens))


KINDS = {"word": train_words, "wordpiece": train_wordpiece}


def first_sentences(
  lines: Iterable[str], tokenizer: str = "rules"
) -> Iterable[list[str]]:
  """C4-MOD: the first sentence of each paragraph, in lower-case words.

  Args:
    lines: paragraphs.
    tokenizer: 'rules' for `sentences` and `words`; 'nltk' for NLTK's Punkt
      sentences and its `wordpunct_tokenize`, which sets apostrophes apart as
      appendix G does. NLTK's data is never downloaded.

  Yields:
    The words of a sentence.

  Raises:
    DataError: NLTK's data is not installed.
    ImportError: NLTK is not installed.

  Reference: Lichtarge et al. 2023, appendix C.2 and G.

  >>> list(first_sentences(["It isn't so. It is.", '']))
  [['it', "isn't", 'so', '.']]
  """
  checks.one_of(("rules", "nltk"), tokenizer=tokenizer)
  split, tokenize = sentences, _WORD.findall
  if tokenizer == "nltk":
    import nltk

    with reading("tokenizer=nltk", "python -m nltk.downloader punkt_tab"):
      nltk.sent_tokenize("One. Two.")
    split, tokenize = nltk.sent_tokenize, nltk.wordpunct_tokenize
  for line in lines:
    found = split(line.strip())
    if found:
      yield words(found[0], tokenize)
