// --- Curves: a panel for each metric, the runs over one another ------------------------------------

const several = data.runs.length > 1;
const MOST_NAMED = 8;
const view = {
  x: 'step', log: false, smooth: 0,
  kinds: { step: !several, train: !several, eval: true },
  // Runs that have a colour, dashes and a name, by their index: their slot. The others are grey.
  slots: new Map(),
};
const KINDS = { step: 'every step', train: 'training', eval: 'evaluation' };

/** The runs that are named at first: all if they are few, else those with the lowest last loss. */
function chooseNamed() {
  const last = (run) => {
    const lines = run.curves.loss || Object.values(run.curves)[0] || {};
    const line = lines.eval || lines.train || lines.step;
    return line && line[1].length ? line[1][line[1].length - 1] ?? Infinity : Infinity;
  };
  const order = data.runs.map((run, index) => index);
  if (order.length > MOST_NAMED) order.sort((a, b) => last(data.runs[a]) - last(data.runs[b]));
  order.slice(0, data.runs.length > MOST_NAMED ? 3 : MOST_NAMED)
    .forEach((index, slot) => view.slots.set(index, slot));
}

function freeSlot() {
  const used = new Set(view.slots.values());
  for (let slot = 0; slot < STYLES; slot += 1) if (!used.has(slot)) return slot;
  return null;
}

/** Steps as what the x axis shows: steps, epochs or seconds, by the run's clock. */
function placed(run, steps) {
  if (view.x === 'step') return steps;
  const [known, ...others] = run.clock;
  const wanted = others[view.x === 'epoch' ? 0 : 1];
  let at = 0;
  return steps.map((step) => {
    while (at < known.length - 2 && known[at + 1] < step) at += 1;
    const part = (step - known[at]) / (known[at + 1] - known[at] || 1);
    return wanted[at] + part * (wanted[at + 1] - wanted[at]);
  });
}

/** An exponential moving mean, corrected for its start. */
function smoothed(values) {
  if (!view.smooth) return values;
  let mean = 0;
  let weight = 0;
  return values.map((value) => {
    mean = view.smooth * mean + (1 - view.smooth) * value;
    weight = view.smooth * weight + 1 - view.smooth;
    return mean / weight;
  });
}

const points = (run, [steps, values]) => placed(run, steps).map((x, index) => [x, values[index]]);

/** The kinds of a metric that a run shows: where several runs have no evaluation, their training. */
function shownKinds(lines) {
  const chosen = Object.keys(KINDS).filter((kind) => view.kinds[kind] && lines[kind]);
  if (chosen.length || !view.kinds.eval) return chosen;
  return ['train', 'step'].filter((kind) => lines[kind]).slice(0, 1);
}

/** All runs without a name as one grey line with gaps: a hundred lines of their own would be slow. */
function greySeries(metric) {
  const line = data.runs.flatMap((run, index) => {
    if (!several || view.slots.has(index) || !run.curves[metric]) return [];
    const lines = run.curves[metric];
    return shownKinds(lines).flatMap((kind) => [...points(run, kind === 'step' ? [lines[kind][0], smoothed(lines[kind][1])] : lines[kind]), [null, null]]);
  });
  if (!line.length) return [];
  return [{
    name: 'other runs', type: 'line', data: line, symbol: 'none', silent: true, z: 1, emphasis: { disabled: true },
    lineStyle: { color: color('muted'), width: 1, opacity: 0.4 }, tooltip: { show: false },
  }];
}

