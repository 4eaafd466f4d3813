"""What a compiled program does, read from its text.

XLA's compilers for accelerators print a program as computations, made of
instructions. An instruction outside a fusion is one unit of a device's work: on
a GPU one kernel, on a TPU one step of its core, for which its compiler states
the cycles that it expects.
"""

from collections.abc import Iterator
import re
from typing import NamedTuple

# Instructions that only name or group values.
_FREE = frozenset(
  "parameter constant get-tuple-element tuple bitcast after-all while call"
  " conditional partition-id opt-barrier".split()
)
_BYTES = {
  "pred": 1,
  "s8": 1,
  "u8": 1,
  "s16": 2,
  "u16": 2,
  "bf16": 2,
  "f16": 2,
  "s32": 4,
  "u32": 4,
  "f32": 4,
  "s64": 8,
  "u64": 8,
  "f64": 8,
}
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_LINE = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")


class Instruction(NamedTuple):
  """One line of a computation.

  Attributes:
    name: its name.
    opcode: what it does, such as `fusion`.
    bytes: size of its result.
    args: the names of its arguments.
    text: the whole line after the name.
  """

  name: str
  opcode: str
  bytes: int
  args: tuple[str, ...]
  text: str


class Total(NamedTuple):
  """What a program does in one run.

  Attributes:
    launches: instructions that a device runs, repeated ones counted each time.
    bytes: what these read and write.
    cycles: the compiler's estimate, on TPUs; 0 if it states none.
  """

  launches: float
  bytes: float
  cycles: float

  def plus(self, other: "Total", times: float = 1) -> "Total":
    """Adds another total, that of a part run `times` times."""
    return Total(*(a + times * b for a, b in zip(self, other)))


def total(text: str, steps: int) -> Total:
  """Adds up what a program does.

  Args:
    text: the program, as `compiled.as_text()` gives it.
    steps: iterations of loops whose length the program does not state.

  Returns:
    The total. Of a conditional, the branch with the most bytes counts.

  >>> text = '''
  ... %body (p: f32[8]) -> f32[8] {
  ...   %p = f32[8]{0} parameter(0)
  ...   ROOT %f = f32[8]{0} fusion(%p), kind=kLoop, calls=%c
  ... }
  ... ENTRY %main (x: f32[8]) -> f32[8] {
  ...   %x = f32[8]{0} parameter(0)
  ...   %y = f32[8]{0} copy(%x)
  ...   ROOT %w = f32[8]{0} while(%y), condition=%c, body=%body
  ... }'''
  >>> total(text, steps=3)  # A copy and three fusions of 64 bytes each.
  Total(launches=4, bytes=256, cycles=0)
  """
  computations, entry = _computations(text)

  def of(name: str) -> Total:
    sizes = {i.name: i.bytes for i in computations[name]}
    result = Total(0, 0, 0)
    for instruction in computations[name]:
      line, opcode = instruction.text, instruction.opcode
      if opcode == "while":
        body, condition = (_called(line, key) for key in ("body", "condition"))
        times = _trips(line, computations.get(condition, []), steps)
        result = result.plus(of(body), times)
      elif opcode == "conditional":
        branches = [of(branch) for branch in _branches(line)]
        result = result.plus(max(branches, key=lambda b: b.bytes))
      elif opcode == "call":
        result = result.plus(of(_called(line, "to_apply")))
      elif opcode not in _FREE and not opcode.endswith("-done"):
        read = sum(sizes.get(arg, 0) for arg in set(instruction.args))
        cycles = re.search(r'"estimated_cycles":"(\d+)"', line)
        result = result.plus(
          Total(
            1, read + instruction.bytes, int(cycles.group(1)) if cycles else 0
          )
        )
    return result

  return of(entry)


def _computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
  """The program's computations by name, and which comes first."""
  computations: dict[str, list[Instruction]] = {}
  current, entry = None, ""
  for line in text.splitlines():
    if header := _HEADER.match(line):
      current = computations.setdefault(header.group(2), [])
      entry = header.group(2) if header.group(1) else entry
    elif line.startswith("}"):
      current = None
    elif current is not None and (match := _LINE.match(line)):
      current.append(_instruction(*match.groups()))
  return computations, entry


def _instruction(name: str, text: str) -> Instruction:
  """Reads `TYPE OPCODE(ARGUMENTS), ATTRIBUTES`."""
  # A tuple's type has brackets of its own, and layouts such as `T(8,128)`.
  depth = end = 0
  while end < len(text) and (depth or text[end] != " "):
    depth += (text[end] in "([{") - (text[end] in ")]}")
    end += 1
  match = re.match(r"([\w\-]+)\((.*?)\)", text[end + 1 :])
  opcode, args = match.groups() if match else ("", "")
  return Instruction(
    name,
    opcode,
    sum(_sizes(text[:end])),
    tuple(re.findall(r"%([\w.\-]+)", args)),
    text,
  )


def _sizes(text: str) -> Iterator[int]:
  """The bytes of each array in a type."""
  for kind, shape in re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", text):
    size = _BYTES.get(kind, 0)
    for side in filter(None, shape.split(",")):
      size *= int(side)
    yield size


def _called(line: str, key: str) -> str:
  """The computation that an attribute names."""
  match = re.search(rf"\b{key}=%?([\w.\-]+)", line)
  return match.group(1) if match else ""


def _branches(line: str) -> list[str]:
  """The computations of a conditional."""
  listed = re.search(r"branch_computations=\{([^}]*)\}", line)
  if listed:
    return [name.strip(" %") for name in listed.group(1).split(",")]
  return [_called(line, f"{case}_computation") for case in ("true", "false")]


def _trips(line: str, condition: list[Instruction], steps: int) -> int:
  """A loop's iterations: as stated, as its condition says, or `steps`."""
  known = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
  if known:
    return int(known.group(1))
  limits = [
    re.match(r"s32\[\].* constant\((\d+)\)", i.text)
    for i in condition
    if i.opcode == "constant"
  ]
  return int(limits[0].group(1)) if len(limits) == 1 and limits[0] else steps
