"""Timelines as SVG: a pipeline's schedule, and what workers and servers did.

Blocks have letters or patterns beside their colours, and a title with their times.
"""

from collections.abc import Iterable, Mapping, Sequence

from plurax import errors
from plurax.pipeline.schedule import make_schedule
from plurax.pipeline.simulation import simulate
from plurax.plan import Plan
from plurax.report.page.html_parts import escape
from plurax.report.servers_picture import LABELS, Lane
from plurax.report.timeline import TimedAction, blocks, differing, kinds_of_work, percent, stages_of

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
            plan.schedule, plan.pipeline, plan.microbatches, plan.virtual_stages
        )
    except errors.PlanError:
        return ""
    timelines = differing(simulate(schedule), simulate(schedule, lockstep=True))
    stage = "stage" if schedule.chunks == 1 else "stages"
    names = [f"{stage} {stages_of(schedule, device)}" for device in range(schedule.devices)]
    shown = []
    for caption, timeline in timelines.items():
        title = f"{schedule.name}, {caption}: idle (bubble) {percent(timeline.bubble)}"
        shown.append(_timeline(title, names, blocks(timeline)))
    legend = "".join(
        f'<li><span class="key work-{kind}">{kind}</span> {escape(text)}</li>'
        for kind, text in kinds_of_work(schedule).items()
    )
    return "".join(shown) + f'<ul class="legend">{legend}</ul>'


def _timeline(title: str, names: Sequence[str], lines: Sequence[Sequence[TimedAction]]) -> str:
    end = max(block.end for line in lines for block in line)
    if sum(map(len, lines)) > MOST_BLOCKS:
        return f'<p class="note">{escape(title)}; too many actions to draw.</p>'
    unit, left = max(LEAST, min(UNIT, WIDEST / end)), _margin(names)
    parts = []
    for index, (name, line) in enumerate(zip(names, lines, strict=True)):
        y = TOP + index * (ROW + GAP)
        parts.append(f'<text x="0" y="{y + 17}" class="name">{escape(name)}</text>')
        parts.append(_rect(left, y, end * unit, ROW, "idle", ""))
        for block in line:
            x, width = left + block.start * unit, (block.end - block.start) * unit
            text = str(block.action)
            said = f"{text}, {block.start} to {block.end}"
            parts.append(_rect(x + 0.5, y, width - 1, ROW, f"work-{block.action.kind}", said))
            if width > LETTERS + 3 * max(0, len(text) - 2):
                middle = f'x="{x + width / 2:.1f}" y="{y + 17}"'
                parts.append(f'<text {middle} class="letter">{escape(text)}</text>')
    return _figure(title, left + end * unit + 2, TOP + len(lines) * (ROW + GAP), "".join(parts))


def lanes_svg(lanes: Mapping[str, Lane], resumed: Sequence[float], end: float) -> str:
    """Return what each worker and server did over the seconds of a run."""
    if not end:
        return ""
    left = _margin(lanes)
    unit, height = (WIDEST - left) / end, TOP + len(lanes) * (ROW + GAP)
    parts = []
    for index, (name, lane) in enumerate(lanes.items()):
        y = TOP + index * (ROW + GAP)
        parts.append(f'<text x="0" y="{y + 17}" class="name">{escape(name)}</text>')
        for kind, spans in lane.spans.items():
            for start, long in spans[:MOST_SPANS]:
                width = max(0.4, long * unit)
                said = f"{LABELS.get(kind, kind)}, {start:.2f} to {start + long:.2f} s"
                shown = said if width > 2 else ""
                parts.append(_rect(left + start * unit, y, width, ROW, f"lane-{kind}", shown))
        for at, text in lane.deaths:
            x = left + at * unit
            parts.append(f'<text x="{x:.1f}" y="{y + 18}" class="death">✕ {escape(text)}</text>')
        parts += [
            _rect(left + at * unit, y, 1.5, ROW, "saved", f"snapshot, {at:.2f} s")
            for at in lane.saved
        ]
    parts += [
        _rect(left + at * unit, 0, 1.5, height, "resumed", f"resumed, {at:.2f} s") for at in resumed
    ]
    there = dict.fromkeys(kind for lane in lanes.values() for kind in lane.spans)
    legend = "".join(
        f'<li><span class="key lane-{kind}"></span> {escape(LABELS.get(kind, kind))}</li>'
        for kind in there
    )
    title = f"what workers and servers did in {end:.1f} seconds"
    return _figure(title, WIDEST + 60, height, "".join(parts)) + f'<ul class="legend">{legend}</ul>'


def _margin(names: Iterable[str]) -> float:
    """Return the width of the names of rows."""
    return 12 + LETTER * max(map(len, names))


def _rect(x: float, y: float, width: float, height: float, kind: str, title: str) -> str:
    said = f"<title>{escape(title)}</title>" if title else ""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} class="{kind}">{said}</rect>' if said else (
        f'<rect {place} class="{kind}"/>'
    )  # fmt: skip


def _figure(title: str, width: float, height: float, content: str) -> str:
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(title)}">'
        f'<svg class="timeline" role="img" aria-label="{escape(title)}" width="{width:.0f}" '
        f'height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}">{content}</svg>'
        "</div></figure>"
    )