/** Lines of one named run for one metric. */
function seriesOf(index, metric) {
  const run = data.runs[index];
  const lines = run.curves[metric];
  if (!lines || (several && !view.slots.has(index))) return [];
  const made = [];
  for (const kind of shownKinds(lines)) {
    const own = several ? view.slots.get(index) : { step: 0, train: 0, eval: 1 }[kind];
    const style = lineStyle(own);
    const few = lines[kind][0].length <= (several ? 30 : 60);
    if (lines[`${kind}_members`]) made.push(...bands(run, lines[`${kind}_members`], style, kind));
    const stepped = kind === 'step';
    const values = stepped ? [lines[kind][0], smoothed(lines[kind][1])] : lines[kind];
    const end = several ? run.name : KINDS[kind];
    made.push({
      name: several ? `${run.name}, ${KINDS[kind]}` : KINDS[kind], id: `${index} ${kind}`, type: 'line', data: points(run, values),
      symbol: few && !stepped ? marker(own) : 'none', symbolSize: 6, showAllSymbol: true, clip: true,
      lineStyle: {
        ...style, type: several ? style.type : kind === 'eval' ? 'solid' : kind === 'train' ? [7, 3] : 'solid',
        width: stepped ? 1.1 : 2.2,
        opacity: stepped && (several || lines.train) && !view.smooth ? 0.4 : 1,
      },
      itemStyle: { color: style.color },
      z: stepped ? 2 : kind === 'eval' ? 5 : 4,
      endLabel: stepped || (several ? made.some((one) => one.endLabel) : shownKinds(lines).length === 1) ? undefined : {
        show: true, formatter: () => shortened(end), color: style.color, fontSize: 11, fontWeight: 600, distance: 6, textBorderColor: color('paper'), textBorderWidth: 3,
      },
    });
  }
  return made;
}

const shortened = (name) => {
  const most = phone() ? 11 : 18;
  return name.length > most ? `${name.slice(0, most - 1)}…` : name;
};

/** Members: the lowest and highest, the quartiles, and the best one dotted. */
function bands(run, lines, style, kind) {
  const x = placed(run, lines.x);
  const area = (low, high, opacity, name) => ({
    name: `${KINDS[kind]}: ${name}`, type: 'custom', silent: true, z: 1, clip: true, tooltip: { show: false },
    encode: { x: [0], y: [1, 2] }, data: x.map((at, index) => [at, low[index], high[index]]),
    renderItem: (params, api) => {
      if (params.dataIndex > 0) return null;
      const edge = [...x.map((at, i) => api.coord([at, high[i]])), ...x.map((at, i) => api.coord([at, low[i]])).reverse()];
      return { type: 'polygon', shape: { points: edge }, style: { fill: style.color, opacity } };
    },
  });
  const best = {
    name: `${KINDS[kind]}: best member (${lines.member[0]})`, type: 'line', symbol: 'none', z: 3,
    data: x.map((at, index) => [at, lines.best[index]]),
    lineStyle: { color: style.color, width: 1.2, type: [1.5, 2.5] }, itemStyle: { color: style.color },
  };
  const shown = several ? [] : [area(lines.low, lines.high, 0.13, 'all members')];
  return [...shown, area(lines.q25, lines.q75, several ? 0.16 : 0.28, 'half of the members'), ...(several ? [] : [best])];
}

/** Vertical lines where something happened. */
function eventMarks() {
  const marks = [];
  for (const [index, run] of data.runs.entries()) {
    if (several && !view.slots.has(index)) continue;
    for (const event of run.events) marks.push({ xAxis: placed(run, [event.step])[0], name: event.text });
  }
  if (!marks.length || marks.length > 24) return [];
  return [{
    type: 'line', data: [], silent: true, markLine: {
      symbol: 'none', silent: true, data: marks, animation: false,
      lineStyle: { color: color('soft'), type: [3, 3], width: 1 },
      label: { formatter: (mark) => mark.name, color: color('soft'), fontSize: 10, rotate: 90, position: 'insideEndTop' },
    },
  }];
}

const X_NAMES = { step: 'step', epoch: 'epoch', seconds: 'seconds of training' };
const LOG_LOSS = 30;

/** Whether a metric's axis is logarithmic by itself: a loss over more than a decade and a half. */
function wideRange(metric) {
  if (metric !== 'loss') return false;
  let low = Infinity;
  let high = 0;
  for (const run of data.runs) {
    for (const kind of ['train', 'eval']) {
      for (const value of run.curves[metric]?.[kind]?.[1] ?? []) {
        if (value != null) { low = Math.min(low, value); high = Math.max(high, value); }
      }
    }
  }
  return low > 0 && high > LOG_LOSS * low;
}

