// The live monitor on the Train node: reward curve, newest videos, time left, "Finish now".
//
// The state of a run lives in its folder on the server and nowhere else. The monitor only reads a
// read-only route of the pack, so it shows the same after a page refresh as before it, and also
// when another browser started the run.

import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";

const NODE = "FlashGRPOTrain";
const VIDEO_NODE = "FlashGRPOCompare";
const POLICY = "FLASHGRPO_POLICY";
const WIDGET = "flashgrpo_monitor";
const HEIGHT = 264; // of the widget in canvas units: constant, so that nothing moves or overlaps
const POLL_TRAINING = 1500; // milliseconds
const POLL_IDLE = 15000;
const SVG = "http://www.w3.org/2000/svg"; // the name of the XML namespace, not an address

// English texts; locales/<language>/main.json replaces them under the key "flashgrpo".
const TEXT = {
  waiting: "The reward curve appears here while this node trains.",
  no_run_name: "Link a policy with a run name to see its training here.",
  offline: "No answer from the server, trying again.",
  training: "training",
  unfinished: "stopped, can be resumed",
  finished: "finished",
  failed: "failed",
  iteration: "iteration",
  time_left: "about {time} left",
  finish: "Finish now",
  finish_help: "Stop after this iteration, judge the result and return the LoRA.",
  finishing: "Finishing after this iteration",
  finish_failed: "The run is not training here any more.",
  legend_reward: "training reward",
  legend_validation: "validation (95 %)",
  legend_baseline: "before training",
  newest: "newest video",
  hours: "h",
  minutes: "min",
  seconds: "s",
  phase_load: "loading the model",
  phase_encode: "encoding prompts",
  phase_rollout: "sampling videos",
  phase_decode: "decoding videos",
  phase_score: "scoring videos",
  phase_update: "updating the LoRA",
  phase_evaluate: "judging on held-out prompts",
  phase_save: "saving",
  phase_wait: "waiting for a worker",
};

const STYLE = `
.flashgrpo-monitor { box-sizing: border-box; width: 100%; height: ${HEIGHT - 20}px;
  min-height: ${HEIGHT - 20}px; display: flex; flex-direction: column; gap: 4px; padding: 8px;
  overflow: hidden; border-radius: 6px; font: 12px/1.35 system-ui, sans-serif; text-align: left;
  color: var(--input-text, #ddd); background: var(--comfy-input-bg, #222); }
.flashgrpo-monitor.flashgrpo-monitor-rows { grid-column: 1 / -1; }
.flashgrpo-row { display: flex; align-items: center; gap: 8px; min-width: 0; flex: none; }
.flashgrpo-grow { flex: 1 1 0; min-width: 0; overflow: hidden; text-overflow: ellipsis;
  white-space: nowrap; }
.flashgrpo-strong { font-weight: 600; }
.flashgrpo-quiet { color: var(--descrip-text, #999); font-size: 11px; }
.flashgrpo-warning { color: #e0a030; font-size: 11px; }
.flashgrpo-monitor button { flex: none; cursor: pointer; padding: 1px 10px; border-radius: 4px;
  font: inherit; color: inherit; background: transparent;
  border: 1px solid var(--border-color, #555); }
.flashgrpo-monitor button:hover:enabled { border-color: currentColor; }
.flashgrpo-monitor button:disabled { opacity: 0.6; cursor: default; }
.flashgrpo-chart { flex: 1 1 0; min-height: 0; position: relative; }
.flashgrpo-chart svg { position: absolute; inset: 0; width: 100%; height: 100%; }
.flashgrpo-chart text { fill: var(--descrip-text, #999); font: 10px system-ui, sans-serif; }
.flashgrpo-message { position: absolute; inset: 0; display: flex; align-items: center;
  justify-content: center; text-align: center; padding: 0 24px; }
.flashgrpo-key { display: inline-block; width: 14px; height: 0; margin-right: 4px;
  vertical-align: middle; border-top: 2px solid currentColor; }
.flashgrpo-film { flex: none; width: 100%; height: 44px; object-fit: contain;
  object-position: left center; }
.flashgrpo-monitor [hidden] { display: none; }
`;

