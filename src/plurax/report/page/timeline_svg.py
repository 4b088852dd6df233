"""Timelines as SVG: a pipeline's schedule, and what workers and servers did.

Blocks have letters or patterns beside their colours, and a title with their times.
"""

from collections.abc import Iterable, Mapping, Sequence

from plurax import errors
from plurax.pipeline.schedule import make_schedule
from plurax.plan import Plan
from plurax.report.lanes import WORK, Lane, blocks, kinds_of_work, lane_names, timelines_of, titled
from plurax.report.page.html_parts import escape

ROW, GAP, TOP = 26, 4, 6
"""Heights of a row and of the space between two, and the margin above, in pixels."""
LETTER = 7.2
"""Width of a letter of a row's name."""
UNIT, LEAST, WIDEST = 22, 6, 1100
"""Pixels of a forward through one stage, at most and at least, and of a whole timeline."""
LETTERS = 15
"""Pixels below which a block has no letters."""
MOST_BLOCKS = 4000
"""Blocks that are drawn: more would be too fine to see."""
MOST_SPANS = 3000
"""Spans of a worker's lane that are drawn."""


def pipeline_svg(plan: Plan) -> str:
    """Return a plan's pipeline over time, with its idle time; "" for one that cannot run."""
    try:
        schedule = make_schedule(
            plan.schedule, plan.pipeline, plan.most_microbatches, plan.virtual_stages
        )
    except errors.PlanError:
        return ""
    names, figures = lane_names(schedule), []
    for caption, timeline in timelines_of(schedule).captioned(f"{schedule.name}, ").items():
        title, lanes = titled(caption, timeline), blocks(timeline)
        if sum(map(len, lanes)) > MOST_BLOCKS:
            figures.append(f'<p class="note">{escape(title)}; too many actions to draw.</p>')
            continue
        end = max(block.end for lane in lanes for block in lane)
        unit = max(LEAST, min(UNIT, WIDEST / end))
        rows = {name: _rect(0, end * unit, "idle") for name in names}
        for name, lane in zip(names, lanes, strict=True):
            for block in lane:
                x, width = block.start * unit, (block.end - block.start) * unit
                text, kind = str(block.action), f"work-{block.action.kind}"
                note = f"{text}, {block.start} to {block.end}"
                rows[name] += _rect(x + 0.5, width - 1, kind, note)
                if width > LETTERS + 3 * max(0, len(text) - 2):
                    rows[name] += _text(text, x + width / 2, "letter")
        figures.append(_figure(title, end * unit, rows))
    keys = [(f"work-{kind}", kind, text) for kind, text in kinds_of_work(schedule).items()]
    return "".join(figures) + _legend(keys)


def lanes_svg(lanes: Mapping[str, Lane], resumed: Sequence[float], end: float) -> str:
    """Return what each worker and server did over the seconds of a run."""
    if not end:
        return ""
    width, rows = WIDEST - _margin(lanes), {}
    unit = width / end
    for name, lane in lanes.items():
        parts = []
        for kind, spans in lane.spans.items():
            for start, seconds in spans[:MOST_SPANS]:
                wide = max(0.4, seconds * unit)
                note = f"{WORK.get(kind, kind)}, {start:.2f} to {start + seconds:.2f} s"
                parts.append(_rect(start * unit, wide, f"lane-{kind}", note if wide > 2 else ""))
        parts += [_text(f"✕ {words}", at * unit, "death") for at, words in lane.deaths]
        parts += [_rect(at * unit, 1.5, "saved", f"snapshot, {at:.2f} s") for at in lane.saved]
        # A run goes on in all rows at once.
        parts += [
            _rect(at * unit, 1.5, "resumed", f"resumed, {at:.2f} s", ROW + GAP) for at in resumed
        ]
        rows[name] = "".join(parts)
    kinds = dict.fromkeys(kind for lane in lanes.values() for kind in lane.spans)
    title = f"what workers and servers did in {end:.1f} seconds"
    keys = [(f"lane-{kind}", "", WORK.get(kind, kind)) for kind in kinds]
    return _figure(title, width + 60, rows) + _legend(keys)


def _rect(x: float, width: float, kind: str, title: str = "", height: float = ROW) -> str:
    return (
        f'<rect x="{x:.1f}" width="{width:.1f}" height="{height:.1f}" class="{kind}">'
        + (f"<title>{escape(title)}</title>" if title else "")
        + "</rect>"
    )


def _text(text: str, x: float, kind: str) -> str:
    return f'<text x="{x:.1f}" y="17" class="{kind}">{escape(text)}</text>'


def _margin(names: Iterable[str]) -> float:
    """Return the width of the names of rows."""
    return 12 + LETTER * max(map(len, names))


def _legend(keys: Iterable[tuple[str, str, str]]) -> str:
    """Return a list of what is drawn how: a class, a letter, and words."""
    items = (
        f'<li><span class="key {kind}">{letter}</span> {escape(text)}</li>'
        for kind, letter, text in keys
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _figure(title: str, width: float, rows: Mapping[str, str]) -> str:
    """Return rows below each other, each to the right of its name."""
    left = _margin(rows)
    width, height = left + width + 2, TOP + len(rows) * (ROW + GAP)
    content = "".join(
        f'<g transform="translate(0,{TOP + index * (ROW + GAP)})">{_text(name, 0, "name")}'
        f'<g transform="translate({left:.1f},0)">{row}</g></g>'
        for index, (name, row) in enumerate(rows.items())
    )
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(title)}">'
        f'<svg class="timeline" role="img" aria-label="{escape(title)}" width="{width:.0f}" '
        f'height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}">{content}</svg>'
        "</div></figure>"
    )