function curveOptions(metric) {
  const series = [...greySeries(metric), ...data.runs.flatMap((run, index) => seriesOf(index, metric))];
  const labelled = series.some((one) => one.endLabel);
  const longest = Math.max(...series.filter((one) => one.endLabel).map((one) => one.endLabel.formatter().length));
  const values = series.flatMap((one) => one.data.flatMap((point) => point.slice(1))).filter((value) => value != null);
  const positive = values.length > 0 && values.every((value) => value > 0);
  const log = positive && (view.log || (view.log === null && wideRange(metric)));
  return {
    grid: { left: 8, right: labelled ? 14 + 6.6 * longest : 16, top: 12, bottom: 30, containLabel: true },
    xAxis: axis(X_NAMES[view.x], { type: 'value', scale: true, splitLine: { show: false }, axisLine: { show: true, lineStyle: { color: color('line') } }, min: 0, max: 'dataMax', axisLabel: { color: color('soft'), fontSize: 11, formatter: short, hideOverlap: true, showMaxLabel: true } }),
    yAxis: axis('', log ? { type: 'log', ...decades(values) } : { type: 'value', scale: true }),
    tooltip: tooltip({ trigger: 'axis', axisPointer: { type: 'line', snap: true, lineStyle: { color: color('soft') } }, formatter: curveTip }),
    toolbox: { itemSize: 0, itemGap: 0, feature: { dataZoom: { yAxisIndex: 'none', title: { zoom: '', back: '' } } } },
    dataZoom: [{ type: 'inside', xAxisIndex: 0, filterMode: 'none', zoomOnMouseWheel: 'ctrl', moveOnMouseMove: false, moveOnMouseWheel: false, preventDefaultMouseMove: false, disabled: touched() }],
    series: [...series, ...eventMarks()],
  };
}

/** Ends of a logarithmic axis that leave little room empty. */
function decades(values) {
  const [low, high] = values.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
  const [min, max] = [tidy(low, -1), tidy(high, 1)];
  // The label of an end beside that of a power of ten would overlap it.
  const near = (end) => Math.abs(Math.log10(end) - Math.round(Math.log10(end))) < 0.35;
  const power = (end) => Math.log10(end) % 1 === 0;
  return { min, max, axisLabel: { ...axis('').axisLabel, showMinLabel: power(min) || !near(min), showMaxLabel: power(max) || !near(max) } };
}

/** What the cursor shows: the values of at most twelve lines. */
function curveTip(items) {
  const seen = items.filter((item) => item.seriesType === 'line' && item.seriesName !== 'other runs' && item.value && item.value[1] != null);
  if (!seen.length) return '';
  const rows = seen.slice(0, 12).map((item) => `<tr><td style="border:0;padding:1px 10px 1px 0">${item.marker}${escaped(item.seriesName)}</td>`
    + `<td style="border:0;padding:1px 0;text-align:right"><b>${number(item.value[1])}</b></td></tr>`);
  return `${escaped(X_NAMES[view.x])} ${number(seen[0].value[0])}<table style="min-width:0">${rows.join('')}</table>`;
}

/** The values of a panel's lines at some places, for the table below it. */
function curveRows(metric) {
  const lines = data.runs.flatMap((run, index) => seriesOf(index, metric)).filter((one) => one.type === 'line').slice(0, 12);
  const long = lines.reduce((a, b) => (b.data.length > a.length ? b.data : a), []);
  const count = Math.min(long.length, 25);
  const places = Array.from({ length: count }, (_, i) => long[Math.round((i * (long.length - 1)) / Math.max(1, count - 1))][0]);
  const nearest = (line, x) => {
    const found = line.data.reduce((a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a), [Infinity, null]);
    return found[1];
  };
  return [[X_NAMES[view.x], ...lines.map((one) => one.name)], places.map((x) => [x, ...lines.map((one) => nearest(one, x))])];
}

/** A sentence with what a panel shows, for readers who do not see it. */
function curveLabel(metric) {
  const parts = [];
  for (const [index, run] of data.runs.entries()) {
    const lines = run.curves[metric];
    if (!lines || (several && !view.slots.has(index))) continue;
    const kind = lines.eval ? 'eval' : lines.train ? 'train' : 'step';
    const values = lines[kind][1].filter((value) => value != null);
    if (values.length) parts.push(`${several ? `${run.name}, ` : ''}${KINDS[kind]} from ${number(values[0])} to ${number(values[values.length - 1])}`);
  }
  return `${parts.join('; ')}. Arrow keys read the values.`;
}

const LABEL_HEIGHT = 13;
const LABEL_WIDTH = 60;