const COLOUR = { reward: "#4c9be8", validation: "#f0a23c", baseline: "#8a8a8a" };

let texts = TEXT;

/** Load the texts of the interface's language; English stays when there are none. */
async function loadTexts() {
  try {
    const language = app.extensionManager?.setting?.get?.("Comfy.Locale") ?? "en";
    const answer = await api.fetchApi("/i18n");
    if (answer.ok) {
      texts = { ...TEXT, ...((await answer.json())?.[language]?.flashgrpo ?? {}) };
    }
  } catch {
    texts = TEXT; // an older server has no such route
  }
}

/** Make an HTML element; texts only ever become text nodes. */
function html(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

/** Make an SVG element with attributes. */
function svg(tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

/** Keep the entries of `rows` whose first `count` values are finite numbers. */
function finiteRows(rows, count) {
  if (!Array.isArray(rows)) return [];
  return rows.filter(
    (row) => Array.isArray(row) && row.slice(0, count).every(Number.isFinite) && row.length >= count,
  );
}

/** "2 h 05 min", "12 min" or "40 s". */
function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} ${texts.seconds}`;
  const minutes = Math.round(whole / 60);
  if (minutes < 60) return `${minutes} ${texts.minutes}`;
  const rest = String(minutes % 60).padStart(2, "0");
  return `${Math.floor(minutes / 60)} ${texts.hours} ${rest} ${texts.minutes}`;
}

/** Round steps between two values: at most `count` of them. */
function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= raw);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) {
    found.push(value);
  }
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return found.map((value) => [value, value.toFixed(Math.min(8, digits))]);
}

/** Mean of the last `width` values at every position: the trend in a noisy curve. */
function trailingMean(points, width) {
  return points.map(([x], index) => {
    const part = points.slice(Math.max(0, index - width + 1), index + 1);
    return [x, part.reduce((sum, [, y]) => sum + y, 0) / part.length];
  });
}

/** Draw the reward curve of `run` into an SVG of the given size. */
function drawChart(run, width, height) {
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  const rewards = finiteRows(run.rewards, 2);
  const validation = finiteRows(run.validation, 2).map((row) => {
    const [x, mean, difference = 0, low = difference, high = difference] = row.map(Number);
    const baseline = mean - difference;
    return { x, mean, baseline, low: baseline + low, high: baseline + high };
  });
  const baseline = validation.length ? validation[0].baseline : null;
  const values = [
    ...rewards.map(([, y]) => y),
    ...validation.flatMap((point) => [point.mean, point.low, point.high, point.baseline]),
  ].filter(Number.isFinite);
  if (!values.length) return picture;

  let low = Math.min(...values);
  let high = Math.max(...values);
  const room = (high - low || Math.abs(high) || 1) * 0.08;
  low -= room;
  high += room;
  const last = Math.max(1, run.iterations || 0, ...rewards.map(([x]) => x));
  const box = { left: 40, right: width - 10, top: 6, bottom: height - 16 };
  const px = (x) => box.left + (x / last) * (box.right - box.left);
  const py = (y) => box.bottom - ((y - low) / (high - low)) * (box.bottom - box.top);

  for (const [value, label] of ticks(low, high, Math.max(2, Math.floor(height / 34)))) {
    picture.append(
      svg("line", {
        x1: box.left, x2: box.right, y1: py(value), y2: py(value), stroke: "currentColor",
        "stroke-opacity": 0.14,
      }),
      svg("text", { x: box.left - 5, y: py(value) + 3, "text-anchor": "end" }, label),
    );
  }
  for (const [value, label] of ticks(0, last, Math.max(2, Math.floor(width / 90)))) {
    if (!Number.isInteger(Number(label))) continue;
    picture.append(
      svg("text", { x: px(value), y: height - 4, "text-anchor": "middle" }, label),
    );
  }
  if (baseline !== null) {
    picture.append(
      svg("line", {
        x1: box.left, x2: box.right, y1: py(baseline), y2: py(baseline), stroke: COLOUR.baseline,
        "stroke-dasharray": "5 4",
      }),
    );
  }
  const line = (points, attributes) =>
    svg("polyline", {
      points: points.map(([x, y]) => `${px(x).toFixed(1)},${py(y).toFixed(1)}`).join(" "),
      fill: "none", stroke: COLOUR.reward, "stroke-linejoin": "round", ...attributes,
    });
  if (rewards.length >= 12) {
    picture.append(
      line(rewards, { "stroke-width": 1, "stroke-opacity": 0.45 }),
      line(trailingMean(rewards, Math.max(4, Math.round(rewards.length / 12))), {
        "stroke-width": 2,
      }),
    );
  } else if (rewards.length > 1) {
    picture.append(line(rewards, { "stroke-width": 2 }));
  }
  if (rewards.length && rewards.length < 12) {
    for (const [x, y] of rewards) {
      picture.append(svg("circle", { cx: px(x), cy: py(y), r: 2.5, fill: COLOUR.reward }));
    }
  }
  for (const point of validation) {
    picture.append(
      svg("line", {
        x1: px(point.x), x2: px(point.x), y1: py(point.low), y2: py(point.high),
        stroke: COLOUR.validation, "stroke-width": 2, "stroke-opacity": 0.6,
      }),
      svg("circle", { cx: px(point.x), cy: py(point.mean), r: 3.5, fill: COLOUR.validation }),
    );
  }
  return picture;
}

/** A curve without axes, as high as a line of text. */
function sparkline(points, width = 44, height = 11) {
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height });
  picture.style.marginRight = "4px";
  const low = Math.min(...points.map(([, y]) => y));
  const high = Math.max(...points.map(([, y]) => y));
  const last = Math.max(1, points.at(-1)[0]);
  const places = points.map(([x, y]) => {
    const up = high > low ? (y - low) / (high - low) : 0.5;
    return `${((x / last) * width).toFixed(1)},${(1 + (1 - up) * (height - 2)).toFixed(1)}`;
  });
  picture.append(svg("polyline", {
    points: places.join(" "), fill: "none", stroke: COLOUR.reward, "stroke-width": 1.2,
  }));
  return picture;
}

/** The name of the run that `node` trains: the `run_name` widget where its policy comes from. */
function runNameOf(node) {
  const seen = new Set();
  const queue = [node];
  while (queue.length) {
    const current = queue.shift();
    if (!current || seen.has(current)) continue;
    seen.add(current);
    const widget = current.widgets?.find((item) => item.name === "run_name");
    if (widget && typeof widget.value === "string" && widget.value.trim()) {
      return widget.value.trim();
    }
    (current.inputs ?? []).forEach((input, slot) => {
      // "*" is the type of reroute nodes.
      if (input.type === POLICY || input.type === "*") queue.push(current.getInputNode?.(slot));
    });
  }
  return null;
}

/** Whether the server's id of an executing node (in subgraphs "12:5") is this node. */
function isNode(node, id) {
  return id != null && String(id).split(":").at(-1) === String(node.id);
}

async function getJson(route, signal) {
  const answer = await api.fetchApi(route, { signal, cache: "no-store" });
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  return answer.json();
}

/** The monitor of one Train node. */
class Monitor {
  constructor(node) {
    this.node = node;
    this.run = null;
    this.message = texts.waiting;
    this.finishing = null; // name of the run that was asked to finish
    this.timer = null;
    this.request = null;
    this.removed = false;
    this.build();
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.chart);
    this.wake = () => this.poll();
    document.addEventListener("visibilitychange", this.wake);
    this.schedule(0);
  }

  build() {
    this.root = html("div", "flashgrpo-monitor");
    // The canvas zooms with the wheel everywhere; the monitor has nothing to scroll.
    this.title = html("span", "flashgrpo-grow flashgrpo-strong");
    this.button = html("button", "", texts.finish);
    this.button.type = "button";
    this.button.hidden = true;
    this.button.title = texts.finish_help;
    this.button.addEventListener("click", () => this.finish());
    const head = html("div", "flashgrpo-row");
    head.append(this.title, this.button);

    this.state = html("div", "flashgrpo-quiet flashgrpo-grow");
    this.state.style.flex = "none";

    this.chart = html("div", "flashgrpo-chart");
    this.chart.dataset.testid = "flashgrpo-chart";

    this.legend = html("div", "flashgrpo-row flashgrpo-quiet");
    this.film = html("img", "flashgrpo-film");
    this.film.hidden = true;
    this.film.draggable = false;
    this.warning = html("div", "flashgrpo-warning flashgrpo-grow");
    this.warning.style.flex = "none";
    this.warning.hidden = true;
    this.root.append(head, this.state, this.chart, this.legend, this.film, this.warning);
  }

  schedule(delay) {
    clearTimeout(this.timer);
    if (!this.removed) this.timer = setTimeout(() => this.poll(), delay);
  }

  /** Read the run's state once and draw it; the next call is scheduled at the end. */
  async poll() {
    if (this.removed || document.hidden) return; // "visibilitychange" calls again
    this.request?.abort();
    const request = (this.request = new AbortController());
    let next = POLL_IDLE;
    try {
      const name = await this.findRun(request.signal);
      this.run = name
        ? await getJson(`/flashgrpo/runs/${encodeURIComponent(name)}`, request.signal)
        : null;
      if (request.signal.aborted) return;
      if (!this.run?.training) this.finishing = null;
      if (this.run?.training) next = POLL_TRAINING;
    } catch {
      if (request.signal.aborted) return;
      this.message = texts.offline; // what was drawn stays: the run may go on
      next = POLL_TRAINING * 4;
    }
    this.draw();
    this.schedule(next);
  }

  /** Name of the run to show, or null. Asks the list first: an unknown name is not an error. */
  async findRun(signal) {
    const runs = await getJson("/flashgrpo/runs", signal);
    const wanted = runNameOf(this.node);
    const found =
      runs.find((run) => run.name === wanted) ?? runs.find((run) => isNode(this.node, run.node_id));
    this.message = wanted || found ? texts.waiting : texts.no_run_name;
    return found?.name ?? null;
  }

  async finish() {
    const name = this.run?.name;
    if (!name) return;
    this.finishing = name;
    this.draw();
    try {
      const route = `/flashgrpo/runs/${encodeURIComponent(name)}/finish`;
      const answer = await api.fetchApi(route, { method: "POST" });
      if (!answer.ok) throw new Error(String(answer.status));
    } catch {
      this.finishing = null;
      this.warning.textContent = texts.finish_failed;
      this.warning.hidden = false;
    }
    this.schedule(POLL_TRAINING);
  }

  draw() {
    if (this.removed) return;
    const run = this.run;
    const width = Math.max(120, this.chart.clientWidth);
    const height = Math.max(60, this.chart.clientHeight);
    this.root.dataset.status = run ? (run.training ? "training" : run.status) : "none";
    this.root.dataset.points = String(finiteRows(run?.rewards, 2).length);
    this.chart.replaceChildren();
    this.button.hidden = !run?.training;
    this.button.disabled = this.finishing !== null;
    this.button.textContent = this.finishing !== null ? texts.finishing : texts.finish;
    if (!run) {
      this.title.textContent = "";
      this.state.textContent = "";
      this.legend.replaceChildren();
      this.film.hidden = true;
      this.warning.hidden = true;
      this.chart.append(html("div", "flashgrpo-message flashgrpo-quiet", this.message));
      return;
    }

    const state = run.training ? texts.training : (texts[run.status] ?? run.status);
    this.title.textContent = `${run.name} · ${state}`;
    const parts = [`${texts.iteration} ${run.iteration} / ${run.iterations}`];
    if (run.training && run.phase) {
      const count = run.phase_total > 0 ? ` ${run.phase_done}/${run.phase_total}` : "";
      parts.push((texts[`phase_${run.phase}`] ?? run.phase) + count);
    }
    if (run.training && Number.isFinite(run.eta)) {
      parts.push(texts.time_left.replace("{time}", duration(run.eta)));
    }
    if (this.message === texts.offline) parts.push(texts.offline);
    this.state.textContent = parts.join(" · ");
    this.state.title = parts.join("\n");

    const warnings = Array.isArray(run.warnings) ? run.warnings.filter(Boolean) : [];
    this.warning.hidden = warnings.length === 0;
    this.warning.textContent = warnings.length ? `⚠ ${warnings.at(-1)}` : "";
    this.warning.title = warnings.join("\n");

    if (finiteRows(run.rewards, 2).length || finiteRows(run.validation, 2).length) {
      this.chart.append(drawChart(run, width, height));
    } else {
      this.chart.append(html("div", "flashgrpo-message flashgrpo-quiet", texts.waiting));
    }
    this.drawLegend(run);

    // The address changes with the picture, so an unchanged picture is not fetched again.
    const film = typeof run.filmstrip === "string" && run.filmstrip.startsWith("/flashgrpo/");
    this.film.hidden = !film;
    if (film && this.film.dataset.route !== run.filmstrip) {
      this.film.dataset.route = run.filmstrip;
      this.film.alt = texts.newest;
      this.film.title = texts.newest;
      this.film.src = api.apiURL(run.filmstrip);
    }
  }

  drawLegend(run) {
    const entry = (colour, text, dashed) => {
      const item = html("span", "");
      const key = html("span", "flashgrpo-key");
      key.style.color = colour;
      if (dashed) key.style.borderTopStyle = "dashed";
      item.append(key, document.createTextNode(text));
      item.style.whiteSpace = "nowrap";
      return item;
    };
    const entries = [entry(COLOUR.reward, texts.legend_reward)];
    if (finiteRows(run.validation, 2).length) {
      entries.push(
        entry(COLOUR.validation, texts.legend_validation),
        entry(COLOUR.baseline, texts.legend_baseline, true),
      );
    }
    // One term is the curve itself; several are drawn small, each on its own scale.
    const terms = Object.entries(run.terms ?? {}).map(([name, rows]) => [name, finiteRows(rows, 2)]);
    for (const [name, points] of terms.filter(([, rows]) => terms.length > 1 && rows.length)) {
      const item = html("span", "flashgrpo-term");
      item.append(sparkline(points), document.createTextNode(`${name} ${points.at(-1)[1].toFixed(3)}`));
      item.style.whiteSpace = "nowrap";
      entries.push(item);
    }
    this.legend.replaceChildren(...entries);
  }

  remove() {
    this.removed = true;
    clearTimeout(this.timer);
    this.request?.abort();
    this.observer.disconnect();
    document.removeEventListener("visibilitychange", this.wake);
  }
}

const monitors = new Set();

/** A training may have started or ended: look at once. */
function refreshAll() {
  for (const monitor of monitors) monitor.schedule(200);
}

app.registerExtension({
  name: "FlashGRPO.Monitor",

  async setup() {
    const style = html("style", "", STYLE);
    style.id = "flashgrpo-style";
    document.head.append(style);
    const events = ["execution_start", "executing", "executed", "execution_success",
      "execution_error", "execution_interrupted", "reconnected"];
    for (const event of events) api.addEventListener(event, refreshAll);
    await loadTexts();
    refreshAll();
  },

  nodeCreated(node) {
    // Without it the Nodes 2.0 renderer of frontend 1.32.9 takes the mp4 file for a picture.
    if (node.comfyClass === VIDEO_NODE) node.previewMediaType = "video";
    if (node.comfyClass !== NODE) return;
    const monitor = new Monitor(node);
    monitors.add(monitor);
    const widget = node.addDOMWidget(WIDGET, WIDGET, monitor.root, {
      serialize: false,
      hideOnZoom: false,
      getMinHeight: () => HEIGHT,
      getMaxHeight: () => HEIGHT,
      getValue: () => "",
      setValue: () => {},
    });
    // Out of the saved file: widgets_values are positional and belong to the schema.
    widget.serialize = false;

    const onRemoved = node.onRemoved;
    node.onRemoved = function (...rest) {
      monitors.delete(monitor);
      monitor.remove();
      return onRemoved?.apply(this, rest);
    };
    const onConfigure = node.onConfigure;
    node.onConfigure = function (...rest) {
      monitor.schedule(100); // the run name has just been read from the workflow
      return onConfigure?.apply(this, rest);
    };
  },
});
