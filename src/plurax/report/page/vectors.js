// --- Vectors: metrics numbered from 0, as `expert 0`, `expert 1`, ...: one picture for all ------------

const MOST_COLUMNS = 100;
const FEWEST_ENTRIES = 3;

/** The metrics that are entries of vectors, by the vector's name and in order. */
function vectorsOf(names) {
  const numbered = new Map();
  for (const name of names) {
    const parts = /^(.*?)[ _]?(0|[1-9]\d*)$/.exec(name);
    if (!parts || !parts[1]) continue;
    if (!numbered.has(parts[1])) numbered.set(parts[1], []);
    numbered.get(parts[1])[Number(parts[2])] = name;
  }
  // A number that is missing leaves a hole, which `filter` leaves out.
  return [...numbered].filter(([, entries]) => entries.length >= FEWEST_ENTRIES && entries.filter(() => true).length === entries.length);
}

/** The entries at some steps, each the mean of a curve's points since the step before. */
function vectorGrid(run, entries) {
  const kind = Object.keys(KINDS).find((one) => entries.every((name) => run.curves[name]?.[one]));
  if (!kind) return null;
  const lines = entries.map((name) => run.curves[name][kind]);
  const steps = [...new Set(lines.flatMap(([places]) => places))].sort((a, b) => a - b);
  const count = Math.min(steps.length, MOST_COLUMNS);
  const ends = Array.from({ length: count }, (_, at) => steps[Math.floor(((at + 1) * steps.length) / count) - 1]);
  const columns = ends.map((end, at) => lines.map(([places, values]) => {
    const inside = values.filter((value, i) => value != null && places[i] <= end && !(places[i] <= ends[at - 1]));
    return inside.length ? inside.reduce((a, b) => a + b, 0) / inside.length : null;
  }));
  return { kind, ends, columns };
}

const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;

/** Each entry by the mean of all, which is the even share where they add up to 1; a sentence on it. */
function vectorSummary({ columns }) {
  const whole = columns.filter((column) => column.every((value) => value != null));
  const last = whole.slice(-Math.max(1, Math.round(whole.length / 10)));
  const entries = last[0]?.map((_, entry) => mean(last.map((column) => column[entry]))) ?? [];
  const even = entries.length ? mean(entries) : NaN;
  if (!(even > 0) || Math.min(...entries) < 0) return { even, positive: false, text: 'shades: the value' };
  const shares = last.every((column) => Math.abs(column.reduce((a, b) => a + b, 0) - 1) < 1e-3);
  const name = shares ? 'even share' : 'mean of all';
  const top = entries.indexOf(Math.max(...entries));
  return { even, positive: true, name, text: `${top} has ${(entries[top] / even).toFixed(1)} × the ${name} over the last tenth; middle shade: ${number(even)}` };
}

/** A heat map of a vector: a row for each entry, steps along it; the middle shade is the mean of all. */
function addVector(place, run, name, entries) {
  const grid = vectorGrid(run, entries);
  if (!grid) return null;
  const { even, positive, name: middle, text } = vectorSummary(grid);
  const cells = grid.columns.flatMap((column, at) => column.map((value, entry) => [at, entry, positive && value != null ? value / even : value, value]));
  const values = cells.map((cell) => cell[2]).filter((value) => value != null);
  const x = () => placed(run, grid.ends).map(short);
  const scale = positive
    ? { min: 0, max: 2, text: [`2 × ${middle} or more`, '0'], inRange: { color: [color('run-0'), color('paper'), color('run-1')] } }
    : { min: Math.min(...values), max: Math.max(...values), text: [short(Math.max(...values)), short(Math.min(...values))], inRange: { color: [color('paper'), color('run-0')] } };
  const every = entries.map((_, entry) => String(entry));
  const axisLabel = { color: color('soft'), fontSize: 11, hideOverlap: true };
  return addChart(place, {
    title: words(name), note: `${several ? `${run.name}, ` : ''}${KINDS[grid.kind]}: ${text}`, label: () => `${entries.length} entries: ${text}`,
    rows: () => {
      const chosen = grid.ends.map((_, at) => at).filter((at) => at % Math.ceil(grid.ends.length / 25) === 0 || at === grid.ends.length - 1);
      const shown = placed(run, grid.ends);
      return [[X_NAMES[view.x], ...entries.map(words)], chosen.map((at) => [shown[at], ...grid.columns[at]])];
    },
    options: () => ({
      grid: { left: 26, right: 16, top: 34, bottom: 34, containLabel: true },
      xAxis: axis(X_NAMES[view.x], { type: 'category', data: x(), splitLine: { show: false }, axisLabel }),
      yAxis: axis('', { type: 'category', data: every, inverse: true, splitLine: { show: false }, axisLabel }),
      visualMap: { ...scale, dimension: 2, calculable: false, orient: 'horizontal', right: 10, top: 0, itemWidth: 10, itemHeight: 90, textStyle: { color: color('soft'), fontSize: 11 } },
      tooltip: tooltip({ formatter: ({ value: [at, entry, ratio, value] }) => `${X_NAMES[view.x]} ${x()[at]}, ${escaped(words(entries[entry]))}: <b>${number(value)}</b>${positive ? `, ${number(ratio)} × the ${middle}` : ''}` }),
      series: [{ type: 'heatmap', data: cells, progressive: 0 }],
    }),
  });
}
