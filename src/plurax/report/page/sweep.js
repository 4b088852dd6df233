// --- Sweeps: importance, parallel coordinates with a brush, each hyperparameter by itself ----------

const WORST_TO_BEST = ['low', 'middle', 'high'];

function startSweeps() {
  for (const [index, sweep] of data.sweeps.entries()) addSweep(sweep, index);
}

function addSweep(sweep, index) {
  const place = element('div', {});
  byId('sweeps').append(place);
  const title = sweep.left_out ? `${sweep.title}: the first ${sweep.rows.length}, ${sweep.left_out} left out` : sweep.title;
  place.append(element('h3', {}, `${title} (${sweep.rows.length} networks)`));
  const first = ['eval_accuracy', 'eval_loss', 'loss'].find((name) => sweep.metrics.includes(name)) ?? sweep.metrics[0];
  const state = { metric: first, rising: sweep.rising.includes(first), ranges: {}, charts: [] };
  const column = (name) => [...sweep.names, ...sweep.metrics].indexOf(name);
  const value = (row, name) => sweep.rows[row][column(name)];
  const columns = () => [...sweep.names, state.metric];

  const inside = (row) => columns().every((name) => {
    const ranges = state.ranges[name];
    return !ranges || !ranges.length || ranges.some(([a, b]) => {
      const at = categories(name) ? categories(name).indexOf(String(value(row, name))) : value(row, name);
      return at != null && at >= Math.min(a, b) && at <= Math.max(a, b);
    });
  });
  const categories = (name) => {
    if (sweep.rows.every((row) => row[column(name)] == null || typeof row[column(name)] === 'number')) return null;
    return [...new Set(sweep.rows.map((row) => String(row[column(name)])))].sort();
  };
  const better = (a, b) => {
    const [x, y] = [value(a, state.metric), value(b, state.metric)];
    if (x == null || y == null) return (x == null) - (y == null);
    return state.rising ? y - x : x - y;
  };

  // Controls: which metric, and in which direction it is better.
  const rising = element('select', { onchange: (event) => { state.rising = event.target.value === 'high'; refresh(true); } },
    element('option', { value: 'low' }, 'lower'), element('option', { value: 'high' }, 'higher'));
  const metric = element('select', {
    onchange: (event) => {
      state.metric = event.target.value;
      state.rising = sweep.rising.includes(state.metric);
      rising.value = state.rising ? 'high' : 'low';
      state.ranges = {};
      refresh(true);
    },
  }, sweep.metrics.map((name) => element('option', { value: name, selected: name === state.metric }, words(name))));
  rising.value = state.rising ? 'high' : 'low';
  const count = element('output', { 'aria-live': 'polite' });
  const reset = element('button', { type: 'button', onclick: () => { state.ranges = {}; refresh(true); } }, 'Show all');
  place.append(element('div', { class: 'controls' }, element('label', {}, 'Metric', metric), element('label', {}, 'better is', rising), reset, count));

  const importance = element('div', { class: 'scroll' });
  place.append(importance);
  const holder = element('div', { class: 'charts' });
  place.append(holder);
  const parallel = addChart(holder, {
    title: 'Parallel coordinates', note: 'drag along an axis to choose a range', kind: 'parallel',
    options: () => parallelOptions(sweep, state, columns(), column, categories, better),
    label: () => `One line for each of ${sweep.rows.length} networks, over ${columns().map(words).join(', ')}. Ranges can be given as numbers below.`,
    ready: (chart) => {
      chart.on('axisareaselected', () => {
        for (const [at, one] of chart.getOption().parallelAxis.entries()) {
          state.ranges[columns()[at]] = readRanges(chart, at, one);
        }
        shadeRanges(chart);
        refresh(false);
      });
      applyRanges();
      scrollBetweenAxes(chart, () => columns().length);
    },
  });
  const fields = element('fieldset', { class: 'ranges' });
  place.append(element('details', {}, element('summary', {}, 'Choose ranges by numbers'), fields));
  const best = element('div', { class: 'chosen-rows scroll', tabindex: '0' });
  place.append(best);
  place.append(element('h3', {}, 'Each hyperparameter by itself'));
  const small = element('div', { class: 'charts small' });
  place.append(small);
  for (const name of sweep.names) {
    state.charts.push(addChart(small, {
      title: words(name), kind: 'low', options: () => scatterOptions(sweep, state, name, value, categories, inside),
      label: () => `${words(state.metric)} of each network over ${words(name)}`,
    }));
  }

  /** Show the ranges that are chosen in the parallel coordinates. */
  function applyRanges() {
    if (!parallel.chart) return;
    for (const [at, name] of columns().entries()) {
      parallel.chart.dispatchAction({ type: 'axisAreaSelect', parallelAxisIndex: at, intervals: state.ranges[name] ?? [] }, { silent: true });
    }
    shadeRanges(parallel.chart);
  }

  function refresh(redraw) {
    if (redraw) { parallel.update(); applyRanges(); fillFields(); }
    const rows = sweep.rows.map((_, row) => row).filter(inside);
    count.textContent = rows.length === sweep.rows.length ? `all ${rows.length} networks` : `${rows.length} of ${sweep.rows.length} networks chosen`;
    best.replaceChildren(bestRows(sweep, state, rows.sort(better).slice(0, 8), value));
    importance.replaceChildren(importanceTable(sweep, state));
    for (const one of state.charts) one.update();
  }

  /** Two numbers for each axis: the same as brushing it, by keyboard. */
  function fillFields() {
    fields.replaceChildren(...columns().filter((name) => !categories(name)).map((name) => {
      const all = sweep.rows.map((row) => row[column(name)]).filter((one) => one != null);
      const [low, high] = [Math.min(...all), Math.max(...all)];
      const range = state.ranges[name]?.[0] ?? [low, high];
      const field = (end) => element('input', { type: 'number', step: 'any', value: range[end], 'aria-label': `${words(name)}, ${end ? 'at most' : 'at least'}` });
      const inputs = [field(0), field(1)];
      const change = () => {
        const [a, b] = inputs.map((input) => Number(input.value));
        state.ranges[name] = a <= low && b >= high ? [] : [[a, b]];
        applyRanges();
        refresh(false);
      };
      for (const input of inputs) input.addEventListener('change', change);
      return element('div', { class: 'range' }, element('b', {}, words(name)), inputs[0], ' to ', inputs[1]);
    }));
  }
  place.dataset.sweep = index;
  fillFields();
  refresh(false);
}

