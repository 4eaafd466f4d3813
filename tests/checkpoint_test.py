import errno
import hashlib
import os
import pathlib
import re
import shutil
import typing

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hetfl.run import checkpoint


class Pair(typing.NamedTuple):
  params: dict
  key: jax.Array


@flax.struct.dataclass
class Moments:
  mean: jax.Array
  count: jax.Array


def make_state(seed=0):
  key = jax.random.key(seed)
  return {
    "small/x": Pair(
      {"w": jax.random.normal(key, (3, 4)), "b": jnp.zeros(4)}, key
    ),
    "small_x": (
      jax.random.normal(key, (5,), jnp.bfloat16),
      jax.random.split(jax.random.key(1, impl="rbg"), 3),
    ),
    "moments": Moments(jnp.full((2,), -0.0), jnp.array(7, jnp.int32)),
    # NaNs with a payload, no elements, no array.
    "odd": [
      jnp.array([0x7FC00123, 0xFFC00001], jnp.uint32).view(jnp.float32),
      jnp.zeros((0, 3)),
      jnp.array([True, False]),
      None,
    ],
  }


def bits(state):
  """Everything that can be told of a state, as hashable values."""
  flat, treedef = jax.tree_util.tree_flatten_with_path(state)
  found = [str(treedef)]
  for path, leaf in flat:
    kind = "jax" if isinstance(leaf, jax.Array) else type(leaf).__name__
    dtype = str(getattr(leaf, "dtype", ""))
    if dtype.startswith("key"):
      kind += str(jax.random.key_impl(leaf))
      leaf = jax.random.key_data(leaf)
    found.append(
      (str(path), kind, dtype, np.shape(leaf), np.asarray(leaf).tobytes())
    )
  return found


def test_restores_bit_for_bit(tmp_path, caplog):
  state, extra = make_state(), {"a": [1 / 3, None], "b": float("inf")}
  checkpoints = checkpoint.Checkpoints(tmp_path / "deep" / "er")
  assert checkpoints.latest(like=state) is None
  checkpoints.save(7, state, extra)
  round, restored, extra_restored = checkpoints.latest(like=make_state(1))
  assert (round, extra_restored) == (7, extra)
  assert bits(restored) == bits(state)
  assert bits(checkpoints.part("", like=jax.eval_shape(make_state))) == bits(
    state
  )
  assert restored["small/x"].params["w"].devices() == {jax.devices()[0]}
  assert not caplog.messages


def test_a_checkpoint_of_an_earlier_version_is_said_to_be_one(tmp_path):
  state, checkpoints = {"w": jnp.ones(3)}, checkpoint.Checkpoints(tmp_path)
  checkpoints.save(7, state, {})
  manifest = tmp_path / "000007/manifest.json"
  text = manifest.read_text().partition("\n")[2].strip()
  text = text.replace('"specs"', '"leaves"')  # As it was called.
  digest = hashlib.sha256(text.encode()).hexdigest()
  manifest.write_text(f"{digest}\n{text}\n")
  for read in (checkpoints.latest, lambda like: checkpoints.part("", like)):
    with pytest.raises(ValueError, match="000007 is of an earlier version of"):
      read(like=state)


def test_restored_state_can_be_donated(tmp_path):
  checkpoints = checkpoint.Checkpoints(tmp_path)
  checkpoints.save(1, jnp.arange(1000.0), {})
  state = checkpoints.latest(jnp.arange(1000.0))[1]
  step = jax.jit(lambda x: x + 1, donate_argnums=0)
  np.testing.assert_array_equal(step(step(state)), np.arange(1000) + 2.0)


def test_keeps_the_last(tmp_path):
  checkpoints = checkpoint.Checkpoints(tmp_path, keep=2)
  for round in (1, 2, 3, 1_000_000):
    checkpoints.save(round, {"w": jnp.full(3, round)}, {})
  assert sorted(os.listdir(tmp_path)) == ["000003", "1000000"]
  assert checkpoints.latest({"w": jnp.zeros(3, jnp.int32)})[0] == 1_000_000


