"""The parts of `codist.py` that are specific to language models."""

import functools

from absl import flags
import jax
import jax.numpy as jnp
import own_models

from hetfl import core
from hetfl import engine as engine_lib
from hetfl.data import codist_text
from hetfl.models import language, next_word

FLAGS = flags.FLAGS

# The flags' defaults. For Stack Overflow they are from the paper's appendix C
# where it gives them; the rates are from Reddi et al. 2021, and the rest is our
# own choice.
_PAPER = dict(
  model_size="paper",
  vocabulary="word",
  vocabulary_size=10_000,
  high_capacity_clients=684,
  distill_examples=None,
  max_sentences_per_client=None,
  rounds=1500,
  eval_every=50,
  clients_per_round=20,
  client_batch_size=20,
  client_lr=0.3,
  server_lr=(0.01, 0.01),
  distill_lr=(1e-3, 1e-3),
  distill_epsilon=1e-8,
  distill_steps=200,
  distill_batch_size=128,
  codist_period=200,
  merge_alpha=0.5,
  merge_every=1,
)
_STACKEXCHANGE = _PAPER | dict(
  vocabulary_size=4_000,
  high_capacity_clients=600,
  max_sentences_per_client=100,
  rounds=300,
  eval_every=25,
  client_batch_size=10,
  distill_steps=100,
  distill_batch_size=64,
  codist_period=50,
  # In every round, as in the paper, models that have not learned much yet hold
  # each other back: see BUILD_NOTES.md.
  merge_alpha=0.7,
  merge_every=4,
)
_PYDOC = _STACKEXCHANGE | dict(
  model_size="half",
  vocabulary_size=2_000,
  high_capacity_clients=40,
  rounds=50,
  eval_every=10,
  clients_per_round=10,
  distill_steps=20,  # for all algorithms, so that they share programs
  distill_batch_size=32,
  codist_period=10,
)
DEFAULTS = {
  "pydoc": {
    "fedavg": _PYDOC,
    "periodic": _PYDOC,
    "merged": _PYDOC,
  },
  "stackexchange": {
    "fedavg": _STACKEXCHANGE,
    "periodic": _STACKEXCHANGE,
    "merged": _STACKEXCHANGE | dict(distill_steps=32),
  },
  "stackoverflow": {
    "fedavg": _PAPER,
    "periodic": _PAPER,
    "merged": _PAPER | dict(distill_steps=32),
  },
}
MODELS = ("small_lstm", "large_lstm")
# --model_size -> these models.
LSTMS = {
  "paper": (language.small_lstm, language.large_lstm),
  "half": (
    functools.partial(
      language.LSTMLanguageModel, embedding=48, hidden=35, num_layers=1
    ),
    functools.partial(
      language.LSTMLanguageModel, embedding=96, hidden=70, num_layers=2
    ),
  ),
}
# Positions whose logits a CPU thread holds at once: the fastest of 32 to 200.
_CHUNK = 128


def define_flags() -> None:
  """Defines the flags that only language runs have."""
  flags.DEFINE_enum(
    "vocabulary",
    None,
    ["word", "wordpiece"],
    "Tokens: the most common words, or word pieces.",
  )
  flags.DEFINE_integer(
    "vocabulary_size",
    None,
    "Number of words or pieces, not counting PAD, BOS, EOS and OOV.",
    lower_bound=1,
  )
  flags.DEFINE_enum(
    "pools",
    "capacity",
    ["capacity", "domain"],
    "Which clients train which model. capacity: all clients train the small"
    " model, and some of them (--high_capacity_clients) also the large one."
    " domain: users who answer train the small model, users who ask the large"
    " one.",
  )
  flags.DEFINE_integer(
    "max_sentences_per_client",
    None,
    "Maximum number of sentences per user; further ones are left out. For"
    " stackoverflow of the pools' users only.",
    lower_bound=1,
  )
  flags.DEFINE_enum(
    "model_size",
    None,
    sorted(LSTMS),
    "The paper's LSTMs, or LSTMs of half their width.",
  )
  flags.DEFINE_string(
    "c4_path",
    None,
    "For --distill_data=c4: a C4 shard (*.json.gz), a text file with one"
    " paragraph per line, or a folder of such files.",
  )
  flags.DEFINE_enum(
    "c4_tokenizer",
    "rules",
    ["rules", "nltk"],
    "For --distill_data=c4: how text is split into sentences and words; nltk"
    " requires NLTK's punkt_tab, which is never downloaded.",
  )


