"""What is said of the papers' claims, and the runs that say it."""

import doctest
import importlib
import json
import re
import sys

import pytest

from hetfl.run import logs
from tests.runs import ROOT

VERDICTS = ("holds", "not shown", "does not hold", "not run")


@pytest.fixture(scope="module")
def claims():
  """`results/claims.py`, which is in no package, and a folder of the site."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sys, "path", [str(ROOT / "results"), *sys.path])
    patch.setattr(sys, "dont_write_bytecode", True)
    yield importlib.import_module("claims")


def rows_of(text):
  """The rows of a document's tables that end in a verdict or have one."""
  rows = [line.strip("| ").split(" | ") for line in text.splitlines()]
  return [row for row in rows if any(c.startswith(VERDICTS) for c in row)]


def test_claims_are_what_the_runs_say(claims):
  """`python results/claims.py` mends it."""
  text = (ROOT / "results/CLAIMS.md").read_text(encoding="utf-8")
  assert text == claims.text()


def test_readme_says_no_more_than_one_claim_a_row():
  text = (ROOT / "README.md").read_text(encoding="utf-8")
  section = re.search(r"(?s)\n## Results\n(.*?)\n## ", text)[1]
  all_rows = rows_of((ROOT / "results/CLAIMS.md").read_text(encoding="utf-8"))
  headlines = rows_of(section)
  assert len(headlines) > 5
  numbers = lambda cells: re.findall(r"\d+\.\d+", " | ".join(cells))
  assert numbers([section]) == [n for row in headlines for n in numbers(row)]
  for row in headlines:
    (said,) = (c for c in row if c.startswith(VERDICTS))
    assert any(
      {*numbers(row)} <= {*numbers(of)}
      and said.split(":")[0] in [c.split(":")[0] for c in of]
      for of in all_rows
    ), row


def test_results_name_no_number_of_their_own():
  claims, results = (
    re.sub("(?s)```.*?```|`.*?`", "", (ROOT / "results" / name).read_text())
    for name in ("CLAIMS.md", "README.md")
  )  # Without commands, whose numbers are others.
  numbers = lambda text: {*re.findall(r"\d+\.\d\d+", text)}
  assert len(numbers(results)) > 50 and numbers(results) <= numbers(claims)


def test_verdicts_follow_the_rule(claims):
  assert doctest.testmod(claims).failed == 0
  verdict = claims.verdict
  # More than a point; 1.0 is not. Of two seeds: 3 and 1 deviate by 1.4.
  assert verdict([1.01]) == "holds" and verdict([1.0]) == "not shown"
  assert verdict([3.0, 1.0]) == "holds"
  # A mean of 2, but the sign of one, or the deviation of 2.8, forbids it.
  assert verdict([4.1, -0.1]) == verdict([4.0, 0.0]) == "not shown"
  assert verdict([4.4, 0.1, 0.1]) == "not shown"
  assert verdict([-2.0, -1.5]) == "does not hold"
  assert verdict([-2.0, -1.5], sign=-1) == "holds"
  assert verdict([1.0, -1.0], "level") == verdict([-1.0], "reaches") == "holds"
  assert verdict([1.1], "level") == verdict([-1.1], "reaches") != "holds"
  assert verdict([9.0, 1.1], "every") == "holds"
  assert verdict([9.0, 0.9], "every") == "not shown"
  assert verdict([9.0, -1.1], "every") == "does not hold"
  assert verdict([0.2], noise=0.1) == "holds"


def test_runs_report_the_end_of_their_courses(claims):
  for path in claims.RESULTS.rglob("result.json"):
    result = json.loads(path.read_bytes())
    rows = logs.read_rows(path.parent / "metrics.jsonl")
    assert rows[-1]["round"] == result["rounds"], path
    for pool, of in result.get("pools", {}).items():
      assert rows[-1][f"{pool}/test_accuracy"] == of["test_accuracy"], path
    of = result.get("global")
    if of and result["algorithm"] != "independent":  # Which has none.
      course = [row["global/test_accuracy"] for row in rows]
      assert course[-1] == of["test_accuracy"], path
      assert max(course) == of["best_test_accuracy"], path
    for k, of in enumerate(result.get("parties", ())):
      assert rows[-1][f"party{k}/test_accuracy"] == of["final_accuracy"], path
