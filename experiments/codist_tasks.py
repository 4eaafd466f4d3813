"""What codistillation trains: models of images and of text, and their data."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from codist import Codist, CONVOLUTIONS
import jax.numpy as jnp
import own_models
from settings import shown, UsageError

from hetfl import augment, core
from hetfl.data import codist_images, codist_text
from hetfl.models import language, next_word, vision

DROPOUTS = ("dropout", "map_dropout", "logits_dropout")
CNNS = {"small_cnn": vision.small_cnn, "large_cnn": vision.large_cnn}
LSTMS = {"small_lstm": language.small_lstm, "large_lstm": language.large_lstm}
_HALF = {
  "small_lstm": {"embedding": 48, "hidden": 35},
  "large_lstm": {"embedding": 96, "hidden": 70},
}
# Positions whose logits a CPU thread holds at once: the fastest of 32 to 200.
_CHUNK = 128


class Task(NamedTuple):
  """Data, models and transforms of one data set.

  Attributes:
    data: the pools and the server's data.
    models: the models of the small and the large pool.
    pool: arguments of a `Pool` besides names, models and rates.
    distiller: arguments of a `Distiller` besides rates and those of the target.
    evaluator: arguments of an `Evaluator` besides models and sets.
    files: name and content of files that belong to a run, besides `data.json`.
    record: what `result.json` says of the data.
    metrics: test metrics of each pool that go into `result.json`.
    charts: suffixes of charts' files, and of the accuracies they show.
  """

  data: Any
  models: list[core.Model]
  pool: Mapping[str, Any]
  distiller: Mapping[str, Any]
  evaluator: Mapping[str, Any]
  files: Mapping[str, bytes]
  record: Mapping[str, Any]
  metrics: tuple[str, ...] = ("test_accuracy",)
  charts: tuple[str, ...] = ("",)


def task_of(s: Codist) -> Task:
  """The task of a run's data set."""
  of_text = "text" in s.words
  own_models.check("models", s.models or (), [*(LSTMS if of_text else CNNS)])
  return _text(s) if of_text else _images(s)


def _images(s: Codist) -> Task:
  if s.bank == "disk":
    raise UsageError("--bank=disk: is for text; for images use --bank=round")
  load = codist_images.load_codist_images
  data = load(**s.arguments(load))
  recipe = augment.recipe_of(s.recipe, data.pools[0].bank["x"])
  size, (*sides, channels) = recipe.size, data.image_shape
  if size > min(sides) or size < 4 or len(recipe.mean) != channels:
    raise UsageError(
      f"--recipe={s.recipe}: crops of {size}x{size}x{len(recipe.mean)} do not"
      f" fit images of {sides[0]}x{sides[1]}x{channels} ({s.dataset}) and the"
      " CNNs, which need 4x4 or more; choose another"
    )
  example, models = jnp.zeros((1, size, size, channels)), []
  layout = s.layout or [
    "pool" if i in recipe.pool_after else "conv"
    for i in range(len(CONVOLUTIONS))
  ]
  dropouts = {n: getattr(s, n) for n in DROPOUTS if getattr(s, n)}
  for i, name in enumerate(s.models or CNNS):
    rates = {flag: values[i] for flag, values in dropouts.items()}
    for flag, rate in rates.items() if own_models.is_own(name) else ():
      if rate:
        raise UsageError(
          f"--{flag}={shown(dropouts[flag])}: has no effect on {name};"
          " give it a rate of 0, and write dropout into the model"
        )
    build = lambda name=name, rates=rates: CNNS[name](
      data.num_classes,
      padding=recipe.padding,
      pool_after=[i for i, kind in enumerate(layout) if kind == "pool"],
      strides=[2 if kind == "stride" else 1 for kind in layout],
      conv=s.conv,
      dtype=s.dtype,
      **rates,
    )
    models.append(
      own_models.model("models", name, data.num_classes, example, build)
    )
  return Task(
    data,
    models,
    pool=dict(transform=recipe.train),
    distiller=dict(transform=recipe.distill, mixup_beta=s.mixup_beta or None),
    evaluator=dict(transform=recipe.evaluate),
    files=own_models.sources(s.models or ()),
    record={"partition": data.partition},
  )


def _split(batch: core.Batch) -> core.Batch:
  """Splits sentences into the model's inputs and the next tokens."""
  tokens = batch["tokens"].astype(jnp.int32)
  batch = {name: a for name, a in batch.items() if name != "tokens"}
  return {**batch, "x": tokens[:, :-1], "y": tokens[:, 1:]}


def _text(s: Codist) -> Task:
  load = codist_text.load_codist_text
  data = load(**s.arguments(load), on_disk=s.bank == "disk")
  words = data.vocabulary
  # In one program for all clients, computing all logits at once is faster.
  chunk = _CHUNK if "threads" in s.words else None
  example = jnp.zeros((1, codist_text.LENGTH), jnp.int32)
  sizes, models = _HALF if s.model_size == "half" else {}, []
  for name in s.models or LSTMS:
    build = lambda name=name: LSTMS[name](
      words.size, chunk=chunk, dtype=s.dtype, **sizes.get(name, {})
    )
    model = own_models.model("models", name, words.size, example, build)
    own = own_models.is_own(name)
    models.append(language.in_chunks(model, chunk) if own else model)
  domains = ("", "_questions", "_answers")
  return Task(
    data,
    models,
    pool=dict(transform=_split, loss=next_word.sentence_loss()),
    distiller=dict(
      transform=_split,
      weights=next_word.token_weights,
      divergence=next_word.token_divergence,
    ),
    evaluator=dict(transform=_split, measure=next_word.next_word_metrics),
    files=own_models.sources(s.models or ())
    | {"vocabulary.json": words.to_bytes()},
    record={
      "partition": "users",
      "vocabulary": {n: getattr(words, n) for n in ("kind", "size", "sha256")},
      "skipped": data.skipped,
    },
    metrics=(
      *(f"test_accuracy{of}" for of in (*domains, "_no_eos")),
      "test_perplexity",
    ),
    charts=domains,
  )
