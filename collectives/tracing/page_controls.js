// Mouse, keys, buttons, and the text about a bar.

function element(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// The facts of a bar, as pairs of a name and a text.
function factsOf(model, { lane, i }) {
  const [name, op, size, factor] = model.names[lane.name[i]], details = model.details[lane.details[i]];
  const from = lane.start[i], to = lane.end[i], length = to - from, facts = [];
  facts.push(["what", name], ["rank, lane", `${model.ranks[lane.place].rank}, ${lane.row}`]);
  if (model.steps.length) facts.push(["step", Math.min(stepAt(model, lane.place, from), model.steps.length + 1)]);
  facts.push(["from, to", `${formatTime(from)}, ${formatTime(to)}`], ["took", formatTime(length)]);
  if (lane.role === ROLE.communication) facts.push(["exposed", formatTime(exposedOf(model, lane.place, from, to))]);
  if (op && lane.group[i] >= 0 && model.lastStart[lane.group[i]] > -Infinity) facts.push(["waited for the last rank", formatTime(waitOf(model, lane, i))]);
  if (size !== null) {
    const rate = (ns) => `${(size / ns).toFixed(2)} GB/s, busbw ${((size * factor) / ns).toFixed(2)} GB/s`;
    facts.push(["size", `${formatBytes(size)} (${size} B)`]);
    if (length > 0) facts.push(["bandwidth", rate(length)]);
    const rest = length - waitOf(model, lane, i);
    if (rest > 0 && rest < length) facts.push(["once all had come", rate(rest)]);
  }
  const names = { bytes: "sent by this rank", dtype: "dtype", bucket: "bucket", wire: "wire", parameters: "parameters" };
  for (const [key, value] of Object.entries(details)) {
    const text = typeof value === "object" ? JSON.stringify(value) : String(value);
    facts.push([names[key] || key, key === "bytes" && typeof value === "number" ? `${formatBytes(value)} (${value} B)` : text]);
  }
  return facts;
}

function titleOf(model, { lane, i }) {
  const group = lane.group[i], rank = `rank ${model.ranks[lane.place].rank}`;
  return group >= 0 ? `No. ${group}: ${labelsOf(model, lane, i)[0]}, ${rank}` : `${model.names[lane.name[i]][0]}, ${rank}`;
}

// The same collective on all ranks, as a table.
function memberTable(model, bar) {
  const group = bar.lane.group[bar.i], table = element("table"), head = element("tr");
  for (const text of ["rank", "came", "waited", "took", "exposed"]) head.append(element("th", text, { scope: "col" }));
  table.append(element("thead"), element("tbody"));
  table.tHead.append(head);
  const first = firstStart(model, group);
  for (const { lane, i } of model.members[group]) {
    const row = element("tr"), late = lane.start[i] - first;
    row.append(element("th", model.ranks[lane.place].rank, { scope: "row" }));
    const last = lane.start[i] === model.lastStart[group];
    const cells = [late ? `${formatTime(late)} after the first${last ? ", the last" : ""}` : "first", formatTime(waitOf(model, lane, i)),
      formatTime(lane.end[i] - lane.start[i]), formatTime(exposedOf(model, lane.place, lane.start[i], lane.end[i]))];
    for (const text of cells) row.append(element("td", text));
    table.tBodies[0].append(row);
  }
  return table;
}

function showDetails(picture, bar) {
  const { model } = picture, panel = document.getElementById("details");
  panel.replaceChildren();
  if (!bar) return;
  const title = element("h3", titleOf(model, bar)), list = element("dl"), zoom = element("button", "Zoom to it", { type: "button" });
  zoom.addEventListener("click", () => zoomTo(picture, bar));
  title.append(zoom);
  for (const [name, text] of factsOf(model, bar)) list.append(element("dt", name), element("dd", text));
  panel.append(title, list);
  if (bar.lane.group[bar.i] < 0) return;
  const members = element("div", undefined, { class: "members" });
  members.append(memberTable(model, bar));
  if (model.members[bar.lane.group[bar.i]].length < model.ranks.length) members.append(element("p", "Not all ranks recorded it.", { class: "lead" }));
  panel.append(members);
}

function select(picture, bar) {
  picture.selected = bar;
  picture.hovered = null;
  showDetails(picture, bar);
  picture.redraw();
}

// The time of a collective on all ranks, with some around it.
function zoomTo(picture, bar) {
  const group = bar.lane.group[bar.i], bars = group >= 0 ? picture.model.members[group] : [bar];
  const from = Math.min(...bars.map(({ lane, i }) => lane.start[i])), to = Math.max(...bars.map(({ lane, i }) => lane.end[i]));
  picture.show(from - (to - from) * 0.6, to + (to - from) * 0.6);
  reveal(picture, bar);
}

function reveal(picture, { lane, i }) {
  const { box } = picture, time = lane.start[i], length = picture.to - picture.from;
  if (lane.end[i] < picture.from || time > picture.to) picture.show(time - length * 0.3, time + length * 0.7);
  if (lane.y < box.scrollTop || lane.y + LANE + RULER > box.scrollTop + picture.height) box.scrollTop = Math.max(lane.y - LANE, 0);
}

// A step by its number; 0: the whole recording.
function chooseStep(picture, number) {
  const { first, last, steps } = picture.model, step = steps[number - 1] || { from: first, to: last };
  const edge = number ? (step.to - step.from) * 0.03 : 0;
  picture.show(step.from - edge, step.to + edge);
  picture.step = number;
}

// The step in sight, or the one in the middle of what is.
function stepInSight(picture) {
  const { steps } = picture.model, middle = (picture.from + picture.to) / 2;
  if (picture.step !== null) return picture.step;
  const found = steps.findIndex((step) => middle < step.to);
  return found < 0 ? steps.length : found + 1;
}

function followMouse(picture) {
  const { canvas, box } = picture, tip = document.getElementById("tip");
  let drag = null;
  const point = (event) => { const r = canvas.getBoundingClientRect(); return [event.clientX - r.left, event.clientY - r.top]; };
  const hover = (bar, event) => {
    canvas.classList.toggle("on-bar", Boolean(bar));
    tip.hidden = !bar;
    if (bar) {
      const facts = factsOf(picture.model, bar).filter(([name]) => ["step", "took", "exposed", "waited for the last rank", "size", "dtype"].includes(name));
      tip.textContent = [titleOf(picture.model, bar), ...facts.map(([name, text]) => `${name}: ${text}`)].join("\n");
      tip.style.left = `${Math.max(Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8), 4)}px`;
      tip.style.top = `${event.clientY + 18 + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : event.clientY + 18}px`;
    }
    if (bar?.lane === picture.hovered?.lane && bar?.i === picture.hovered?.i) return;
    picture.hovered = bar;
    picture.redraw();
  };
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    drag = { x: event.clientX, y: event.clientY, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) return hover(picture.barAt(...point(event)), event);
    if (!drag.moved && Math.hypot(event.clientX - drag.x, event.clientY - drag.y) < 4) return;
    drag.moved = true;
    canvas.classList.add("dragging");
    hover(null);
    picture.move(drag.x - event.clientX);
    box.scrollTop += drag.y - event.clientY;
    Object.assign(drag, { x: event.clientX, y: event.clientY });
  });
  canvas.addEventListener("pointerup", (event) => {
    if (drag && !drag.moved) select(picture, picture.barAt(...point(event)));
    drag = null;
    canvas.classList.remove("dragging");
  });
  canvas.addEventListener("pointercancel", () => { drag = null; canvas.classList.remove("dragging"); });
  canvas.addEventListener("pointerleave", (event) => hover(null, event));
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const unit = event.deltaMode === 1 ? 16 : 1;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) picture.move((event.deltaX || event.deltaY) * unit);
    else picture.zoom(Math.exp(Math.max(Math.min(event.deltaY * unit, 300), -300) * 0.0022), point(event)[0]);
  }, { passive: false });
  box.addEventListener("scroll", () => picture.redraw());
}