/** Move the names at the ends of lines apart where they would overlap. */
function spreadLabels(chart) {
  const height = chart.getHeight();
  const found = [];
  for (const one of chart.getOption().series) {
    const last = one.endLabel?.show ? [...one.data].reverse().find((point) => point[1] != null) : null;
    if (!last) continue;
    const [left, at] = chart.convertToPixel({ xAxisIndex: 0, yAxisIndex: 0 }, last);
    found.push({ id: one.id, left, at });
  }
  // A line that ends elsewhere has room for its name.
  const end = Math.max(...found.map((one) => one.left));
  const beside = found.filter((one) => one.left > end - LABEL_WIDTH).sort((a, b) => a.at - b.at);
  const places = beside.map((one) => one.at);
  // Each pass moves neighbours apart by half of what they overlap.
  for (let pass = 0; pass < 60; pass += 1) {
    for (let i = 1; i < places.length; i += 1) {
      const overlap = LABEL_HEIGHT - (places[i] - places[i - 1]);
      if (overlap > 0) { places[i - 1] -= overlap / 2; places[i] += overlap / 2; }
    }
  }
  const series = beside.map((one, i) => ({ id: one.id, endLabel: { offset: [0, Math.max(LABEL_HEIGHT / 2, Math.min(height - LABEL_HEIGHT, places[i])) - one.at] } }));
  if (series.length > 1) chart.setOption({ series });
}

/** Zoom by dragging over a range where there is a mouse; a double click shows all again. */
function curveReady(chart, one, metric) {
  spreadLabels(chart);
  if (!touched()) {
    chart.dispatchAction({ type: 'takeGlobalCursor', key: 'dataZoomSelect', dataZoomSelectActive: true });
  }
  chart.getZr().on('dblclick', () => chart.dispatchAction({ type: 'dataZoom', start: 0, end: 100 }));
  one.box.onkeydown = (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === 'Escape') chart.dispatchAction({ type: 'hideTip' });
    if (move === undefined) return;
    event.preventDefault();
    const [columns, rows] = curveRows(metric);
    one.cursor = Math.max(0, Math.min(rows.length - 1, one.cursor + move));
    const row = rows[one.cursor];
    if (!row) return;
    const y = row.slice(1).find((value) => value != null) ?? 0;
    const [left, top] = chart.convertToPixel({ xAxisIndex: 0, yAxisIndex: 0 }, [row[0], y]);
    chart.dispatchAction({ type: 'showTip', x: left, y: top });
    say(columns.map((name, place) => `${name} ${number(row[place])}`).join(', '));
  };
}

function startCurves() {
  chooseNamed();
  view.log = null; // as each panel needs it, until it is chosen
  const place = byId('curve-charts');
  const vectors = vectorsOf(data.metrics);
  const entries = new Set(vectors.flatMap(([, names]) => names));
  const panels = data.metrics.filter((metric) => !entries.has(metric) && data.runs.some((run) => run.curves[metric]));
  const made = panels.map((metric) => addChart(place, {
    title: words(metric), options: () => curveOptions(metric), rows: () => curveRows(metric),
    label: () => curveLabel(metric), ready: (chart, one) => curveReady(chart, one, metric),
  }));
  const maps = [];
  for (const run of several ? data.runs.filter((one, index) => view.slots.has(index)).slice(0, 4) : data.runs) {
    maps.push(...vectors.map(([name, names]) => addVector(place, run, name, names)).filter(Boolean));
    for (const [name, matrix] of Object.entries(run.matrices)) addMatrix(place, run, name, matrix);
  }
  const redraw = () => { for (const one of [...made, ...maps]) one.update(); for (const one of made) if (one.chart) curveReady(one.chart, one, panels[made.indexOf(one)]); };
  curveControls(redraw);
  if (several) curveLegend(redraw);
  return redraw;
}

