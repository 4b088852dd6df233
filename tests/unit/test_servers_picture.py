"""Pictures of runs with parameter servers: staleness, loss over time, and what workers did."""

import json

import pytest
from tests.pictures import legend, panels

from plurax.analysis import draw_servers, draw_workers
from plurax.report.lanes import worker_lanes


def rows(staleness, epochs=2, steps=50, seconds=5.0):
    """Return the rows of a run: its losses fall, and its staleness repeats what is given."""
    found = []
    for step in range(1, epochs * steps + 1):
        stale = float(staleness[step % len(staleness)])
        found.append({"kind": "step", "step": step, "loss": 10.0 / step, "weight": 8.0,
                      "staleness": stale})  # fmt: skip
        if step % steps == 0:
            found.append({"kind": "epoch", "step": step, "loss": 1.0, "examples": 8 * steps,
                          "examples_per_second": 8 * steps / seconds})  # fmt: skip
    return found


def test_runs_are_drawn_side_by_side(tmp_path):
    refused = {**rows([0])[0], "weight": 0.0, "staleness": 9.0}
    runs = {"sync": rows([0]), "bounded": [*rows([1, 1, 2, 2]), refused], "async": rows([0, 5])}
    figure = draw_servers(runs, tmp_path / "servers.png")
    staleness, updates, seconds = panels(figure)
    assert staleness.shapes == 1 + 2 + 2  # of each run how stale its gradients were
    assert "staleness" in staleness.x
    assert legend(figure) == [
        "sync (staleness 0.0 on average)",
        "bounded (staleness 1.5 on average)",
        "async (staleness 2.5 on average)",
    ]
    assert [points for _, points in updates.lines] == [97, 98, 97]  # means of 100 // 25
    assert (updates.x, updates.y) == ("updates", "loss, running mean")
    assert seconds.x == "seconds, without the first call"
    assert figure.axes[1].get_yscale() == "log"
    assert max(figure.axes[2].lines[0].get_xdata()) == pytest.approx(10.0)  # two epochs of 5 s
    assert (tmp_path / "servers.png").read_bytes()[:4] == b"\x89PNG"


def test_a_run_without_a_finished_epoch_has_no_seconds():
    figure = draw_servers({"async": [row for row in rows([3]) if row["kind"] == "step"]})
    _, updates, seconds = panels(figure)
    assert [points for _, points in updates.lines] == [97]
    assert [points for _, points in seconds.lines] == [0]


EVENTS = [
    {"event": "start", "step": 0, "servers": {"workers": 2, "shards": 1, "mode": "bounded"}},
    {"event": "worker ready", "worker": 0, "life": 0, "at": 2.0},
    {"event": "pull", "worker": 0, "sequence": 0, "at": 2.25},
    {"event": "compute", "worker": 0, "sequence": 0, "at": 2.5},
    {"event": "worker ready", "worker": 1, "life": 0, "at": 3.0},
    {"event": "pull", "worker": 1, "sequence": 0, "at": 3.0},
    {"event": "compute", "worker": 1, "sequence": 0, "at": 3.0},
    {"event": "push", "worker": 0, "sequence": 0, "at": 3.5},
    {"event": "snapshot", "number": 1, "at": 3.5},
    {"event": "saved", "server": 0, "number": 1, "at": 3.6},
    {"event": "pull", "worker": 0, "sequence": 1, "at": 5.0},
    {"event": "compute", "worker": 0, "sequence": 1, "at": 5.0},
    {"event": "worker lost", "worker": 1, "life": 0, "at": 5.5},
    {"event": "server lost", "server": 0, "version": 9, "restored": 4, "number": 1, "at": 6.0},
    {"event": "pull", "worker": 0, "sequence": 2, "at": 6.0},
    {"event": "compute", "worker": 0, "sequence": 2, "at": 6.5},
    {"event": "push", "worker": 0, "sequence": 2, "at": 7.0},
    {"event": "fetched", "step": 3},
]
AGAIN = [
    {"event": "start", "step": 3, "servers": {"workers": 1, "shards": 2, "mode": "bounded"}},
    {"event": "worker ready", "worker": 0, "life": 0, "at": 1.0},
    {"event": "pull", "worker": 0, "sequence": 0, "at": 1.0},
    {"event": "compute", "worker": 0, "sequence": 0, "at": 1.0},
    {"event": "push", "worker": 0, "sequence": 0, "at": 1.5},
    {"event": "fetched", "step": 4},
]


def test_what_workers_did_is_read_from_the_record():
    lanes, resumed, end = worker_lanes([*EVENTS, *AGAIN])
    assert list(lanes) == ["worker 0", "worker 1", "server 0", "server 1"]
    first, second, server, other = lanes.values()
    assert first.spans == {
        "waiting": [(2.0, 0.25), (3.5, 1.5)],
        "pulling": [(2.25, 0.25), (6.0, 0.5)],
        "dropped": [(5.0, 1.0)],
        "gradient": [(2.5, 1.0), (6.5, 0.5), (8.0, 0.5)],
    }
    assert second.spans == {"dropped": [(3.0, 2.5)], "starting": [(5.5, 1.5)]}
    assert [at for at, _ in second.deaths] == [5.5]
    assert server.spans == {"server": [(0.0, 7.0), (7.0, 1.5)]}
    assert server.deaths == [(6.0, "5 updates back")]
    assert server.saved == [3.6]
    assert other.spans == {"server": [(7.0, 1.5)]}
    assert (resumed, end) == ([7.0], 8.5)


def test_workers_are_drawn_with_waits_and_deaths(tmp_path):
    lines = "".join(json.dumps(event) + "\n" for event in EVENTS)
    (tmp_path / "servers.jsonl").write_text(lines)
    figure = draw_workers(tmp_path, tmp_path / "workers.png")
    (panel,) = panels(figure)
    assert panel.x == "seconds since the start"
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == [
        "worker 0", "worker 1", "server 0"
    ]  # fmt: skip
    assert panel.texts == ["", "5 updates back"]
    assert panel.areas == 4 + 2 + 2  # kinds of spans of each row, and the snapshots
    assert legend(figure) == [
        "computes a gradient", "computes one that is dropped", "pulls parameters",
        "waits for others", "starts again and compiles", "server, and its snapshots", "ended",
    ]  # fmt: skip
    assert (tmp_path / "workers.png").read_bytes()[:4] == b"\x89PNG"
