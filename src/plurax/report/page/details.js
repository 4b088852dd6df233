// --- Estimated beside measured ---------------------------------------------------------------------

function startEstimates() {
  const place = byId('estimate-charts');
  if (!place) return;
  const found = data.estimates.map((one, index) => [data.runs[index], one]).filter(([, one]) => one.seconds.length);
  if (found.length > 1) {
    addChart(place, {
      title: 'Seconds of a step', note: 'predicted and measured; on the line they are equal',
      options: () => againstOptions(found), label: () => `${found.length} runs`,
    });
  }
  for (const [run, one] of found.slice(0, 4)) {
    if (one.steps.length > 1) {
      addChart(place, {
        title: 'Seconds of a step, epoch by epoch', note: several ? run.name : '',
        options: () => secondsOptions(one), rows: () => [['step', 'measured seconds'], one.steps.map((step, at) => [step, one.seconds[at]])],
        label: () => `predicted ${duration(one.predicted.seconds)}, measured last ${duration(one.seconds[one.seconds.length - 1])}`,
      });
    }
  }
  for (const [run, one] of data.estimates.map((each, index) => [data.runs[index], each]).slice(0, 4)) {
    if (one.predicted.parts) addParts(place, run, one);
    if (one.predicted.peak) addMemory(place, run, one);
  }
}

function secondsOptions(one) {
  const style = lineStyle(0);
  return {
    grid: { left: 8, right: 84, top: 14, bottom: 30, containLabel: true },
    xAxis: axis('step', { type: 'value', min: 0, splitLine: { show: false }, axisLine: { show: true, lineStyle: { color: color('line') } } }),
    yAxis: axis('', { type: 'value', min: 0, axisLabel: { color: color('soft'), fontSize: 11, formatter: duration } }),
    tooltip: tooltip({ trigger: 'axis', formatter: (items) => `step ${number(items[0].value[0])}: <b>${duration(items[0].value[1])}</b>` }),
    series: [{
      type: 'line', data: one.steps.map((step, at) => [step, one.seconds[at]]), symbol: marker(0), symbolSize: 6, lineStyle: { ...style, width: 2 }, itemStyle: { color: style.color },
      endLabel: { show: true, formatter: 'measured', color: style.color, fontSize: 11, fontWeight: 600 },
      markLine: {
        silent: true, symbol: 'none', animation: false, data: [{ yAxis: one.predicted.seconds }],
        lineStyle: { color: color('run-1'), type: [6, 4], width: 2 }, label: { formatter: 'predicted', color: color('run-1'), fontWeight: 600, fontSize: 11 },
      },
    }],
  };
}

function againstOptions(found) {
  const points = found.map(([run, one]) => ({
    name: run.name, value: [one.predicted.seconds, one.seconds.reduce((a, b) => a + b, 0) / one.seconds.length],
  }));
  const all = points.flatMap((point) => point.value);
  const ends = [Math.min(...all) / 1.5, Math.max(...all) * 1.5];
  const scale = (name) => axis(name, { type: 'log', min: ends[0], max: ends[1], axisLabel: { color: color('soft'), fontSize: 11, formatter: duration, hideOverlap: true } });
  return {
    grid: { left: 26, right: 20, top: 14, bottom: 34, containLabel: true },
    xAxis: scale('predicted'), yAxis: { ...scale('measured'), nameGap: 48 },
    tooltip: tooltip({ formatter: (item) => `${escaped(item.name)}<br>predicted <b>${duration(item.value[0])}</b><br>measured <b>${duration(item.value[1])}</b>` }),
    series: [
      { type: 'line', data: [[ends[0], ends[0]], [ends[1], ends[1]]], symbol: 'none', silent: true, lineStyle: { color: color('soft'), type: [5, 4], width: 1.2 } },
      { type: 'scatter', data: points, symbolSize: 9, itemStyle: { color: color('run-0') }, label: { show: points.length <= 12, formatter: (item) => shortened(item.name), position: 'right', color: color('ink'), fontSize: 11 } },
    ],
  };
}

const PATTERNS = [
  { symbol: 'none' }, { symbol: 'rect', dashArrayX: [1, 0], dashArrayY: [2, 4], rotation: Math.PI / 4, symbolSize: 1 },
  { symbol: 'circle', dashArrayX: [[6, 6], [0, 6, 6, 0]], dashArrayY: [6, 0], symbolSize: 0.7 },
  { symbol: 'rect', dashArrayX: [1, 0], dashArrayY: [2, 5], rotation: -Math.PI / 4, symbolSize: 1 },
  { symbol: 'rect', dashArrayX: [1, 0], dashArrayY: [4, 4], symbolSize: 1 },
  { symbol: 'triangle', dashArrayX: [[8, 8]], dashArrayY: [9, 3], symbolSize: 0.8 },
];