/** A confusion matrix: rows are labels, columns predictions; shades are shares of the row. */
function addMatrix(place, run, name, matrix) {
  const sums = matrix.map((row) => row.reduce((a, b) => a + (b ?? 0), 0) || 1);
  const cells = matrix.flatMap((row, label) => row.map((count, guess) => [guess, label, (100 * count) / sums[label], count]));
  const right = matrix.reduce((a, row, at) => a + row[at], 0) / sums.reduce((a, b) => a + b, 0);
  const classes = matrix.map((_, at) => String(at));
  addChart(place, {
    title: words(name), note: `${several ? `${run.name}, ` : ''}after the last epoch; shades: share of the label`,
    label: () => `${number(100 * right)} % on the diagonal`,
    rows: () => [['label', ...classes.map((one) => `predicted ${one}`)], matrix.map((row, at) => [`label ${at}`, ...row])],
    options: () => ({
      grid: { left: 26, right: 16, top: 8, bottom: 34, containLabel: true },
      xAxis: axis('predicted', { type: 'category', data: classes, splitLine: { show: false }, axisLabel: { color: color('soft'), fontSize: 11 } }),
      yAxis: axis('label', { type: 'category', data: classes, inverse: true, nameGap: 28, splitLine: { show: false }, axisLabel: { color: color('soft'), fontSize: 11 } }),
      visualMap: { show: false, min: 0, max: 100, dimension: 2, inRange: { color: [color('paper'), color('run-0')] } },
      tooltip: tooltip({ formatter: (item) => `label ${item.value[1]}, predicted ${item.value[0]}: <b>${number(item.value[3])}</b> (${number(item.value[2])} %)` }),
      series: [{
        type: 'heatmap', itemStyle: { borderColor: color('grid'), borderWidth: 1 },
        data: cells.map((value) => ({ value, label: { color: value[2] > 55 ? color('paper') : color('ink') } })),
        label: { show: matrix.length <= 12, formatter: (item) => (item.value[3] ? short(item.value[3]) : ''), fontSize: 11 },
      }],
    }),
  });
}

function curveControls(redraw) {
  const place = byId('curve-controls');
  const select = element('select', { onchange: (event) => { view.x = event.target.value; redraw(); } },
    Object.entries(X_NAMES).map(([value, name]) => element('option', { value }, name)));
  place.append(element('label', {}, 'Over', select));
  const kinds = Object.entries(KINDS).map(([kind, name]) => element('label', {},
    element('input', { type: 'checkbox', checked: view.kinds[kind], onchange: (event) => { view.kinds[kind] = event.target.checked; redraw(); } }), name));
  place.append(element('span', { class: 'group', role: 'group', 'aria-label': 'Lines' }, kinds));
  place.append(element('label', {}, element('input', { type: 'checkbox', onchange: (event) => { view.log = event.target.checked; redraw(); } }), 'logarithmic'));
  const said = element('output', {}, '0');
  place.append(element('label', {}, 'Smooth steps', element('input', {
    type: 'range', min: 0, max: 0.99, step: 0.01, value: 0, 'aria-label': 'Smoothing of every step',
    oninput: (event) => { view.smooth = Number(event.target.value); said.textContent = event.target.value; redraw(); },
  }), said));
  if (data.runs.some((run) => run.members)) byId('curves').insertBefore(element('p', { class: 'note' }, bandNote()), byId('curve-charts'));
  if (!touched()) place.append(element('span', {}, 'Drag over a chart to zoom, double-click to see all.'));
}

const bandNote = () => (several
  ? 'Of members: the line is their median, the band holds half of them.'
  : 'Of members: the line is their median, the darker band holds half of them, the lighter one all; the dotted line is the best one.');

/** A button for each run: those with a name first; choosing one gives it a line style or takes it. */
function curveLegend(redraw) {
  const place = byId('curve-legend');
  const rest = element('div', { class: 'legend' });
  const more = element('details', {}, element('summary', {}), rest);
  const button = (index) => {
    const slot = view.slots.get(index);
    return element('button', {
      type: 'button', class: 'key-button', 'aria-pressed': String(slot !== undefined), title: data.runs[index].name,
      onclick: () => {
        if (slot !== undefined) view.slots.delete(index);
        else if (freeSlot() !== null) view.slots.set(index, freeSlot());
        else { say(`At most ${STYLES} runs have a line style; take it from another first.`); return; }
        fill();
        redraw();
      },
    }, slot === undefined ? null : sample(slot), data.runs[index].name);
  };
  const fill = () => {
    const named = [...view.slots.keys()].sort((a, b) => view.slots.get(a) - view.slots.get(b));
    const others = data.runs.map((_, index) => index).filter((index) => !view.slots.has(index));
    more.firstChild.textContent = `${others.length} runs in grey: choose one to name it`;
    rest.replaceChildren(...others.map(button));
    place.replaceChildren(...named.map(button), ...(others.length > MOST_NAMED ? [] : others.map(button)));
    more.hidden = others.length <= MOST_NAMED;
  };
  place.after(more);
  fill();
}
