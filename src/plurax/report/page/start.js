// --- Tables, navigation, start -----------------------------------------------------------------------

/** Sort a table by the column whose heading is chosen; empty cells come last. */
function startTables() {
  for (const made of document.querySelectorAll('table.sortable')) {
    const heads = [...made.tHead.rows[0].cells];
    heads.forEach((head, place) => head.querySelector('button')?.addEventListener('click', () => {
      const rising = head.getAttribute('aria-sort') !== 'ascending';
      for (const other of heads) other.setAttribute('aria-sort', 'none');
      head.setAttribute('aria-sort', rising ? 'ascending' : 'descending');
      const key = (row) => row.cells[place].dataset.key;
      const rows = [...made.tBodies[0].rows].sort((a, b) => {
        const [x, y] = [key(a), key(b)];
        if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
        const [m, n] = [Number(x), Number(y)];
        const order = Number.isNaN(m) || Number.isNaN(n) ? x.localeCompare(y) : m - n;
        return rising ? order : -order;
      });
      made.tBodies[0].append(...rows);
    }));
  }
}

function startFilter() {
  const place = byId('run-filter');
  const made = document.querySelector('#runs table');
  if (!place || !made || data.runs.length < 9) return;
  place.hidden = false;
  made.parentElement.classList.add('tall');
  place.querySelector('input').addEventListener('input', (event) => {
    const wanted = event.target.value.toLowerCase();
    let shown = 0;
    for (const row of made.tBodies[0].rows) {
      row.hidden = !row.dataset.run.toLowerCase().includes(wanted);
      shown += !row.hidden;
    }
    place.querySelector('output').textContent = wanted ? `${shown} shown` : '';
  });
}

/** Mark in the navigation which part of the page is in view. */
function startNavigation() {
  const links = new Map([...document.querySelectorAll('nav a')].map((link) => [link.hash.slice(1), link]));
  const update = () => {
    let now = null;
    for (const id of links.keys()) if (byId(id).getBoundingClientRect().top < 140) now = id;
    for (const [id, link] of links) {
      if (id === (now ?? links.keys().next().value)) link.setAttribute('aria-current', 'true');
      else link.removeAttribute('aria-current');
    }
  };
  let waiting = false;
  addEventListener('scroll', () => {
    if (!waiting) requestAnimationFrame(() => { waiting = false; update(); });
    waiting = true;
  }, { passive: true });
  update();
}

startTheme();
startTables();
startFilter();
startNavigation();
// The text is painted first; charts follow.
requestAnimationFrame(() => setTimeout(() => {
  startCurves();
  startSweeps();
  startEstimates();
  startCalibration();
  root.dataset.ready = 'true';
}));