/** The ranges that are brushed on an axis. */
function readRanges(chart, at) {
  const model = chart.getModel().getComponent('parallelAxis', at);
  return (model.activeIntervals ?? []).map((range) => [...range].sort((a, b) => a - b));
}

const UPRIGHT = { top: 34, bottom: 16 };
const FINGER = 26; // pixels from an axis within which a finger means the axis

/** Of a chart with upright axes: a finger that is on no axis scrolls the page. */
function scrollBetweenAxes(chart, count) {
  const box = chart.getDom();
  const pass = (event) => {
    if (!phone()) return;
    const point = event.touches ? event.touches[0] : event;
    const y = point.clientY - box.getBoundingClientRect().top - UPRIGHT.top;
    const apart = (box.clientHeight - UPRIGHT.top - UPRIGHT.bottom) / Math.max(1, count() - 1);
    if (Math.abs(y - apart * Math.round(y / apart)) > FINGER) event.stopPropagation();
  };
  // Once: the chart is created anew in the same box when the theme changes.
  if (!box.dataset.scrolls) box.addEventListener('touchstart', pass, { capture: true, passive: true });
  box.dataset.scrolls = 'true';
}

/** Ranges as translucent as the one being dragged: ECharts draws the earlier ones over the lines. */
function shadeRanges(chart) {
  for (const one of chart.getZr().storage.getDisplayList(true)) {
    if (one.name === 'main' && one.type === 'rect') {
      one.setStyle({ fill: color('accent'), stroke: color('accent'), lineWidth: 1, opacity: 0.25 });
    }
  }
}

function parallelOptions(sweep, state, columns, column, categories, better) {
  const upright = phone();
  const order = sweep.rows.map((_, row) => row).sort(better);
  const ranks = new Map(order.map((row, place) => [row, place]));
  const shown = order.filter((row) => sweep.rows[row][column(state.metric)] != null).reverse(); // the best is drawn last
  const most = Math.max(1, shown.length - 1);
  const [low, middle, high] = WORST_TO_BEST.map(color);
  return {
    parallel: upright ? { layout: 'vertical', ...UPRIGHT, left: 20, right: 24 } : { top: 48, bottom: 22, left: 14, right: 64 },
    parallelAxis: columns.map((name, dim) => {
      const texts = categories(name);
      const numbers = texts ? [] : sweep.rows.map((row) => row[column(name)]).filter((one) => one != null);
      const log = sweep.logs.includes(name) || (name === state.metric && spansDecades(numbers));
      return {
        dim, name: `${words(name)}${log ? ' (log)' : ''}`, type: texts ? 'category' : log ? 'log' : 'value', data: texts ?? undefined,
        ...(texts ? {} : log ? { min: tidy(Math.min(...numbers), -1), max: tidy(Math.max(...numbers), 1) } : { scale: true }),
        nameLocation: upright ? 'start' : 'end', nameGap: upright ? 6 : 18, realtime: true,
        nameTextStyle: { color: color('ink'), fontSize: 12, fontWeight: 600, backgroundColor: color('paper'), ...(upright ? { align: 'left', verticalAlign: 'bottom', padding: [2, 4, 12, 0] } : dim === 0 ? { align: 'left' } : {}) },
        axisLine: { lineStyle: { color: color('soft') } }, axisTick: { lineStyle: { color: color('soft') } },
        axisLabel: { color: color('ink'), fontSize: 11, formatter: texts ? undefined : short, textBorderColor: color('paper'), textBorderWidth: 3 },
        areaSelectStyle: { width: upright ? 26 : 22, borderWidth: 1, borderColor: color('accent'), color: color('accent'), opacity: 0.25 },
      };
    }),
    tooltip: tooltip({ show: false }),
    visualMap: { show: false, type: 'continuous', min: 0, max: 1, dimension: columns.length, inRange: { color: [low, middle, high] } },
    series: [{
      type: 'parallel', smooth: 0, progressive: 0, inactiveOpacity: 0.04, activeOpacity: 0.75,
      lineStyle: { width: shown.length > 300 ? 1 : 1.4, opacity: shown.length > 300 ? 0.35 : 0.55 },
      data: shown.map((row, place) => ({
        name: sweep.labels[row],
        value: [...columns.map((name) => sweep.rows[row][column(name)]), 1 - ranks.get(row) / most],
        lineStyle: place === shown.length - 1 ? { width: 4, opacity: 1 } : undefined,
      })),
    }],
  };
}