function followOverview(picture) {
  const { overview, model } = picture;
  let dragging = false;
  const move = (event) => {
    const r = overview.getBoundingClientRect(), length = picture.to - picture.from;
    const at = model.first + ((event.clientX - r.left) / r.width) * (model.last - model.first);
    picture.show(at - length / 2, at + length / 2);
  };
  overview.addEventListener("pointerdown", (event) => { dragging = true; overview.setPointerCapture(event.pointerId); overview.classList.add("dragging"); move(event); });
  overview.addEventListener("pointermove", (event) => dragging && move(event));
  for (const end of ["pointerup", "pointercancel"]) overview.addEventListener(end, () => { dragging = false; overview.classList.remove("dragging"); });
}

// The next bar of the lane, or the one of another lane that is nearest in time.
function neighbour(picture, along, across) {
  const { model, selected } = picture;
  const middle = (picture.from + picture.to) / 2;
  if (!selected) {
    const lane = model.lanes.find((each) => each.role === ROLE.communication && each.count) || model.lanes.find((each) => each.count);
    return lane ? { lane, i: Math.min(firstAfter(lane.start, picture.from), lane.count - 1) } : null;
  }
  if (along) return { lane: selected.lane, i: Math.max(Math.min(selected.i + along, selected.lane.count - 1), 0) };
  const time = (selected.lane.start[selected.i] + selected.lane.end[selected.i]) / 2 || middle;
  let place = model.lanes.indexOf(selected.lane) + across;
  while (model.lanes[place] && !model.lanes[place].count) place += across;
  const lane = model.lanes[place];
  return lane ? { lane, i: Math.max(firstAfter(lane.start, time) - 1, 0) } : selected;
}

