'use strict';
(() => {
// Texts of a log reach the document only as text nodes and attribute values, never as HTML.
const data = JSON.parse(document.getElementById('data').textContent,  // without the names that each object inherits, such as toString
  (_, value) => value && typeof value === 'object' && !Array.isArray(value) ? Object.assign(Object.create(null), value) : value);
const runs = data.runs, many = runs.length > 1;
let xAxis = 'step';
const fill = (node, attributes, children) => {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === 'function') node.addEventListener(name, value);
    else if (value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat(9).filter(child => child || child === 0));
  return node;
};
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS('http://www.w3.org/2000/svg', tag), attributes, children);
const digits = new Intl.NumberFormat('en', {maximumSignificantDigits: 4});
const compact = new Intl.NumberFormat('en', {notation: 'compact', maximumSignificantDigits: 3});
const num = v => v !== 0 && (Math.abs(v) >= 1e7 || Math.abs(v) < 1e-4) ? v.toExponential(1) :
  Math.abs(v) >= 1e4 ? Math.round(v).toLocaleString('en') : digits.format(v);
const show = v => v === null || v === undefined ? '–' : typeof v === 'number' ? num(v) : typeof v === 'string' ? v : JSON.stringify(v);
const colour = name => getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim();
const dashOf = i => [[], [7, 4], [2, 3]][Math.floor(i / 7) % 3];
const name = (rank, role) => role || (Number.isInteger(rank) ? 'rank ' + rank : 'launcher');
const events = (run, ...kinds) => run.events.filter(event => kinds.includes(event.event));
const startOf = run => events(run, 'start').find(each => each.world_size) || events(run, 'start')[0] || {};
const endOf = run => events(run, 'end').findLast(each => each.scope === 'job') || events(run, 'end').at(-1);
const add = list => list.reduce((a, b) => a + b, 0);
const distinct = list => [...new Set(list)];
const stepName = runs.every(run => run.cmd === 'rl') ? 'episode' : 'step';
/** Adds a section, unless it is empty. Lines of a damaged log may not have the fields that it needs. */
const section = (title, make) => {
  let content;
  try { content = [make()].flat(9).filter(Boolean); } catch (error) { content = [note(`Cannot be drawn: ${error.message}`)]; }
  if (content.length) document.body.append(el('section', {}, el('h2', {}, title), content));
};
/** Calls `draw(width)` now and whenever the width of `host` changes. */
const fit = (host, draw) => {
  new ResizeObserver(() => host.clientWidth > 0 && draw(Math.floor(host.clientWidth))).observe(host);
  return host;
};
const note = text => text && el('p', {class: 'note'}, text);
const card = (title, ...content) => el('figure', {class: 'card'}, title && el('h3', {}, title), ...content);
/** Returns a table that scrolls. A column is [title, function of a row, class]; columns without a value are left out. */
const table = (caption, columns, rows) => {
  const used = columns.filter(([, cell]) => rows.some(row => !['', '–'].includes(cell(row))));
  return el('div', {class: 'scroll', tabindex: 0, role: 'region', 'aria-label': caption}, el('table', {},
    el('thead', {}, el('tr', {}, used.map(([title, , kind]) => el('th', {scope: 'col', class: kind}, title)))),
    el('tbody', {}, rows.map(row => el('tr', {}, used.map(([, cell, kind]) => el('td', {class: kind}, cell(row))))))));
};
const field = (title, key, kind) => [title, each => show(each[key]), kind];
const number = (title, cell) => [title, each => show(cell(each)), 'n'];
/** Returns a closed section whose content is made when it is opened. */
const later = (title, make) => {
  const box = el('details', {toggle: () => box.children.length === 1 && box.append(make())}, el('summary', {}, title));
  return box;
};

// Runs are named by the options in which they differ, or else by their files.
const unlike = distinct(runs.flatMap(run => Object.keys(run.config))).filter(key =>
  !['log_interval', 'checkpoint', 'resume', 'keep', 'trace'].includes(key) && distinct(runs.map(run => JSON.stringify(run.config[key]))).length > 1);
