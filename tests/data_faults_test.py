"""Damaged and hostile data files; `tests.faults.data_files` has many more."""

from tests.faults import data_files


def test_data_files_are_refused_or_read(tmp_path):
  counts, faults = data_files.run(tmp_path, 300, seed=0)
  assert not faults
  names = {name for name, _ in counts}
  assert {"own.npz", "small.tar.gz", "Posts.xml", "c4.json.gz"} <= names
  for name in names:
    # Each loader was reached, and does not refuse everything.
    assert counts[name, "refused"] > 2
    assert counts[name, "loaded"] + counts[name, "loaded in part"], name
  # Damage to one client, row or line leaves the others.
  for name in ("words.sqlite", "c4.json", "c4.json.gz"):
    assert counts[name, "loaded in part"], name