function followKeys(picture) {
  const choose = (bar) => { if (bar) { select(picture, bar); reveal(picture, bar); } };
  const keys = {
    ArrowLeft: () => picture.move(-picture.width / 8), ArrowRight: () => picture.move(picture.width / 8),
    ArrowUp: () => choose(neighbour(picture, 0, -1)), ArrowDown: () => choose(neighbour(picture, 0, 1)),
    "+": () => picture.zoom(0.7), "=": () => picture.zoom(0.7), "-": () => picture.zoom(1 / 0.7),
    Home: () => chooseStep(picture, 0), Enter: () => picture.selected && zoomTo(picture, picture.selected),
    n: () => choose(neighbour(picture, 1, 0)), p: () => choose(neighbour(picture, -1, 0)), Escape: () => select(picture, null),
  };
  picture.box.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
}

function followTools(picture) {
  const { model } = picture, byId = (id) => document.getElementById(id), steps = byId("step");
  steps.append(element("option", "all", { value: 0 }), ...model.steps.map((_, i) => element("option", i + 1, { value: i + 1 })));
  steps.addEventListener("change", () => chooseStep(picture, Number(steps.value)));
  byId("previous").addEventListener("click", () => chooseStep(picture, stepInSight(picture) - 1));
  byId("next").addEventListener("click", () => chooseStep(picture, stepInSight(picture) + 1));
  byId("in").addEventListener("click", () => picture.zoom(0.6));
  byId("out").addEventListener("click", () => picture.zoom(1 / 0.6));
  byId("all").addEventListener("click", () => chooseStep(picture, 0));
  picture.onDrawn = () => {
    const { from, to } = picture, step = stepInSight(picture);
    if (picture.step === null) steps.selectedIndex = -1; else steps.value = picture.step;
    byId("previous").disabled = step < 1;
    byId("next").disabled = step >= model.steps.length;
    byId("span").textContent = `${formatTime(from)} to ${formatTime(to)}: ${formatTime(to - from)}`;
  };
  for (const button of document.querySelectorAll("[data-event]")) {
    button.addEventListener("click", () => {
      const [place, number, i] = button.dataset.event.split(",").map(Number);
      const bar = { lane: model.ranks[place].lanes[number], i };
      select(picture, bar);
      zoomTo(picture, bar);
      picture.box.scrollIntoView({ block: "center" });
      picture.box.focus({ preventScroll: true });
    });
  }
}

function start() {
  const byId = (id) => document.getElementById(id);
  byId("picture").hidden = false;
  const picture = new Picture(readModel(byId("data").textContent), byId("rows"), byId("canvas"), byId("overview"));
  followMouse(picture);
  followOverview(picture);
  followKeys(picture);
  followTools(picture);
  new ResizeObserver(() => { if (picture.box.clientWidth !== picture.boxWidth) picture.resize(); }).observe(picture.box);
  addEventListener("resize", () => picture.resize());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { picture.colours = readColours(); picture.redraw(); });
  picture.resize();
  window.timelinePicture = picture; // for tests, and for a look from the console
}

start();