/** Where the seconds of a step go, by the estimate, beside those measured. */
function addParts(place, run, one) {
  const seen = one.seconds.length ? one.seconds.reduce((a, b) => a + b, 0) / one.seconds.length : null;
  addStack(place, {
    title: 'Where a step spends its time', note: several ? run.name : '', kinds: Object.entries(one.predicted.parts),
    measured: seen, text: duration,
  });
}

/** What a device holds, predicted by kind beside what was measured, and the limit of the device. */
function addMemory(place, run, one) {
  const most = Math.max(one.predicted.peak, one.measured.peak ?? 0);
  addStack(place, {
    title: 'Memory of a device', note: [several ? run.name : '', one.limit ? `which has ${bytes(one.limit)}` : ''].filter(Boolean).join(', '),
    kinds: Object.entries(one.predicted.memory ?? { 'all of it': one.predicted.peak }), measured: one.measured.peak ?? null,
    text: bytes, max: one.limit && one.limit < 4 * most ? one.limit : undefined,
  });
}

/** Two bars: what was predicted, by kind, above what was measured. */
function addStack(place, { title, note, kinds, measured, text, max }) {
  const shown = kinds.filter(([, size]) => size > 0).sort((a, b) => b[1] - a[1]);
  const half = { barWidth: 26, type: 'bar', stack: 'all' };
  addChart(place, {
    title, note, kind: 'low', label: () => `Predicted: ${shown.map(([name, size]) => `${words(name)} ${text(size)}`).join(', ')}`,
    rows: () => [['', 'predicted'], shown.map(([name, size]) => [words(name), text(size)])],
    options: () => ({
      grid: { left: 8, right: 24, top: phone() ? 66 : 46, bottom: 24, containLabel: true },
      legend: { top: 0, left: 0, textStyle: { color: color('ink'), fontSize: 11 }, itemWidth: 16, itemHeight: 10, itemGap: 8, data: shown.map(([name]) => words(name)) },
      xAxis: axis('', { type: 'value', max, axisLabel: { color: color('soft'), fontSize: 11, formatter: text, hideOverlap: true } }),
      yAxis: axis('', { type: 'category', data: ['measured', 'predicted'], splitLine: { show: false }, axisLabel: { color: color('ink'), fontSize: 12 } }),
      tooltip: tooltip({ formatter: (item) => `${escaped(item.seriesName)}: <b>${text(item.value)}</b>` }),
      series: [
        ...shown.map(([name, size], at) => ({
          ...half, name: words(name), data: [null, size],
          itemStyle: { color: color(`run-${at % STYLES}`), borderColor: color('paper'), borderWidth: 1, decal: { color: color('paper'), ...PATTERNS[at % PATTERNS.length] } },
        })),
        { ...half, name: 'measured', data: [measured, null], itemStyle: { color: color('muted') } },
      ],
    }),
  });
}

// --- Uncertainty and calibration ---------------------------------------------------------------------

function startCalibration() {
  const place = byId('calibration-charts');
  if (!place) return;
  for (const found of data.calibrations) {
    const predictions = Object.entries(found.predictions ?? {}).filter(([, one]) => Array.isArray(one.confidence));
    const title = several ? found.run : '';
    if (predictions.length) {
      addChart(place, {
        title: 'Reliability', note: [title, 'below the diagonal: too sure; ± one standard error; hollow: under 10 examples'].filter(Boolean).join(': '),
        options: () => reliabilityOptions(predictions), rows: () => reliabilityRows(predictions),
        label: () => predictions.map(([name, one]) => `${name}: calibration error ${number(one.error)}`).join('; '),
      });
      addChart(place, { title: 'Examples by confidence', note: title, options: () => countOptions(predictions), label: () => predictions.map(([name]) => name).join(', ') });
    }
    for (const [name, parts] of Object.entries(found.uncertainty ?? {})) {
      if (!Array.isArray(parts.edges)) continue;
      addChart(place, {
        title: 'Uncertainty', note: `${several ? `${found.run}, ` : ''}${name}`,
        options: () => uncertaintyOptions(parts), label: () => `mean epistemic ${number(parts.epistemic?.mean)}, aleatoric ${number(parts.aleatoric?.mean)}`,
        rows: () => [[`more than (${parts.unit ?? ''})`, ...UNCERTAIN.filter((kind) => parts[kind]).map((kind) => `${kind}, % of examples`)], parts.edges.map((edge, at) => [edge, ...UNCERTAIN.filter((kind) => parts[kind]).map((kind) => shareAbove(parts[kind].count)[at])])],
      });
    }
  }
}

const legendOf = (names) => ({ top: 0, left: 0, type: 'scroll', textStyle: { color: color('ink'), fontSize: 12 }, itemWidth: 30, data: names, pageTextStyle: { color: color('soft') } });

const FEW = 10; // examples of a bin below which its accuracy says little: drawn hollow, off the line

