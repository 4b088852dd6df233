"""Names that are commands to a terminal, or markup to Rich, are shown as text."""

import io
import json

import pytest
from rich.console import Group
from rich.table import Table
from rich.text import Text
from tests.runs import write_run

from plurax.cli.dispatch import main
from plurax.console import PlainConsole
from plurax.launch.events import Events
from plurax.progress.console_progress import ConsoleProgress
from plurax.report.watch_frame import WatchedRun
from plurax.terminal import printable

TITLE, SHOWN = "\x1b]0;taken\x07", r"\x1b]0;taken"  # Rich itself leaves the bell out
EVIL = f"[blink]loss[/blink]{TITLE}\x9b2J\u202e:boom:"
PARTS = ("[blink]loss[/blink]", SHOWN, r"\x9b2J", r"\u202e", ":boom:")


def table():
    found = Table(title=EVIL)
    found.add_column(EVIL, footer=EVIL)
    found.add_row(EVIL)
    return found


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize(
    "shown",
    [EVIL, Text(EVIL), Text.assemble((EVIL, "bold")), Group(EVIL), table()],
    ids=["string", "text", "styled", "group", "table"],
)
def test_a_console_takes_no_commands(shown, terminal):
    file = io.StringIO()
    PlainConsole(file=file, force_terminal=terminal, width=300).print(shown)
    check(file.getvalue())


def check(text, parts=PARTS):
    """Raise `AssertionError` unless the parts are shown, and none of them is obeyed."""
    assert not [one for one in ("\x1b]", "\x07", "\x9b", "\u202e", "\x1b[5m") if one in text]
    assert [one for one in parts if one not in text] == []


def test_a_bar_takes_no_commands():
    file = io.StringIO()
    console = PlainConsole(file=file, force_terminal=True, width=300)
    row = {"epoch": 1, "step": 1, "examples_per_second": 1.0, EVIL: 1.0}
    with ConsoleProgress(1, 10, 0, True, console) as bar:
        bar.advance(1, 0, EVIL, 1.0)
        bar.advance(2, 0, EVIL, 1.0)
        bar._bar.refresh()
    check(file.getvalue())
    file.seek(file.truncate(0))
    with ConsoleProgress(1, 10, 0, True, console) as bar:
        bar.epoch(row)
        bar.note(EVIL)
    check(file.getvalue())


def test_a_watched_run_takes_no_commands(tmp_path, capsys):
    folder = write_run(tmp_path / "digits", steps=4, epochs=1)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [{**row, EVIL: 0.5} for row in rows]
    rows.append({"kind": "event", "event": EVIL, "step": 4, EVIL: EVIL})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = io.StringIO()
    PlainConsole(file=file, width=400).print(WatchedRun(folder, EVIL).frame(400))
    check(file.getvalue())
    with pytest.raises(SystemExit) as left:
        main(["watch", str(folder), "--once", "--metric", EVIL])
    assert left.value.code == 0
    check(capsys.readouterr().out, [SHOWN])


def test_messages_take_no_commands(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["watch", str(tmp_path / EVIL)])
    check(capsys.readouterr().err, [SHOWN])
    Events(None).write("lost", f"host 1 is lost: {EVIL}")
    check(capsys.readouterr().err, [SHOWN])


def test_text_stays_as_it_is():
    text = "µ → Δ\tloss\n\N{GRINNING FACE} e\u0301"
    assert printable(text) == text
    assert printable("\r\x00\x7f") == r"\r\x00\x7f"
