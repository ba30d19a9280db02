// The picture: only what is in sight is drawn. Bars narrower than a pixel become its share of colour.

const GUTTER = 132, RULER = 40, LANE = 22, BAR = 16, GAP = 12, RANK_HEAD = 6;
const KINDS = ["blocked", "wait", "all_reduce", "reduce_scatter", "all_gather", "collective", "other"];
const FONT = 'system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';

function readColours() {
  const style = getComputedStyle(document.documentElement);
  const names = ["page", "panel", "text", "soft", "line", "zebra", "accent", "same", "compute", "late", "on-bar", ...KINDS];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

// The place of each lane in the whole picture, below the ruler.
function layOut(model) {
  let y = 0;
  const bands = [];
  for (const rank of model.ranks) {
    const top = y;
    y += RANK_HEAD;
    for (const lane of rank.lanes) {
      lane.y = y;
      y += LANE;
    }
    y += GAP - RANK_HEAD;
    bands.push({ rank, top, bottom: y });
  }
  return { bands, height: y };
}

class Picture {
  constructor(model, box, canvas, overview) {
    Object.assign(this, { model, box, canvas, overview, layout: layOut(model), from: model.first, to: model.last, step: 0 });
    this.context = canvas.getContext("2d");
    this.hovered = this.selected = null; // {lane, i}
    this.colours = readColours();
    this.frames = 0;
  }

  resize() {
    const width = this.box.clientWidth, whole = this.layout.height + RULER;
    const height = Math.min(whole, Math.max(Math.floor(innerHeight * 0.72), 160));
    this.box.style.height = `${height + 2}px`;
    document.getElementById("spacer").style.height = `${whole}px`;
    this.boxWidth = width;
    this.width = Math.max(width, GUTTER + 60);
    this.height = height;
    for (const [canvas, w, h] of [[this.canvas, this.width, height], [this.overview, this.overview.clientWidth, this.overview.clientHeight]]) {
      canvas.width = Math.round(w * devicePixelRatio);
      canvas.height = Math.round(h * devicePixelRatio);
    }
    this.canvas.style.width = `${this.width}px`;
    this.canvas.style.height = `${height}px`;
    this.cover = Object.fromEntries(KINDS.map((kind) => [kind, new Float32Array(Math.ceil(this.width) + 1)]));
    this.redraw();
  }

  get scale() { return (this.width - GUTTER) / (this.to - this.from); } // pixels for a ns
  x(time) { return GUTTER + (time - this.from) * this.scale; }
  time(x) { return this.from + (x - GUTTER) / this.scale; }
  y(lane) { return RULER + lane.y - this.box.scrollTop; }

  show(from, to) {
    const { first, last } = this.model, edge = (last - first) * 0.02;
    this.step = null; // none of the steps, and not the whole
    const length = Math.min(Math.max(to - from, 200), last - first + 2 * edge);
    this.from = Math.min(Math.max(from, first - edge), last + edge - length);
    this.to = this.from + length;
    this.redraw();
  }

  zoom(factor, x = GUTTER + (this.width - GUTTER) / 2) {
    const at = this.time(Math.max(x, GUTTER));
    this.show(at - (at - this.from) * factor, at + (this.to - at) * factor);
  }

  move(pixels) { this.show(this.from + pixels / this.scale, this.to + pixels / this.scale); }

  laneAt(y) {
    const at = y - RULER + this.box.scrollTop;
    return y < RULER ? null : this.model.lanes.find((lane) => at >= lane.y && at < lane.y + LANE) || null;
  }

  barAt(x, y) {
    const lane = x < GUTTER ? null : this.laneAt(y);
    const i = lane ? barAt(lane, this.time(x), 3 / this.scale) : -1;
    return i < 0 ? null : { lane, i };
  }

  redraw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.draw();
      this.drawOverview();
      this.frames++;
      this.onDrawn?.();
    });
  }

  draw() {
    const { context: c, colours } = this;
    c.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    c.fillStyle = colours.panel;
    c.fillRect(0, 0, this.width, this.height);
    c.textBaseline = "middle";
    this.drawn = 0;
    this.layout.bands.forEach((band, number) => {
      const top = RULER + band.top - this.box.scrollTop, bottom = RULER + band.bottom - this.box.scrollTop;
      if (bottom < RULER || top > this.height) return;
      if (number % 2) this.fill("zebra", 0, top, this.width, bottom - top);
      c.save();
      c.beginPath();
      c.rect(GUTTER, RULER, this.width - GUTTER, this.height - RULER);
      c.clip();
      for (const lane of band.rank.lanes) this.drawLane(band.rank, lane);
      c.restore();
      this.drawNames(band.rank, top, bottom);
    });
    this.drawRuler();
    for (const bar of [this.selected, this.hovered]) if (bar) this.drawSame(bar);
  }

  fill(colour, x, y, width, height) {
    this.context.fillStyle = this.colours[colour] || colour;
    this.context.fillRect(x, y, width, height);
  }

  drawNames(rank, top, bottom) {
    const { context: c, colours } = this;
    this.fill("line", 0, bottom - 1, this.width, 1);
    for (const lane of rank.lanes) {
      const y = this.y(lane) + LANE / 2;
      if (lane === rank.lanes[0]) {
        c.font = `600 13px ${FONT}`;
        c.fillStyle = colours.text;
        c.fillText(`rank ${rank.rank}`, 10, y);
      }
      c.font = `12px ${FONT}`;
      c.fillStyle = colours.soft;
      c.textAlign = "right";
      c.fillText(lane.row, GUTTER - 8, y, GUTTER - 74);
      c.textAlign = "left";
    }
  }

  drawLane(rank, lane) {
    const y = this.y(lane) + (LANE - BAR) / 2;
    if (y + BAR < RULER || y > this.height) return;
    if (lane.role === ROLE.program) {
      const left = Math.max(this.x(rank.began), GUTTER), right = Math.min(this.x(rank.ended), this.width);
      if (right > left) this.fill("compute", left, y, right - left, BAR);
    }
    for (const cover of Object.values(this.cover)) cover.fill(0);
    let some = false;
    for (let i = firstAfter(lane.until, this.from); i < lane.count && lane.start[i] < this.to; i++) {
      const left = this.x(lane.start[i]), right = this.x(lane.end[i]);
      if (right - left < 1) {
        if (right < GUTTER || left > this.width) continue;
        this.cover[kindOf(this.model, lane, i)][Math.max(Math.floor(left), 0)] += right - left;
        some = true;
      } else this.drawBar(lane, i, left, right, y);
    }
    if (some) this.drawCover(y);
  }

  // A column of a pixel for the bars in it: the fuller, the more of the colour; never none.
  drawCover(y) {
    const c = this.context;
    for (const kind of KINDS) {
      this.cover[kind].forEach((share, x) => {
        if (!share) return;
        c.globalAlpha = Math.min(0.3 + share, 1);
        this.fill(kind, x, y, 1, BAR);
        this.drawn++;
      });
    }
    c.globalAlpha = 1;
  }

  drawBar(lane, i, left, right, y) {
    const { context: c, model } = this, kind = kindOf(model, lane, i);
    const [a, b] = [Math.max(left, GUTTER - 2), Math.min(right, this.width + 2)];
    // A wait inside of a call of the hook is drawn into its lower edge.
    const inset = kind === "wait" && lane.role === ROLE.program && i > 0 && lane.until[i - 1] > lane.start[i] ? BAR - 4 : 0;
    this.drawn++;
    const gap = right - left > 4 ? 1 : 0;
    this.fill(kind, a, y + inset, Math.max(b - a - gap, 1), BAR - inset);
    const wait = waitOf(model, lane, i);
    if (wait * this.scale >= 2) this.drawLate(left, left + wait * this.scale, y);
    if (lane.role === ROLE.communication) {
      const { start, end } = model.ranks[lane.place].exposed;
      for (let n = firstAfter(end, lane.start[i]); n < start.length && start[n] < lane.end[i]; n++) {
        const from = Math.max(this.x(Math.max(start[n], lane.start[i])), a), to = Math.min(this.x(Math.min(end[n], lane.end[i])), b);
        if (to > from) this.fill("blocked", from, y + BAR - 3, Math.max(to - from - gap, 1), 3);
      }
    }
    if (b - a > 26 && !inset) this.drawLabel(labelsOf(model, lane, i), kind, a, Math.max(a, Math.min(left + wait * this.scale, b)), b, y);
  }

  // From `clear` on where it has room there, else across the stripes, on a ground of its own.
  drawLabel(labels, kind, a, clear, b, y) {
    const c = this.context;
    c.font = `11px ${FONT}`;
    for (const label of labels) {
      const width = c.measureText(label).width;
      const at = width + 10 <= b - clear ? clear : width + 10 <= b - a ? a : null;
      if (at === null) continue;
      if (at < clear) this.fill(kind, at + 1, y, width + 8, BAR - 3);
      c.fillStyle = this.colours["on-bar"];
      c.fillText(label, at + 5, y + BAR / 2 - 0.5);
      return;
    }
  }

  drawLate(left, right, y) {
    const c = this.context;
    left = Math.max(left, GUTTER - 4);
    right = Math.min(right, this.width + 4);
    if (right <= left) return;
    c.save();
    c.beginPath();
    c.rect(left, y, right - left, BAR);
    c.clip();
    c.globalAlpha = 0.55;
    this.fill("panel", left, y, right - left, BAR);
    c.globalAlpha = 1;
    c.strokeStyle = this.colours.late;
    c.lineWidth = 1.6;
    c.beginPath();
    const offset = (left % 5) + 5;
    for (let x = left - BAR - offset; x < right; x += 5) {
      c.moveTo(x, y + BAR);
      c.lineTo(x + BAR, y);
    }
    c.stroke();
    c.restore();
  }

  // Frames around the same collective on all ranks, joined from start to start, with how late each came.
  drawSame({ lane, i }) {
    const { context: c, model, colours } = this, group = lane.group[i];
    const members = group >= 0 ? model.members[group] : [{ lane, i }];
    const first = group >= 0 ? firstStart(model, group) : 0;
    c.save();
    c.beginPath();
    c.rect(GUTTER, RULER, this.width - GUTTER, this.height - RULER);
    c.clip();
    c.strokeStyle = colours.same;
    c.lineWidth = 1;
    c.setLineDash([3, 3]);
    c.beginPath();
    members.forEach((bar, n) => {
      const x = this.x(bar.lane.start[bar.i]), y = this.y(bar.lane);
      if (n) c.lineTo(x, y);
      c.moveTo(x, y + LANE);
    });
    c.stroke();
    c.setLineDash([]);
    for (const bar of members) {
      const left = Math.round(this.x(bar.lane.start[bar.i])), y = this.y(bar.lane) + (LANE - BAR) / 2;
      const right = Math.max(Math.round(this.x(bar.lane.end[bar.i])), left + 2);
      c.lineWidth = bar.lane === lane ? 3 : 2;
      c.strokeRect(left, y - 1, right - left, BAR + 2);
      if (members.length < 2) continue;
      const late = bar.lane.start[bar.i] - first, text = late ? `+${formatTime(late, 2)}` : "first";
      c.font = `600 11px ${FONT}`;
      const width = c.measureText(text).width + 8;
      const at = left - width - 3 < GUTTER ? right + 3 : left - width - 3;
      this.fill("same", at, y, width, BAR);
      c.fillStyle = colours.panel;
      c.fillText(text, at + 4, y + BAR / 2);
    }
    c.restore();
  }

  drawRuler() {
    const { context: c, colours, model } = this;
    this.fill("panel", 0, 0, this.width, RULER);
    this.fill("line", 0, RULER - 1, this.width, 1);
    this.fill("line", GUTTER - 1, 0, 1, this.height);
    c.font = `11px ${FONT}`;
    c.save();
    c.beginPath();
    c.rect(GUTTER, 0, this.width - GUTTER, this.height);
    c.clip();
    const rough = ((this.to - this.from) / (this.width - GUTTER)) * 110, power = 10 ** Math.floor(Math.log10(rough));
    const tick = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
    const [unit, name] = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"]].find(([size]) => this.to >= size) || [1e3, "µs"];
    const digits = Math.max(0, Math.ceil(Math.log10(unit / tick) - 1e-9));
    for (let t = Math.ceil(this.from / tick) * tick; t < this.to; t += tick) {
      this.fill("line", Math.round(this.x(t)), RULER - 6, 1, 6);
      c.fillStyle = colours.soft;
      c.fillText(`${(t / unit).toFixed(digits)} ${name}`, this.x(t) + 4, RULER - 11);
    }
    let clear = -Infinity; // numbers of steps don't cover each other
    model.steps.forEach((step, n) => {
      const right = this.x(step.to), left = this.x(n ? model.steps[n - 1].to : step.from), narrow = right - left < 50;
      if (right < GUTTER || left > this.width) return;
      this.fill("soft", Math.round(right), 0, 1, narrow ? 4 : 20);
      c.globalAlpha = right - left < 8 ? 0.1 : 0.35;
      this.fill("soft", Math.round(right), RULER, 1, this.height);
      c.globalAlpha = 1;
      const text = `step ${n + 1}`, width = c.measureText(text).width, at = Math.max(left, GUTTER) + 5;
      if (at < clear || (!narrow && at + width > right) || at + width > this.width) return;
      c.fillStyle = colours.text;
      c.fillText(text, at, 12);
      clear = at + width + (narrow ? 8 : 0);
    });
    c.restore();
    c.fillStyle = colours.soft;
    c.fillText("time", 10, RULER - 11);
  }

  // For each pixel of the whole recording the share of the ranks' time that is exposed.
  exposedShares(width) {
    if (this.shares?.length === width) return this.shares;
    const { first, last, ranks } = this.model, shares = new Float32Array(width), each = (last - first) / width;
    for (const { exposed } of ranks) {
      exposed.start.forEach((start, n) => {
        const end = exposed.end[n];
        for (let x = Math.max(Math.floor((start - first) / each), 0); x < width && first + x * each < end; x++) {
          shares[x] += (Math.min(end, first + (x + 1) * each) - Math.max(start, first + x * each)) / each / ranks.length;
        }
      });
    }
    return (this.shares = shares);
  }

  drawOverview() {
    const c = this.overview.getContext("2d"), { colours, model } = this;
    const width = this.overview.clientWidth, height = this.overview.clientHeight;
    if (!width) return;
    c.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    c.fillStyle = colours.compute;
    c.fillRect(0, 0, width, height);
    c.fillStyle = colours.blocked;
    this.exposedShares(width).forEach((share, x) => share && c.fillRect(x, height * (1 - Math.min(share, 1)), 1, height));
    const at = (time) => ((time - model.first) / (model.last - model.first)) * width;
    const left = Math.max(at(this.from), 0), right = Math.min(Math.max(at(this.to), left + 3), width);
    c.fillStyle = colours.page;
    c.globalAlpha = 0.65;
    c.fillRect(0, 0, left, height);
    c.fillRect(right, 0, width - right, height);
    c.globalAlpha = 1;
    c.strokeStyle = colours.accent;
    c.lineWidth = 2;
    c.strokeRect(left + 1, 1, Math.max(right - left - 2, 2), height - 2);
  }
}