function spansDecades(numbers) {
  const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
  const middle = [...numbers].sort((a, b) => a - b)[Math.floor(numbers.length / 2)];
  return low > 0 && high > 30 * low && middle < 0.2 * high;
}

/** The next number with one digit below (-1) or above (1). */
function tidy(value, side) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return Number(((side < 0 ? Math.floor(value / unit) : Math.ceil(value / unit)) * unit).toPrecision(2));
}

function importanceTable(sweep, state) {
  const found = sweep.importance[state.metric];
  const order = sweep.names.map((_, at) => at).sort((a, b) => found[b][0] - found[a][0]);
  const rows = order.map((at) => {
    const [share, direction] = found[at];
    const meter = element('span', { class: 'meter' });
    meter.style.width = `${Math.round(180 * share)}px`;
    const text = element('span', {}, meter, ` ${Math.round(100 * share)} %`);
    const way = direction == null ? '–' : Math.abs(direction) < 0.15 ? 'no direction'
      : `${direction > 0 ? '↑ rises' : '↓ falls'} with it (${direction > 0 ? '+' : '−'}${Math.abs(direction).toFixed(2)})`;
    return [words(sweep.names[at]), text, way];
  });
  const made = table(['hyperparameter', `explains of ${words(state.metric)}`, 'the metric'], rows);
  return element('div', {}, element('p', { class: 'note' }, 'Importance: the share of the metric’s ranks that a hyperparameter explains by itself.'), made);
}

function bestRows(sweep, state, rows, value) {
  const names = [...sweep.names, state.metric, ...sweep.metrics.filter((name) => name !== state.metric).slice(0, 3)];
  const made = table(['best of the chosen', ...names.map(words)], rows.map((row) => [sweep.labels[row], ...names.map((name) => value(row, name))]));
  return made;
}

function scatterOptions(sweep, state, name, value, categories, inside) {
  const texts = categories(name);
  const rows = sweep.rows.map((_, row) => row).filter((row) => value(row, state.metric) != null && value(row, name) != null);
  const points = rows.map((row) => ({
    value: [texts ? String(value(row, name)) : value(row, name), value(row, state.metric)], name: sweep.labels[row],
    itemStyle: inside(row) ? { opacity: 0.75 } : { opacity: 0.1 },
  }));
  const numbers = rows.map((row) => value(row, state.metric));
  return {
    grid: { left: 8, right: 14, top: 12, bottom: 30, containLabel: true },
    xAxis: axis(`${words(name)}${sweep.logs.includes(name) ? ' (log)' : ''}`, {
      type: texts ? 'category' : sweep.logs.includes(name) ? 'log' : 'value', scale: true, data: texts ?? undefined, splitLine: { show: false },
      ...(texts ? { axisLabel: { color: color('soft'), fontSize: 11 } } : sweep.logs.includes(name) ? decades(rows.map((row) => value(row, name))) : {}),
      axisLine: { show: true, lineStyle: { color: color('line') } },
    }),
    yAxis: axis('', { type: spansDecades(numbers) ? 'log' : 'value', scale: true }),
    tooltip: tooltip({ formatter: (item) => `${escaped(item.name)}<br>${escaped(words(name))} <b>${number(item.value[0])}</b><br>${escaped(words(state.metric))} <b>${number(item.value[1])}</b>` }),
    series: [{ type: 'scatter', symbolSize: rows.length > 300 ? 5 : 7, data: points, itemStyle: { color: color('run-0') } }],
  };
}
