// --- The page's data, elements, colours ---------------------------------------------------------

const data = JSON.parse(document.getElementById('data').textContent);
const root = document.documentElement;
const byId = (id) => document.getElementById(id);

/** An element with attributes and children; texts become text nodes, never HTML. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value == null) continue;
    if (name.startsWith('on')) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? '' : value);
  }
  made.append(...children.flat().filter((child) => child != null));
  return made;
}

const escaped = (text) =>
  String(text).replace(/[&<>"']/g, (letter) => `&#${letter.charCodeAt(0)};`);
const color = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
const words = (name) => name.replaceAll('_', ' ');
const touched = () => matchMedia('(pointer: coarse)').matches;
const phone = () => window.innerWidth < 640;
const say = (text) => { byId('said').textContent = text; };

/** A number to four digits. */
function number(value) {
  if (value == null || Number.isNaN(value)) return '–';
  if (typeof value !== 'number') return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e15) return value.toLocaleString('en');
  if (size >= 1e5 || (size < 1e-3 && size > 0)) return value.toExponential(2).replace('e+', 'e');
  return String(Number(value.toPrecision(4)));
}

/** A number for the tick of an axis. */
function short(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return `${Number((value / 1e9).toPrecision(3))}G`;
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(3))}M`;
  if (size >= 1e4) return `${Number((value / 1e3).toPrecision(3))}k`;
  if (size > 0 && size < 1e-3) return value.toExponential(0).replace('e+', 'e');
  return String(Number(value.toPrecision(4)));
}

function bytes(value) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let unit = 0;
  while (Math.abs(value) >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${unit ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

function duration(value) {
  if (value < 1) return `${Number((1000 * value).toPrecision(3))} ms`;
  if (value < 120) return `${Number(value.toPrecision(3))} s`;
  const minutes = Math.round(value / 60);
  return minutes < 120 ? `${minutes} min` : `${Number((minutes / 60).toPrecision(3))} h`;
}

// What tells lines apart beside their colour: dashes and markers.
const DASHES = ['solid', [7, 3], [2, 2.5], [9, 3, 2, 3], [12, 4], [4, 2, 1.5, 2, 1.5, 2], [3, 4], [14, 3, 3, 3]];
const MARKERS = ['circle', 'rect', 'triangle', 'diamond', 'pin', 'arrow', 'roundRect', 'emptyCircle'];
const STYLES = DASHES.length;
const lineStyle = (slot) => ({ color: color(`run-${slot % STYLES}`), type: DASHES[slot % STYLES] });
const marker = (slot) => MARKERS[slot % STYLES];

/** A short piece of a line with its dashes and marker, for a legend. */
function sample(slot) {
  const made = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
  const dash = DASHES[slot % STYLES];
  const stroke = `var(--run-${slot % STYLES})`;
  const attributes = { width: 34, height: 12, 'aria-hidden': 'true' };
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  const line = document.createElementNS('http://www.w3.org/2000/svg', 'line');
  const drawn = { x1: 1, x2: 33, y1: 6, y2: 6, 'stroke-width': 2.5,
    'stroke-dasharray': dash === 'solid' ? 'none' : dash.join(' ') };
  for (const [name, value] of Object.entries(drawn)) line.setAttribute(name, value);
  line.style.stroke = stroke;
  made.append(line);
  return made;
}

// --- Charts: ECharts runs once the first one comes into view --------------------------------------

let library = null;

/** ECharts, which stands in the page as text until then. */
function loadLibrary() {
  if (library === null) {
    const script = element('script');
    script.textContent = byId('echarts').textContent;
    document.head.append(script);
    library = globalThis.echarts;
  }
  return library;
}

const charts = [];
const waiting = [];

/** Draw what waits one after another, so that the page answers in between. */
function drawNext() {
  waiting.shift()?.draw();
  if (waiting.length) setTimeout(drawNext);
}

const visible = 'IntersectionObserver' in window
  ? new IntersectionObserver((entries) => {
    const seen = entries.filter((entry) => entry.isIntersecting).map((entry) => entry.target);
    if (!waiting.length && seen.length) setTimeout(drawNext);
    waiting.push(...seen);
  }, { rootMargin: '200px' })
  : null;

/**
 * Add a chart to a place in the page; it is drawn when it is scrolled into view, and again when the
 * theme or its options change. `options()` returns ECharts' options, `ready(chart)` adds handlers,
 * `rows()` the same numbers as a table.
 */
function addChart(place, { title, note, kind = '', options, ready, rows, label }) {
  const box = element('div', { class: `chart ${kind}`, role: 'img', tabindex: '0' });
  const caption = element('figcaption', {}, title, note ? element('small', {}, ` ${note}`) : null);
  const figure = element('figure', { class: kind === 'parallel' ? 'wide' : '' }, caption, box);
  place.append(figure);
  const one = { box, figure, chart: null, cursor: -1 };
  one.describe = () => box.setAttribute('aria-label', label ? `${title}. ${label()}` : title);
  one.draw = () => {
    if (one.chart) return;
    if (visible) visible.unobserve(box);
    one.chart = loadLibrary().init(box, null, { renderer: 'canvas' });
    one.update();
    if (ready) ready(one.chart, one);
    root.dataset.drawn = Number(root.dataset.drawn || 0) + 1;
  };
  one.update = () => {
    one.describe();
    if (one.chart) one.chart.setOption({ ...frame(), ...options() }, { notMerge: true });
  };
  one.restyle = () => {
    if (!one.chart) return;
    one.chart.dispose();
    one.chart = null;
    one.draw();
  };
  box.draw = one.draw;
  if (rows) figure.append(asTable(rows));
  one.describe();
  charts.push(one);
  if (visible) visible.observe(box);
  else one.draw();
  return one;
}

/** A chart's numbers as a table, computed when it is opened. */
function asTable(rows) {
  const holder = element('div', { class: 'scroll tall', tabindex: '0' });
  return element('details', {
    ontoggle: (event) => { if (event.target.open) holder.replaceChildren(table(...rows())); },
  }, element('summary', {}, 'Numbers'), holder);
}

function table(columns, rows) {
  const cell = (value, place) => element(place ? 'td' : 'th',
    { class: typeof value === 'number' ? 'number' : null, scope: place ? null : 'row' },
    value instanceof Node ? value : number(value));
  const right = (place) => (rows.some((row) => typeof row[place] === 'number') ? 'number' : null);
  return element('table', {},
    element('thead', {}, element('tr', {}, columns.map((name, place) => element('th', { scope: 'col', class: place ? right(place) : null }, name)))),
    element('tbody', {}, rows.map((row) => element('tr', {}, row.map(cell)))));
}

/** What all charts share: no animation, our font and colours. */
function frame() {
  return {
    animation: false,
    textStyle: { fontFamily: 'system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif', color: color('ink') },
    backgroundColor: 'transparent',
    aria: { enabled: false },
  };
}

function axis(name, more = {}) {
  return {
    name, nameLocation: 'middle', nameGap: 26, nameTextStyle: { color: color('soft'), fontSize: 12 },
    axisLine: { show: false }, axisTick: { show: false },
    axisLabel: { color: color('soft'), fontSize: 11, formatter: short, hideOverlap: true },
    splitLine: { lineStyle: { color: color('grid') } }, minorSplitLine: { show: false },
    ...more,
  };
}

function tooltip(more = {}) {
  return {
    backgroundColor: color('paper'), borderColor: color('line'), borderWidth: 1, padding: [6, 10],
    textStyle: { color: color('ink'), fontSize: 12 }, confine: true, transitionDuration: 0, ...more,
  };
}

window.addEventListener('resize', () => { for (const one of charts) if (one.chart) one.chart.resize(); });

// --- Light and dark -------------------------------------------------------------------------------

const THEMES = { auto: 'Theme: as the system', light: 'Theme: light', dark: 'Theme: dark' };

function setTheme(name) {
  root.dataset.theme = name;
  byId('theme').textContent = THEMES[name];
  try { localStorage.setItem('plurax-theme', name); } catch { /* a page opened from a file may not */ }
  for (const one of charts) one.restyle();
}

function startTheme() {
  let kept = 'auto';
  try { kept = localStorage.getItem('plurax-theme') || 'auto'; } catch { /* as above */ }
  const button = byId('theme');
  button.hidden = false;
  const names = Object.keys(THEMES);
  button.addEventListener('click', () => setTheme(names[(names.indexOf(root.dataset.theme) + 1) % names.length]));
  setTheme(kept in THEMES ? kept : 'auto');
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => setTheme(root.dataset.theme));
}
