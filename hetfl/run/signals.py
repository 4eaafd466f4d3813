"""Signals that stop a run or a search."""

from collections.abc import Callable, Iterator
import contextlib
import os
import signal
import threading
import time

import jax


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
  """Collects stop signals in a list; a second one acts at once."""
  caught: list[int] = []
  since = 0.0
  when = "this round"
  if jax.process_count() > 1:
    when = "the next evaluation or checkpoint"

  def handler(number):
    nonlocal since
    if caught:
      # Sent to a group of processes, and handed on by one of them.
      if number == caught[0] and time.monotonic() - since < 1:
        return
      if number == signal.SIGINT:
        raise KeyboardInterrupt
      raise SystemExit(128 + number)
    caught.append(number)
    since = time.monotonic()
    name = signal.Signals(number).name
    # Not by `logging`: the signal may have interrupted a call of it.
    message = f"{name}: stopping after {when}; send it again to stop at once\n"
    os.write(2, message.encode())

  with on_signals(handler):
    yield caught


@contextlib.contextmanager
def on_signals(handler: Callable[[int], None]) -> Iterator[None]:
  """Makes stop signals call a handler; does nothing outside the main thread.

  Stop signals are SIGINT, SIGTERM, and SIGUSR1, which batch systems send when a
  job's time is nearly over.

  Args:
    handler: called with the signal's number.

  Yields:
    Nothing; the previous handlers are restored afterwards.
  """
  if threading.current_thread() is not threading.main_thread():
    yield
    return
  # A handler not set from Python reads as None and cannot be restored.
  before = {
    number: signal.getsignal(number) or signal.SIG_DFL
    for name in ("SIGINT", "SIGTERM", "SIGUSR1")
    if (number := getattr(signal, name, None))  # Windows has no SIGUSR1.
  }
  try:
    for number in before:
      signal.signal(number, lambda number, _: handler(number))
    yield
  finally:
    for number, old in before.items():
      signal.signal(number, old)