const file = run => (run.files[0] || '').replace(/^.*\//, '').replace(/\.jsonl?(\.gz)?$/, '');
const names = [run => many ? unlike.map(key => `${key} ${show(run.config[key])}`).join(', ') : run.cmd || file(run), file, (run, i) => `${i + 1}: ${file(run)}`.slice(0, 39)]
  .map(way => runs.map(way)).find(list => distinct(list).length === list.length && list.every(each => each && each.length < 40));
runs.forEach((run, i) => Object.assign(run, {name: names[i], colour: `c${i % 7}`, dash: dashOf(i)}));

// ---- charts ----

/** Returns a function that returns the x of a row of a table. */
const xOf = (run, t) => {
  const column = title => t.columns[title] || [];
  const perEpoch = run.tables.flatMap(each => each.event === 'epoch' && each.columns.steps || []).reduce((a, b) => Math.max(a, b), 0);
  if (xAxis === 'time') return i => column('t')[i];
  if (xAxis === 'epoch') return i => t.event === 'step' && perEpoch ? column('step')[i] / perEpoch : column('epoch')[i];
  // The steps of the epochs are counted from the latest loaded checkpoint, or from the latest restart of several ranks.
  const origins = events(run, 'checkpoint', 'restart').filter(each => each.action === 'loaded' || each.ranks?.length > 1);
  let sum = 0, last;
  const sums = t.event === 'epoch' ? column('steps').map((steps, i) => {
    const origin = origins.findLast(each => each.t <= column('t')[i]);
    if (origin !== last) sum = (last = origin)?.step || 0;
    return sum += steps;
  }) : t.columns.step || t.columns.episode;
  return i => sums?.[i];
};
/**
 * Returns the mean of ranks, each a list of [x, y], in at most 300 ranges of x. If a rank has no point in a range, the mean has its
 * latest earlier value, unless the rank has no later point either.
 */
const meanOf = ranks => {
  const xs = ranks.flatMap(points => points.map(([x]) => x)), low = xs.reduce((a, b) => Math.min(a, b), Infinity);
  const width = xs.reduce((a, b) => Math.max(a, b), low) - low, most = Math.min(300, Math.max(...ranks.map(points => points.length)));
  const bins = [...Array(most)].map(() => ({xs: [], ys: []}));
  for (const points of ranks) {
    const own = bins.map(() => []);
    for (const [x, y] of points) {
      const at = Math.min(bins.length - 1, Math.floor((x - low) / width * bins.length) || 0);
      bins[at].xs.push(x);
      own[at].push(y);
    }
    let y;
    own.slice(0, own.findLastIndex(each => each.length) + 1).forEach((list, i) =>
      (list.length || y !== undefined) && bins[i].ys.push(y = list.length ? add(list) / list.length : y));
  }
  return bins.filter(bin => bin.xs.length).map(({xs, ys}) => [add(xs) / xs.length, add(ys) / ys.length]);
};
/** Returns the series of a column: one for each rank, or the mean of each run if there are several runs or many ranks. */
const series = (event, column, style = {}) => runs.flatMap(run => {
  const tables = run.tables.filter(t => t.event === event && t.columns[column]).sort((a, b) => a.rank - b.rank);
  const groups = new Map();  // of points, for each series
  for (const t of tables) {
    const own = 'num_split' in t ? 'num_split ' + t.num_split : event === 'eval' ? `evaluation (${t.set})` : name(t.rank, t.role);
    const key = many ? run.name + ('num_split' in t ? ', ' + own : '') : tables.length > 8 ? `mean of ${tables.length}` : own, x = xOf(run, t);
    groups.set(key, [...groups.get(key) || [], t.columns[column].map((y, i) => [x(i), y]).filter(([at, y]) => y !== null && Number.isFinite(at))]);
  }
  return [...groups].map(([label, list], i) => ({label, width: 1.5, colour: many ? run.colour : `c${i % 7}`, dash: many ? run.dash : dashOf(i),
    values: new Map(list.length > 1 && event !== 'eval' ? meanOf(list) : list.flat()), ...style}));
});
const whole = [...Array(30).keys()].flatMap(e => [1, 2, 5].map(n => n * 10 ** e));
/** Returns a chart, or null if no series has points. `ticks` are names of the x values 0, 1, 2, … */
const chart = (title, all, hint = '', {x = {time: 'seconds', epoch: 'epoch'}[xAxis] || stepName, ticks = null} = {}) => {
  all = all.filter(each => each.values.size);
  if (!all.length) return null;
  const xs = distinct(all.flatMap(each => [...each.values.keys()])).sort((a, b) => a - b);
  const ys = all.map(each => xs.map(at => each.values.has(at) ? each.values.get(at) : null));
  const tick = v => ticks ? ticks[v] ?? '' : num(v);
  const summary = `${title} by ${x}. ` + all.slice(0, 12).map(each => {
    const list = [...each.values.values()];
    return `${each.label}: ${list.length} points, first ${num(list[0])}, last ${num(list.at(-1))}, ` +
      `smallest ${num(list.reduce((a, b) => Math.min(a, b)))}, largest ${num(list.reduce((a, b) => Math.max(a, b)))}`;
  }).join('; ') + '.';
  const plot = el('div', {class: 'plot', role: 'img', 'aria-label': summary, 'data-points': all.reduce((sum, each) => sum + each.values.size, 0)});
  const keys = el('div', {});
  const line = {stroke: colour('line'), width: 1}, axis = {stroke: colour('dim'), grid: line, ticks: line, font: '12px system-ui, sans-serif'};
  let u = null;
  const draw = width => {
    if (u) return u.setSize({width, height: 240});
    u = new uPlot({width, height: 240, scales: {
      x: {time: false, range: ticks ? [-0.3, ticks.length - 0.7] : undefined},
      y: {range: (_, low, high) => low < high ? uPlot.rangeNum(low, high, 0.1, true) : [Math.min(0, 2 * low), Math.max(0, 2 * low) || 1]}},
      // A series has points at some x only: the legend shows its latest one.
      cursor: {y: false, dataIdx: (_, s, i) => { while (s && i > 0 && ys[s - 1][i] === null) --i; return i; }},
      legend: {mount: (_, box) => keys.append(box), markers: {dash: (_, s) => s && all[s - 1].dash.length ? 'dashed' : 'solid'}},
      axes: [{...axis, label: x, labelSize: 18, labelFont: axis.font, size: 32, incrs: x === 'seconds' ? undefined : whole, values: (_, at) => at.map(tick)},
        {...axis, size: 60, values: (_, at) => at.map(v => Math.abs(v) >= 1e4 ? compact.format(v) : num(v))}],
      series: [{label: x, value: (_, v) => v === null ? '' : tick(v)}, ...all.map(each => ({label: each.label, stroke: colour(each.colour), width: each.width,
        dash: each.dash, spanGaps: true, value: (_, v) => typeof v === 'number' ? num(v) : '',
        points: {show: each.values.size <= 40, size: 5, fill: colour(each.colour)}}))]}, [xs, ...ys], plot);
    keys.querySelectorAll('.u-series:not(:first-child) th').forEach(key => fill(key, {role: 'button', tabindex: 0, 'aria-pressed': 'true',
      click: () => key.setAttribute('aria-pressed', String(!key.parentNode.classList.contains('u-off'))),
      keydown: event => [' ', 'Enter'].includes(event.key) && (event.preventDefault(), key.click())}, []));
  };
  const every = Math.ceil(xs.length / 200);
  return card(title, note(hint), fit(plot, draw), keys, later('Data as a table' + (every > 1 ? `, one row in ${every}` : ''), () =>
    table(title, [number(x, i => tick(xs[i])), ...all.map((each, s) => number(each.label, i => ys[s][i]))], [...xs.keys()].filter(i => i % every === 0))));
};
const columnsOf = event => distinct(runs.flatMap(run => run.tables.filter(t => t.event === event).flatMap(t => Object.keys(t.columns))));
const training = () => {
  const strong = many ? {width: 2.5} : {width: 2.5, colour: 'fg'};
  const own = columnsOf('eval').filter(each => !['t', 'step', 'epoch', 'loss', 'samples', 'words', 'lr', 'perplexity'].includes(each));
  const rates = ['step', 'episode'].flatMap(event => columnsOf(event).filter(each => /^(?!requests).*_per_s$/.test(each)).map(each => [event, each]));
  const epochs = runs.every(run => run.tables.every(t => t.event !== 'step' || t.lines < 3)) && columnsOf('epoch').length > 0;
  const varies = runs.some(run => run.cmd === 'rnn' || distinct(run.tables.flatMap(t => t.event === 'step' && t.columns.lr || [])).length > 1);
  const levels = series('episode', 'running_reward').flatMap((each, i) => runs[i]?.config.threshold ?
    [{label: 'threshold', width: 1, colour: 'dim', dash: [2, 3], values: new Map([...each.values.keys()].map(x => [x, runs[i].config.threshold]))}] : []);
  return [
    chart('Loss', [...series(epochs ? 'epoch' : 'step', 'loss'), ...many ? [] : series('eval', 'loss', strong)],
      (epochs ? 'Mean of each epoch' : 'Of single batches') + (many ? '; mean of the ranks' : '')),
    many && chart('Loss of the evaluation', series('eval', 'loss', strong)),
    ...own.map(each => chart({__proto__: null, accuracy: 'Accuracy', auc: 'AUC'}[each] || each, series('eval', each, strong), 'Of the evaluation')),
    chart('Perplexity', [...many ? [] : series('epoch', 'perplexity'), ...series('eval', 'perplexity', strong)],
      many ? 'Of the evaluation' : 'Of each epoch, and of the evaluation'),
    varies ? chart('Learning rate', series('step', 'lr')) : null,
    chart('Reward', [...many ? [] : series('episode', 'reward', {label: 'smallest of the environments', width: 1}),
      ...series('episode', 'running_reward', many ? strong : {...strong, label: 'running mean'}), ...many ? [] : levels], many ? 'Running mean' : ''),
    ...rates.map(([event, each]) => chart(each[0].toUpperCase() + each.slice(1).replaceAll('_', ' ').replace(' per s', ' per second'),
      series(event, each), many ? 'Mean of the ranks' : '')),
    chart('Staleness', series('step', 'staleness'), 'Steps that this trainer was ahead of the slowest when the step began'),
  ];
};

// ---- ranks ----

const shapes = {__proto__: null, saved: 'M0-5L5 0L0 5L-5 0Z', loaded: 'M0-5L5 0L0 5L-5 0Z', lost: 'M-5-5L5 5M-5 5L5-5', error: 'M-5-5L5 5M-5 5L5-5',
  returned: 'M0-5L5 5H-5Z', restart: 'M0-9V9', warn: 'M0-5L5 5H-5Z'};
const mark = ({kind}, x, y) => svg('path', {d: shapes[kind], transform: `translate(${x} ${y})`, class: 'mark ' + kind});
/** Draws what each process did from its start to its end, with the marks of its events. */
const timeline = run => {
  const rows = new Map(), seen = new Map(), marks = [];
  const row = (rank, role) => {
    if (!rows.has(rank)) rows.set(rank, {rank, role, bars: []});
    rows.get(rank).role ||= role;
    return rows.get(rank);
  };
  const close = (each, to, how) => each.bars.at(-1)?.how === undefined && each.bars.length && Object.assign(each.bars.at(-1), {to, how});
  for (const t of run.tables) seen.set(t.rank, Math.max(seen.get(t.rank) || 0, ...t.columns.t));
  for (const each of run.events) {
    const own = Number.isInteger(each.rank) ? row(each.rank, each.role) : null, last = own?.bars.at(-1);
    if (own) seen.set(each.rank, Math.max(seen.get(each.rank) || 0, each.t));
    if (own && (each.event === 'start' || !last)) { close(own, each.t, 'lost'); own.bars.push({from: each.t}); }
    if (each.event === 'ready' && own) own.bars.at(-1).ready = each.t;
    if (own && ['rank_end', 'end'].includes(each.event)) close(own, each.t, each.kind === 'goal_not_reached' ? 'missed' : each.status);
    if (each.event === 'lost') close(row(each.lost_rank, each.lost_role), each.t, 'lost');
    if (each.event === 'restart') for (const rank of [each.ranks].flat()) close(row(rank), each.t, rank === each.cause_rank ? 'lost' : 'failed');
    const kind = each.event === 'checkpoint' ? each.action : each.event;
    if (shapes[kind] && each.kind !== 'goal_not_reached') marks.push({kind: kind === 'error' ? 'lost' : kind, t: each.t,
      rank: each.lost_rank ?? each.returned_rank ?? (kind === 'restart' ? each.cause_rank ?? each.ranks?.[0] : each.rank)});
  }
  for (const each of rows.values()) close(each, events(run, 'end').length ? seen.get(each.rank) || run.seconds : run.seconds, events(run, 'end').length ? 'lost' : 'open');
  const list = [...rows.values()].sort((a, b) => a.rank - b.rank), shown = list.slice(0, 64), kinds = distinct(marks.map(mark => mark.kind));
  if (!shown.length || !(run.seconds > 0)) return null;
  const summary = `Timeline of ${list.length} ranks. ` + shown.map(each => `${name(each.rank, each.role)}: ` +
    each.bars.map(bar => `${num(bar.from)} to ${num(bar.to)} s, ${bar.how}`).join('; ')).join('. ');
  const host = fit(el('div', {role: 'img', 'aria-label': summary}), width => {
    const left = Math.min(150, width * 0.32), x = t => left + t / run.seconds * (width - left - 12), bottom = shown.length * 22 + 6;
    const step = whole.map(each => each / 1e4).find(each => run.seconds / each <= Math.max(2, width / 130)) || run.seconds;
    const rect = (from, to, i, kind) => svg('rect', {x: x(from), y: i * 22 + 8, width: Math.max(1, x(to) - x(from)), height: 11, rx: 2, class: 'bar ' + kind});
    host.replaceChildren(svg('svg', {width, height: bottom + 24, 'aria-hidden': 'true'},
      [...Array(Math.floor(run.seconds / step) + 1).keys()].map(i => [svg('path', {class: 'axis', d: `M${x(i * step)} 0V${bottom}`}),
        svg('text', {x: x(i * step), y: bottom + 16, class: 'dim', 'text-anchor': 'middle'}, num(i * step) + (i ? '' : ' s'))]),
      shown.map((each, i) => [svg('text', {x: 0, y: i * 22 + 18}, name(each.rank, each.role).slice(0, Math.floor(left / 7))),
        each.bars.map(bar => [rect(bar.from, bar.to, i, 'joining'), bar.ready !== undefined && rect(bar.ready, bar.to, i, bar.how),
          ['lost', 'failed'].includes(bar.how) && mark({kind: 'lost'}, x(bar.to), i * 22 + 13)])]),
      shown.map((one, i) => marks.filter(each => each.rank === one.rank).map(each => mark(each, x(each.t), i * 22 + 13)))));
  });
  const hasLost = list.some(each => each.bars.some(bar => ['lost', 'failed'].includes(bar.how)));
  const words = {saved: 'checkpoint saved', loaded: 'checkpoint loaded', lost: 'lost or failed', warn: 'warning'};
  return card('Timeline', host, list.length > 64 ? note(`and ${list.length - 64} more ranks`) : null,
    el('p', {class: 'note keys'}, el('span', {}, 'pale: waits for the other ranks'), distinct([...kinds, ...hasLost ? ['lost'] : []]).map(kind =>
      el('span', {}, svg('svg', {width: 14, height: 14, 'aria-hidden': 'true'}, mark({kind}, 7, 7)), words[kind] || kind))));
};
const ranks = run => {
  const last = new Map(), end = endOf(run), total = end?.scope === 'job' && end;
  for (const each of events(run, 'start', 'ready', 'rank_end', 'end').filter(each => Number.isInteger(each.rank))) {
    const old = each.event !== 'start' && last.get(each.rank) || {begun: each.event === 'start' ? each.t : undefined};
    const {t, rank, role, status, kind} = each;  // all that a job's end has of its own rank, if there are others
    last.set(each.rank, {...old, ...each === total && startOf(run).world_size > 1 ? {t, rank, role, status, kind} : each, host: each.host || old.host,
      ready: each.event === 'ready' && old.begun >= 0 ? t - old.begun : old.ready});
  }
  const epochs = rank => run.tables.filter(t => t.event === 'epoch' && t.rank === rank).flatMap(t => t.columns.data_wait_s || []);
  const mb = key => each => each.rpc && each.rpc[key] / 1e6;
  const hosts = distinct([...last.values()].map(each => each.host)).length;
  return last.size ? card('Ranks', note('Waited: from its start to its end, less its CPU time.' +
    (total ? ' All ranks: steps, calls, MB and CPU time are sums; memory is that of the largest rank.' : '')), table('Ranks', [number('rank', each => each.rank ?? 'all'),
    field('role', 'role'), ['host', each => hosts > 1 ? show(each.host) : '–'], ['device', each => each.device === 'cpu' ? '–' : show(each.device)],
    ['ended', each => show(each.status === 'failed' ? each.kind : each.status || (end ? 'lost' : null))], field('steps', 'steps', 'n'), field('steps/s', 'steps_per_s', 'n'),
    number('calls', each => each.rpc?.calls), number('MB out', mb('bytes_out')), number('MB in', mb('bytes_in')), field('memory MB', 'rss_mb', 'n'),
    field('ready after s', 'ready', 'n'), field('CPU s', 'cpu_s', 'n'),
    number('waited s', each => each.begun >= 0 && each.cpu_s >= 0 ? Math.max(0, each.t - each.begun - each.cpu_s) : null),
    number('waited for data s', each => add(epochs(each.rank)) || null)],
  [...[...last.values()].sort((a, b) => a.rank - b.rank), ...total ? [{...total, rank: null, role: 'all ranks'}] : []])) : null;
};
const happened = run => {
  const list = [...events(run, 'lost', 'returned', 'restart', 'warn', 'error'), ...events(run, 'checkpoint').filter(each => each.action === 'loaded')];
  const rank = each => name(each.lost_rank ?? each.returned_rank ?? each.rank, each.lost_role || each.returned_role || each.role);
  return list.length ? card('What happened', table('What happened', [field('s', 't', 'n'), ['event', each => each.action || each.event], ['rank', rank],
    field('kind', 'kind', 'k'), ['message', each => each.message || each.cause || each.path || '', 'w']], list.sort((a, b) => a.t - b.t).slice(0, 300))) : null;
};

// ---- pipeline ----

/** Returns the seconds per batch if the stages of the first row lost no time except in the bubbles of the schedule. */
const ideal = (first, m) => {
  const stages = first.stage_s.every(s => s > 0) ? first.stage_s : first.stage_s.map(() => first.batch_s / first.stage_s.length);
  const sum = add(stages);
  return first.schedule === 'naive' ? sum : (sum + (m - 1) * Math.max(...stages)) / m;
};
const bubble = (run, m) => (run.schedules[m] || '').match(/([\d.]+) % bubble/)?.[1];
const splits = run => events(run, 'split').filter(each => each.stage_s?.length && each.num_split > 0 && each.batch_s > 0).sort((a, b) => a.num_split - b.num_split);
const sweep = () => {
  const found = runs.filter(run => splits(run).length);
  const ticks = distinct(found.flatMap(run => splits(run).map(each => each.num_split))).sort((a, b) => a - b);
  const line = (run, what, cell, style) => ({label: many ? `${run.name}, ${what}` : what, colour: run.colour, ...style,
    values: new Map(splits(run).map(each => [ticks.indexOf(each.num_split), cell(each)]))});
  const lines = found.flatMap(run => [line(run, 'measured', each => each.batch_s, {width: 2.5, dash: []}),
    line(run, 'ideal', each => ideal(splits(run)[0], each.num_split), {width: 1.5, dash: [7, 4], ...many ? {} : {colour: 'c1'}})]);
  const idle = each => each.stage_s.every(s => s > 0) ? 100 * Math.max(0, 1 - each.stage_s.reduce((a, b) => a + b) / each.stage_s.length / each.batch_s) : null;
  return [ticks.length > 1 ? chart('Seconds per batch', lines, 'Ideal: the computing time of the stages at the smallest num_split, and nothing ' +
    'but the bubbles of the schedule', {x: 'num_split', ticks}) : null,
  ...found.map(run => card(many ? run.name : 'Runs by num_split', table('Runs by num_split', [field('num_split', 'num_split', 'n'),
    field('s per batch', 'batch_s', 'n'), number('ideal', each => ideal(splits(run)[0], each.num_split)), field('images/s', 'samples_per_s', 'n'),
    number('idle %', idle), number('bubble %', each => bubble(run, each.num_split)), field('activations', 'activations'), field('loss', 'loss', 'n')], splits(run))))];
};
const grid = () => {
  const all = runs.flatMap(run => Object.entries(run.schedules).map(([m, text]) => ({title: (many ? run.name + ', ' : '') + 'num_split ' + m, text})));
  const box = el('div', {}), pick = el('select', {'aria-label': 'schedule', change: () => draw()}, all.map((each, i) => el('option', {value: i}, each.title)));
  pick.value = all.findLastIndex(each => each.text.length < 800);
  const draw = () => {
    const [title, ...lines] = all[pick.value].text.trim().split('\n'), rows = lines.map(each => each.replace(/\(.*/, '').trim().split(/\s+/).slice(2));
    const size = {width: Math.max(...rows.map(row => row.length)) * 28 + 64, height: rows.length * 28 + 4, 'aria-hidden': 'true'};
    box.replaceChildren(el('p', {}, title), el('div', {class: 'scroll', tabindex: 0, role: 'img', 'aria-label': all[pick.value].text}, svg('svg', size,
      rows.map((row, i) => [svg('text', {x: 0, y: i * 28 + 20}, `stage ${i + 1}`), row.map((cell, at) => [
        svg('rect', {x: at * 28 + 60, y: i * 28 + 3, width: 26, height: 24, rx: 3, class: 'cell ' + ({F: 'forward', B: 'backward'}[cell[0]] || 'idle')}),
        cell !== '.' && svg('text', {x: at * 28 + 73, y: i * 28 + 19, 'text-anchor': 'middle', class: 'in'}, cell)])]))),
    later('As text', () => el('pre', {}, all[pick.value].text)));
  };
  if (all.length) draw();
  return all.length ? card('', el('div', {class: 'head'}, el('h3', {}, 'Schedule'), pick),
    note('F: forward pass of a micro-batch, B: backward pass, dashed: the stage waits. Each pass takes one unit of time.'), box) : null;
};

// ---- the page ----

document.title = `distrain report: ${names.slice(0, 3).join('; ')}`;
document.body.append(el('h1', {}, many ? `${runs.length} runs` : `distrain ${runs[0].cmd || 'report'}`));
for (const run of runs) {
  const {state, title, details} = run.verdict, start = startOf(run), end = endOf(run) || {};
  const results = [['steps', 'steps'], ['wall_s', 's'], ['loss', 'loss'], ['accuracy', 'accuracy'], ['auc', 'AUC'], ['perplexity', 'perplexity'],
    ['running_reward', 'running reward']].filter(([key]) => typeof end[key] === 'number').map(([key, word]) =>
    ['steps', 's'].includes(word) ? `${num(end[key])} ${word}` : `${word} ${num(end[key])}`);
  const counts = [['lost', 'trainers lost'], ['returned', 'returned'], ['restart', 'restarts'], ['warn', 'warnings']].filter(([kind]) => events(run, kind).length);
  if (counts.length) details.push(counts.map(([kind, word]) => `${word}: ${events(run, kind).length}`).join(', '));
  const meta = [run.cmd, run.id && 'run ' + run.id.slice(0, 8), new Date(run.begin * 1000).toLocaleString('en-GB'),
    start.world_size && start.world_size + ' ranks', start.data, run.files.join(', ')].filter(Boolean).join('  ·  ');
  const more = [...details.map(each => el('p', {}, show(each))), el('p', {class: 'meta'}, meta)];
  const swatch = svg('svg', {width: 22, height: 10, 'aria-hidden': 'true'},
    svg('line', {x1: 0, x2: 20, y1: 5, y2: 5, style: `stroke:var(--${run.colour})`, 'stroke-width': 4, 'stroke-dasharray': run.dash.join(' ')}));
  document.body.append(el('article', {class: `card verdict ${state}${runs.length > 3 ? ' many' : ''}`}, many ? el('h3', {}, swatch, run.name) : null,
    el('strong', {}, title + (state === 'ok' ? ': ' + results.join(', ') : '')), runs.length > 3 ? el('details', {}, el('summary', {}, 'Details'), more) : more));
}
const box = el('div', {class: 'charts'}), ways = {step: stepName, time: 'time'};
if (runs.some(run => run.tables.some(t => t.event === 'epoch' && t.lines > 1))) ways.epoch = 'epoch';
const buttons = Object.entries(ways).map(([way, text]) => el('button', {type: 'button', 'data-x': way, click: () => { xAxis = way; render(); }}, text));
const render = () => {
  box.replaceChildren(...training().filter(Boolean));
  for (const each of buttons) each.setAttribute('aria-pressed', String(each.dataset.x === xAxis));
};
render();
if (box.children.length) section('Training', () => [el('div', {class: 'switch', role: 'group', 'aria-label': 'x axis'}, 'by ', buttons), box]);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', render);
section('Pipeline', () => [sweep(), grid()]);
section('Ranks', () => runs.map(run => [timeline(run), ranks(run), happened(run)].filter(Boolean)).map((parts, i) => parts.length === 0 ? null :
  many ? fill(el('details', {class: 'run'}, el('summary', {}, runs[i].name), parts), runs.length < 4 ? {open: ''} : {}, []) : parts));
if (data.trace) {
  const sums = new Map();
  for (const [title, , count, total, own] of data.trace) sums.set(title, (sums.get(title) || [0, 0, 0]).map((sum, i) => sum + [count, total, own][i]));
  const list = [...sums].sort((a, b) => b[1][2] - a[1][2]).slice(0, 14), most = list[0][1][2] || 1;
  const bar = each => el('div', {style: `width:${100 * each[1][2] / most}%`});
  section('Where the time went', () => card('', note('From the trace, all ranks together. “Own” is without the time of the parts that the trace has inside.'),
    table('Where the time went', [field('name', 0, 'w'), ['', bar, 'bar'], number('own ms', each => each[1][2]), number('total ms', each => each[1][1]),
      number('number', each => each[1][0])], list), later('By rank', () => table('By rank', [field('name', 0, 'w'), field('rank', 1), field('own ms', 4, 'n'),
      field('total ms', 3, 'n'), field('number', 2, 'n')], data.trace))));
}
const options = distinct(runs.flatMap(run => [...Object.keys(run.changed || {}), ...many ? unlike : []])).sort();
const standard = key => runs.map(run => run.changed?.[key]).find(Boolean) || '–';
section('Options that differ from the defaults', () => options.length ? card('', table('Options', [
  ['option', key => '--' + key.replaceAll('_', '-'), 'o'], ['default', standard, 'w'], ...runs.map(run => [many ? run.name : 'value', key => show(run.config[key]), 'w'])], options)) : null);
const drawn = runs.flatMap(run => run.tables).reduce(([few, all], t) => [few + t.columns.t.length, all + t.lines], [0, 0]);
document.body.append(el('footer', {class: 'note'}, [
  drawn[0] < drawn[1] && `Thinned: ${num(drawn[0])} of ${num(drawn[1])} points are shown; the first, the last, the smallest and the largest ones are kept.`,
  data.skipped && `${num(data.skipped)} lines were skipped: truncated, not JSON, not distrain's, or of too many runs.`,
  add(runs.map(run => run.hidden_events)) && `${num(add(runs.map(run => run.hidden_events)))} events are left out, because there are too many.`,
  runs.some(run => run.hidden_tables) && 'Some ranks are left out, because there are too many.',
  `Made by distrain ${data.version}; charts by uPlot (MIT).`].filter(Boolean).map(text => el('p', {}, text))));
})();
