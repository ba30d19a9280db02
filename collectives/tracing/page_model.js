"use strict";
// The recording: lanes of bars, and the same collective on all ranks. Times are ns from the first event of all.

const ROLE = { program: 0, communication: 1, other: 2 };

function readModel(text) {
  const data = JSON.parse(text);
  const lanes = [];
  const ranks = data.ranks.map((rank, place) => {
    const own = rank.lanes.map((lane, number) => readLane(lane, place, number));
    lanes.push(...own);
    return { ...rank, place, lanes: own, exposed: readIntervals(rank.exposed) };
  });
  const members = Array.from({ length: data.groups }, () => []);
  for (const lane of lanes) {
    for (let i = 0; i < lane.count; i++) if (lane.group[i] >= 0) members[lane.group[i]].push({ lane, i });
  }
  // When the last rank came to a collective; infinite where not all ranks recorded it, or there is one alone.
  const lastStart = members.map((of) => of.length === ranks.length && of.length > 1 ? Math.max(...of.map(({ lane, i }) => lane.start[i])) : -Infinity);
  const first = Math.min(...ranks.map((rank) => Math.min(rank.began, 0)));
  const last = Math.max(...ranks.map((rank) => rank.ended), ...lanes.map((lane) => lane.count ? lane.until[lane.count - 1] : 0));
  return { ranks, lanes, members, lastStart, names: data.names, details: data.details, first, last: Math.max(last, first + 1), steps: readSteps(ranks) };
}

function readLane(lane, place, number) {
  const count = (lane.start || []).length;
  const start = new Float64Array(count), end = new Float64Array(count), until = new Float64Array(count);
  let now = 0, latest = 0;
  for (let i = 0; i < count; i++) {
    now += lane.start[i];
    start[i] = now;
    end[i] = now + lane.length[i];
    until[i] = latest = Math.max(latest, end[i]); // the latest end so far, by which a search can begin
  }
  return { row: lane.row, role: lane.role, place, number, count, start, end, until, name: lane.name, details: lane.details, group: lane.group };
}

function readIntervals(deltas) {
  const start = [], end = [];
  let now = 0;
  for (let i = 0; i + 1 < deltas.length; i += 2) {
    start.push(now += deltas[i]);
    end.push(now += deltas[i + 1]);
  }
  return { start, end };
}

// A step ends where a rank's backward ends; of all ranks it lasts from the first begin to the last end.
function readSteps(ranks) {
  const steps = [];
  for (const rank of ranks) {
    rank.marks.forEach((mark, i) => {
      const from = i ? rank.marks[i - 1] : rank.began;
      const step = steps[i] || (steps[i] = { from, to: mark });
      step.from = Math.min(step.from, from);
      step.to = Math.max(step.to, mark);
    });
  }
  return steps;
}

// The first i of a rising array with values[i] > limit.
function firstAfter(values, limit) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > limit) high = middle; else low = middle + 1;
  }
  return low;
}

function stepAt(model, place, time) {
  return firstAfter(model.ranks[place].marks, time) + 1;
}

// How much of a bar is exposed, in ns.
function exposedOf(model, place, from, to) {
  const { start, end } = model.ranks[place].exposed;
  let total = 0;
  for (let i = firstAfter(end, from); i < start.length && start[i] < to; i++) total += Math.min(end[i], to) - Math.max(start[i], from);
  return total;
}

// For how long a bar's rank waited for the last rank to come.
function waitOf(model, lane, i) {
  const group = lane.group[i];
  return group < 0 ? 0 : Math.max(Math.min(model.lastStart[group], lane.end[i]) - lane.start[i], 0);
}

function firstStart(model, group) {
  return Math.min(...model.members[group].map(({ lane, i }) => lane.start[i]));
}

// The bar of a lane at a time: the shortest that has it, or the nearest within `slack`.
function barAt(lane, time, slack) {
  let best = -1, bestLength = Infinity, bestGap = slack;
  for (let i = firstAfter(lane.until, time - slack); i < lane.count && lane.start[i] <= time + slack; i++) {
    const gap = Math.max(lane.start[i] - time, time - lane.end[i], 0), length = lane.end[i] - lane.start[i];
    if (gap < bestGap || (gap === bestGap && length < bestLength)) [best, bestLength, bestGap] = [i, length, gap];
  }
  return best;
}

function kindOf(model, lane, i) {
  if (lane.role === ROLE.program) return model.names[lane.name[i]][4] === "wait" ? "wait" : "blocked";
  const op = model.names[lane.name[i]][1];
  if (op === null) return "other";
  return ["all_reduce", "reduce_scatter", "all_gather"].includes(op) ? op : "collective";
}

function formatTime(ns, digits = 3) {
  const size = Math.abs(ns);
  if (size >= 1e9) return `${(ns / 1e9).toFixed(digits)} s`;
  if (size >= 1e6 || size === 0) return `${(ns / 1e6).toFixed(digits)} ms`;
  return size >= 1e3 ? `${(ns / 1e3).toFixed(Math.max(digits - 2, 0))} µs` : `${Math.round(ns)} ns`;
}

function formatBytes(count) {
  const units = ["B", "kB", "MB", "GB"];
  let unit = 0;
  while (count >= 999.5 && unit < 3) { count /= 1000; unit++; }
  return `${unit ? Number(count.toPrecision(3)) : count} ${units[unit]}`;
}

// What is written into a bar: the shorter form where the longer has no room.
function labelsOf(model, lane, i) {
  const [name, , size] = model.names[lane.name[i]], details = model.details[lane.details[i]];
  if (size === null) return [name];
  const bucket = details.bucket === undefined ? name.split(" ")[0] : `bucket ${details.bucket}`;
  return [`${bucket}, ${formatBytes(size)}`, bucket, String(details.bucket ?? "")];
}