def test_keeps_the_last_that_is_finite(tmp_path):
  checkpoints = checkpoint.Checkpoints(tmp_path, keep=2)
  values = [1.0, 2.0, np.nan, np.inf, np.nan, np.nan]
  for round, value in enumerate(values, 1):
    checkpoints.save(round, {"w": jnp.full(3, value, jnp.bfloat16)}, {})
  assert checkpoints.rounds() == [2, 5, 6]
  like = {"w": jnp.zeros(3, jnp.bfloat16)}
  assert checkpoints.latest(like, before=5)[0] == 2
  for round in (7, 8):
    checkpoints.save(round, like, {})
  assert checkpoints.rounds() == [7, 8]


def files(folder):
  return sorted(p for p in folder.rglob("*") if p.is_file())


def test_no_damage_to_a_file_gives_wrong_values(tmp_path, caplog):
  checkpoints = checkpoint.Checkpoints(tmp_path / "whole")
  for round in (1, 2):
    checkpoints.save(round, make_state(round), {"round": round})
  expected = bits(make_state(1))
  damaged = checkpoint.Checkpoints(tmp_path / "damaged")
  rng = np.random.default_rng(0)
  for file in files(checkpoints.path(2)):
    name = file.relative_to(checkpoints.folder)
    size = max(1, file.stat().st_size)
    for harm in ["delete", "half", rng.integers(8 * size)]:
      shutil.rmtree(damaged.folder, ignore_errors=True)
      shutil.copytree(checkpoints.folder, damaged.folder)
      target = damaged.folder / name
      content = bytearray(target.read_bytes())
      if not content and harm != "delete":
        continue
      if harm == "delete":
        target.unlink()
      elif harm == "half":
        target.write_bytes(content[: size // 2])
      else:
        content[harm // 8] ^= 1 << (harm % 8)
        target.write_bytes(content)
      caplog.clear()
      round, state, extra = damaged.latest(like=make_state())
      assert (round, extra) == (1, {"round": 1}), (name, harm)
      assert bits(state) == expected
      (line,) = caplog.messages
      assert "000002 is damaged" in line
      assert line.endswith("; using 000001.")


def test_damaged_everything_starts_over_and_is_replaced(tmp_path, caplog):
  checkpoints = checkpoint.Checkpoints(tmp_path, keep=1)
  checkpoints.save(5, {"w": jnp.ones(3)}, {})
  (tmp_path / "000005" / "state.npz").unlink()
  (tmp_path / "000009.part").mkdir()  # of a save that was killed
  assert checkpoints.latest({"w": jnp.ones(3)}) is None
  (line,) = caplog.messages
  assert "000005 is damaged" in line
  assert line.endswith("; using none, from the start.")
  # The new one stays although a damaged one has a later number.
  checkpoints.save(3, {"w": jnp.zeros(3)}, {})
  assert os.listdir(tmp_path) == ["000003"]


def test_what_is_not_damage_ends_the_run(tmp_path, monkeypatch):
  checkpoints = checkpoint.Checkpoints(tmp_path)
  checkpoints.save(5, {"w": jnp.ones(3)}, {})

  def fail(*args, **kwargs):
    raise OSError(errno.EMFILE, "too many")

  with monkeypatch.context() as patch:
    patch.setattr(pathlib.Path, "read_bytes", fail)
    with pytest.raises(OSError, match="too many"):
      checkpoints.latest({"w": jnp.ones(3)})
  assert checkpoints.latest({"w": jnp.ones(3)})[0] == 5


@pytest.mark.parametrize(
  "like, has, wants",
  [
    (
      {"w": jnp.ones(4), "k": jax.random.key(0)},
      {"['w']": "float32[3]"},
      {"['w']": "float32[4]"},
    ),
    (
      {"w": jnp.ones(3, jnp.bfloat16), "k": jax.random.key(0)},
      {"['w']": "float32[3]"},
      {"['w']": "bfloat16[3]"},
    ),
    ({"w": jnp.ones(3)}, {"['k']": "key<fry>[]"}, {}),
    (
      {"w": jnp.ones(3), "k": jax.random.key(0, impl="rbg")},
      {"['k']": "key<fry>[]"},
      {"['k']": "key<rbg>[]"},
    ),
  ],
)
def test_another_kind_of_state_is_an_error(tmp_path, like, has, wants):
  checkpoints = checkpoint.Checkpoints(tmp_path)
  checkpoints.save(5, {"w": jnp.ones(3), "k": jax.random.key(0)}, {})
  message = re.escape(f"another kind of state: it has {has}, not {wants}.")
  with pytest.raises(ValueError, match=message):
    checkpoints.latest(like)
