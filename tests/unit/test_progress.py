"""What training shows: lines in a file, a bar on a terminal, nothing where not wanted."""

import io

import pytest

from plurax.console import PlainConsole
from plurax.progress.console_progress import ConsoleProgress

ROW = {
    "kind": "epoch", "epoch": 2, "step": 20, "loss": 0.5, "accuracy": 0.875, "examples": 640,
    "eval_loss": 0.25, "skipped": 0, "seconds": 2.0, "examples_per_second": 12345.0,
    "grad_norm": 9.0,
}  # fmt: skip


def shown(row=ROW, *, show=True, terminal=False, steps=100):
    text = io.StringIO()
    console = PlainConsole(file=text, force_terminal=terminal, width=200)
    with ConsoleProgress(10, steps, 0, show, console) as bar:
        bar.advance(10, 1, "loss 0.5", 12345.0)  # the first call, which is left out
        bar.advance(20, 1, "loss 0.5", 12345.0)
        bar.epoch(row)
        bar.note("stopped [here]")
    return text.getvalue()


def test_lines_where_there_is_no_terminal():
    lines = shown().splitlines()
    assert lines[0].startswith(
        "epoch  2/10  loss 0.5000  accuracy 0.8750  eval loss 0.2500  12,345 examples/s"
    )
    assert lines[0].endswith(" left")
    assert lines[1] == "stopped [here]"
    assert "\x1b" not in shown()


def test_a_bar_on_a_terminal():
    text = shown(terminal=True)
    assert "\x1b" in text
    assert "20/100" in text
    assert "epoch 2/10" in text


def test_nothing_where_not_wanted():
    assert shown(show=False) == ""


def test_unknown_length_shows_no_remaining_time():
    assert " left" not in shown(steps=None)


def test_metrics_not_there_yet_are_not_shown():
    text = io.StringIO()
    console = PlainConsole(file=text, force_terminal=True, width=200)
    with ConsoleProgress(1, 100, 0, True, console) as bar:
        bar.advance(1, 0, "", 0.0)
    assert "nan" not in text.getvalue()
    assert "1/100" in text.getvalue()


def test_skipped_updates_are_said():
    assert "3 updates skipped (not finite)" in shown({**ROW, "skipped": 3})


def test_a_run_in_between_epochs_says_where_it_is(monkeypatch: pytest.MonkeyPatch):
    """The time left is counted from the first call on: what came before compiled."""
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    text = io.StringIO()
    with ConsoleProgress(1, 100, 0, True, PlainConsole(file=text, width=200)) as bar:
        now[0] = 2000.0
        bar.advance(1, 0, "loss 0.5", 100.0)
        now[0] = 2018.0
        bar.advance(10, 0, "loss 0.5", 100.0)
    assert text.getvalue().splitlines()[-1] == "  step 10/100  loss 0.5  100 examples/s  3:00 left"


def test_there_is_one_time_left():
    """On a terminal it stands in the bar, and not in the lines above it too."""
    text = io.StringIO()
    console = PlainConsole(file=text, force_terminal=True, width=200)
    with ConsoleProgress(10, 100, 0, True, console) as bar:
        bar.advance(10, 1, "loss 0.5", 12345.0)
        bar.advance(20, 1, "loss 0.5", 12345.0)
        bar.epoch(ROW)
        epoch = next(line for line in text.getvalue().splitlines() if "eval loss" in line)
        assert "left" not in epoch
        bar._bar.refresh()
        assert "left" in text.getvalue()


def test_compiling_is_said_with_its_time():
    text = io.StringIO()
    with ConsoleProgress(1, 10, 0, True, PlainConsole(file=text, width=200)) as bar:
        assert list(bar.compiled(iter([1, 2, 3]), "data=4, batches of 8")) == [1, 2, 3]
    said = text.getvalue().splitlines()
    assert said[0] == "compiling data=4, batches of 8"
    assert said[1].startswith("compiled in ")
    text = io.StringIO()
    console = PlainConsole(file=text, force_terminal=True, width=200)
    with ConsoleProgress(1, 10, 0, True, console) as bar, bar.compiling("data=4"):
        bar._bar.refresh()
        assert "compiling data=4" in text.getvalue()
        assert "0:00:00" in text.getvalue()


def test_the_ends_of_a_population_are_shown_where_a_row_has_both():
    assert "loss 0.5000 (0.4000 to 0.6000)" in shown({**ROW, "loss_best": 0.4, "loss_worst": 0.6})
    assert "loss 0.5000  accuracy" in shown({**ROW, "loss_best": 0.4})  # a metric of a task


class Unread(io.StringIO):
    """What `| head -1` leaves behind."""

    def write(self, text):
        raise BrokenPipeError

    def fileno(self):
        raise io.UnsupportedOperation


def test_a_pipe_that_nobody_reads_is_noticed_and_nothing_raised(monkeypatch):
    console = PlainConsole(file=Unread(), width=200)
    monkeypatch.setattr(console, "on_broken_pipe", lambda: (_ for _ in ()).throw(SystemExit(1)))
    with ConsoleProgress(1, 10, 0, True, console) as bar:
        bar.epoch({**ROW, "epoch": 1})
        assert bar.closed
        bar.note("once more")