def speed() -> dict:
  """Defaults of flags that change the speed only."""
  on_cpu = jax.default_backend() == "cpu"
  return {"eval_batch_size": 40 if on_cpu else 400, "microbatch": 0}


def _split(batch: core.Batch) -> core.Batch:
  """Splits sentences into the model's inputs and the next tokens."""
  tokens = batch["tokens"].astype(jnp.int32)
  batch = {name: a for name, a in batch.items() if name != "tokens"}
  return {**batch, "x": tokens[:, :-1], "y": tokens[:, 1:]}


@functools.cache
def in_chunks(model: core.Model, chunk: int | None) -> core.Model:
  """A model of text, whose logits are computed in chunks.

  Args:
    model: the model; a chunk that its outputs state stays.
    chunk: see `TokenLogits`.

  Returns:
    The model, the same for the same arguments.
  """

  def apply(variables, x, key, train):
    outputs, stats = model.apply(variables, x, key, train)
    return outputs.replace(chunk=outputs.chunk or chunk), stats

  return model._replace(apply=apply)


class Task:
  """Data, models and transforms of one data set; see `codist_images.Task`."""

  metrics = (
    "test_accuracy",
    "test_accuracy_questions",
    "test_accuracy_answers",
    "test_accuracy_no_eos",
    "test_perplexity",
  )
  charts = {
    "": "test_accuracy",
    "_questions": "test_accuracy_questions",
    "_answers": "test_accuracy_answers",
  }

  def __init__(self, config: dict, speed: dict, engine):
    del speed
    names = config["models"] or MODELS
    self.data = codist_text.load_codist_text(
      config["dataset"],
      vocabulary=config["vocabulary"],
      vocabulary_size=config["vocabulary_size"],
      pools=config["pools"],
      data_dir=FLAGS.data_dir,
      high_capacity_clients=config["high_capacity_clients"],
      max_sentences_per_client=config["max_sentences_per_client"],
      distill_data=config["distill_data"],
      distill_examples=config["distill_examples"],
      c4_path=FLAGS.c4_path,
      c4_tokenizer=config["c4_tokenizer"],
      seed=config["seed"],
      partition_seed=config["partition_seed"],
    )
    vocabulary = self.data.vocabulary
    # In one program for all clients, computing all logits at once is faster.
    chunk = _CHUNK if isinstance(engine, engine_lib.Threads) else None
    example = jnp.zeros((1, codist_text.LENGTH), jnp.int32)
    lstms = dict(zip(MODELS, LSTMS[config["model_size"]]))
    self.models = []
    for name in names:
      build = lambda name=name: lstms[name](
        vocabulary.size, chunk=chunk, dtype=config["dtype"]
      )
      model = own_models.model("models", name, vocabulary.size, example, build)
      if own_models.is_own(name):
        model = in_chunks(model, chunk)
      self.models.append(model)
    self.pool_options = dict(transform=_split, loss=next_word.sentence_loss())
    self.evaluator_options = dict(
      transform=_split, measure=next_word.next_word_metrics
    )
    self.files = own_models.sources(names)
    self.files["vocabulary.json"] = vocabulary.to_bytes()

  def distiller_options(self, config: dict) -> dict:
    """Arguments of a `Distiller` besides rates and those of the target."""
    del config
    return dict(
      transform=_split,
      weights=next_word.token_weights,
      divergence=next_word.token_divergence,
    )

  def finish(self, results: dict[str, float]) -> dict[str, float]:
    """Adds metrics that are computed from a pool's means."""
    return results | {
      name.removesuffix("loss") + "perplexity": next_word.perplexity(value)
      for name, value in results.items()
      if name.endswith("_loss")
    }

  def record(self) -> dict:
    """What `result.json` says of the data."""
    vocabulary = self.data.vocabulary
    return {
      "partition": "users",
      "vocabulary": {
        "kind": vocabulary.kind,
        "size": vocabulary.size,
        "sha256": vocabulary.sha256,
      },
      "skipped": self.data.skipped,
    }