function reliabilityOptions(predictions) {
  const series = predictions.flatMap(([name, one], slot) => {
    const style = lineStyle(slot);
    const all = one.confidence.map((x, at) => [x, one.accuracy[at], one.count[at]]).filter(([x, y]) => x != null && y != null);
    const bins = all.filter(([, , count]) => count >= FEW);
    const rare = all.filter(([, , count]) => count < FEW);
    return [
      { name, type: 'line', data: bins, symbol: marker(slot), symbolSize: 8, lineStyle: { ...style, width: 2 }, itemStyle: { color: style.color }, z: 3 },
      { name, type: 'scatter', data: rare, symbol: marker(slot), symbolSize: 6, itemStyle: { color: color('paper'), borderColor: style.color, borderWidth: 1.5 }, z: 3 },
      {
        name, type: 'custom', data: bins, encode: { x: 0, y: 1 }, silent: true, tooltip: { show: false }, z: 2, clip: true,
        renderItem: (params, api) => {
          const [x, y, count] = [api.value(0), api.value(1), api.value(2)];
          const away = Math.sqrt(Math.max(y * (1 - y), 0.25 / count) / count);
          const [top, end] = [api.coord([x, Math.min(1, y + away)]), api.coord([x, Math.max(0, y - away)])];
          const line = (x1, y1, x2, y2) => ({ type: 'line', shape: { x1, y1, x2, y2 }, style: { stroke: style.color, lineWidth: 1.2 } });
          return { type: 'group', children: [line(top[0], top[1], end[0], end[1]), line(top[0] - 4, top[1], top[0] + 4, top[1]), line(end[0] - 4, end[1], end[0] + 4, end[1])] };
        },
      },
    ];
  });
  const unit = (name, more) => axis(name, { type: 'value', min: 0, max: 1, ...more });
  return {
    legend: legendOf(predictions.map(([name]) => name)),
    grid: { left: 26, right: 18, top: 36, bottom: 32, containLabel: true },
    xAxis: unit('confidence'), yAxis: unit('accuracy', { nameGap: 36 }),
    tooltip: tooltip({ formatter: (item) => `${escaped(item.seriesName)}<br>confidence <b>${number(item.value[0])}</b>, accuracy <b>${number(item.value[1])}</b><br>${number(item.value[2])} examples` }),
    series: [{ type: 'line', data: [[0, 0], [1, 1]], symbol: 'none', silent: true, lineStyle: { color: color('soft'), type: [5, 4], width: 1.2 }, z: 1 }, ...series],
  };
}

function reliabilityRows(predictions) {
  const rows = predictions.flatMap(([name, one]) => one.confidence.map((x, at) => [name, x, one.accuracy[at], one.count[at]])).filter((row) => row[1] != null);
  return [['', 'confidence', 'accuracy', 'examples'], rows];
}

function countOptions(predictions) {
  const bins = predictions[0][1].count.length;
  return {
    legend: legendOf(predictions.map(([name]) => name)),
    grid: { left: 8, right: 18, top: 36, bottom: 32, containLabel: true },
    xAxis: axis('confidence', { type: 'category', data: Array.from({ length: bins }, (_, at) => `${number(at / bins)}–${number((at + 1) / bins)}`), splitLine: { show: false }, axisLabel: { color: color('soft'), fontSize: 10, hideOverlap: true } }),
    yAxis: axis('', { type: 'value' }),
    tooltip: tooltip({ trigger: 'axis' }),
    series: predictions.map(([name, one], slot) => ({ name, type: 'bar', data: one.count, itemStyle: { color: color(`run-${slot % STYLES}`), decal: { color: color('paper'), ...PATTERNS[slot % PATTERNS.length] } } })),
  };
}

const UNCERTAIN = ['total', 'aleatoric', 'epistemic'];

/** The share of examples, in percent, with more uncertainty than each edge. */
function shareAbove(counts) {
  const total = counts.reduce((a, b) => a + b, 0) || 1;
  let left = total;
  return [100, ...counts.map((count) => { left -= count; return (100 * left) / total; })];
}

function uncertaintyOptions(parts) {
  const kinds = UNCERTAIN.filter((kind) => parts[kind]);
  return {
    legend: legendOf(kinds),
    grid: { left: 26, right: 18, top: 36, bottom: 32, containLabel: true },
    xAxis: axis(parts.unit ?? '', { type: 'value', min: 0, max: 'dataMax', splitLine: { show: false }, axisLine: { show: true, lineStyle: { color: color('line') } } }),
    yAxis: axis('% of examples with more', { type: 'value', min: 0, max: 100, nameGap: 36 }),
    tooltip: tooltip({ trigger: 'axis', formatter: (items) => `more than ${number(items[0].value[0])} ${escaped(parts.unit ?? '')}<br>${items.map((item) => `${item.marker}${escaped(item.seriesName)}: <b>${number(item.value[1])} %</b>`).join('<br>')}` }),
    series: kinds.map((kind, slot) => {
      const style = lineStyle(slot);
      return {
        name: kind, type: 'line', symbol: 'none', data: shareAbove(parts[kind].count).map((share, at) => [parts.edges[at], share]),
        lineStyle: { ...style, width: 2 }, itemStyle: { color: style.color },
      };
    }),
  };
}
