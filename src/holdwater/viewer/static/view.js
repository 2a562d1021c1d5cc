// Keys, charts, toggles and live updates. Pages work without this script; they only load less by themselves.
"use strict";

const rows = () => [...document.querySelectorAll("main .rows tbody tr, main .turn")];

function select(step) {
  const all = rows();
  if (!all.length) return;
  const at = all.findIndex((row) => row.classList.contains("selected"));
  const next = all[Math.min(all.length - 1, Math.max(0, at + step))];
  if (at >= 0) all[at].classList.remove("selected");
  next.classList.add("selected");
  next.scrollIntoView({ block: "nearest" });
}

function follow(selector) {
  const link = document.querySelector(selector);
  if (link) link.click();
}

const KEYS = {
  j: () => select(1),
  k: () => select(-1),
  Enter: () => follow(".selected a"),
  n: () => follow("[data-next]"),
  p: () => follow("[data-previous]"),
  "[": () => follow("[data-earlier]"),
  "]": () => follow("[data-later]"),
  "/": () => document.querySelector("[data-find]")?.focus(),
  "?": () => document.getElementById("keys").showModal(),
};

document.addEventListener("keydown", (event) => {
  const typing = event.target.matches("input, select, textarea");
  if (typing || event.ctrlKey || event.metaKey || event.altKey || !(event.key in KEYS)) return;
  event.preventDefault();
  KEYS[event.key]();
});

document.addEventListener("change", (event) => {
  if (event.target.matches("[data-submit]")) event.target.form.requestSubmit();
  const toggled = event.target.dataset.toggle;
  if (toggled) {
    document.body.classList.toggle(`hide-${toggled}`, !event.target.checked);
    sessionStorage.setItem(`hide-${toggled}`, event.target.checked ? "" : "1");
  }
});

function restoreToggles() {
  for (const box of document.querySelectorAll("[data-toggle]")) {
    const name = `hide-${box.dataset.toggle}`;
    box.checked = !sessionStorage.getItem(name);
    document.body.classList.toggle(name, !box.checked);
  }
}

// A form with a search field of its own sends it nowhere else.
document.addEventListener("submit", (event) => {
  if (document.activeElement?.matches("[hx-get][type=search]")) event.preventDefault();
});

// A part that is loaded when it is unfolded.
document.addEventListener(
  "toggle",
  (event) => event.target.querySelector(":scope > [hx-trigger^=unfold]")?.dispatchEvent(new Event("unfold")),
  true,
);

// The outline marks the turn that is at the top of the window, and keeps it in sight.
function markTurn() {
  const turns = [...document.querySelectorAll(".turns .turn")];
  const rail = document.querySelector(".rail");
  if (!turns.length || !rail) return;
  const top = turns.findLast((turn) => turn.getBoundingClientRect().top < 120) ?? turns[0];
  const link = rail.querySelector(`[data-turn="${top.id.slice(5)}"]`);
  const marked = rail.querySelector("[aria-current]");
  if (!link || link === marked) return;
  marked?.removeAttribute("aria-current");
  link.setAttribute("aria-current", "true");
  const away = link.offsetTop - rail.scrollTop;
  if (away < 0 || away > rail.clientHeight - 40) rail.scrollTop = link.offsetTop - rail.clientHeight / 3;
}

let marking = 0;
document.addEventListener("scroll", () => {
  cancelAnimationFrame(marking);
  marking = requestAnimationFrame(markTurn);
});
document.addEventListener("htmx:after:swap", markTurn);

// The charts of a run share one time axis. A click asks for the attempts that ran at that moment.
const MiB = 1048576;
const CHARTS = [
  ["memory, MiB", { used: "memory", leased: "leased", limit: "memory_limit", sandboxes: "sandboxes" }, MiB],
  ["disk, GiB", { used: "disk_used", limit: "disk_limit", free: "disk_free" }, 1024 * MiB],
  ["attempts", { running: "running", workers: "workers" }, 1],
  ["loop lag, s", { lag: "lag" }, 1],
];
const COLOURS = ["#2a7ab0", "#2e8b57", "#c43d3d", "#8a5bc4", "#d49a1f", "#5b8a8a", "#b0567a", "#777"];

function drawMarks(marks) {
  return (plot) => {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.fillStyle = ctx.strokeStyle = "#c43d3d";
    for (const mark of marks) {
      const x = Math.round(plot.valToPos(mark.at, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.fillRect(x, bbox.top, 1, bbox.height);
    }
    ctx.restore();
  };
}

// A band along the axis: its colour says what limits the number of running attempts.
function drawBinds(at, binds, names) {
  return (plot) => {
    const { ctx, bbox } = plot;
    const place = (moment) => Math.round(plot.valToPos(moment, "x", true));
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    for (const [index, reason] of binds.entries()) {
      if (!reason) continue;
      const from = place(at[index]);
      ctx.fillStyle = COLOURS[names.indexOf(reason) % COLOURS.length];
      ctx.fillRect(from, bbox.top + bbox.height - 6, Math.max(1, place(at[index + 1] ?? at[index]) - from), 6);
    }
    ctx.restore();
  };
}

function nameBinds(box, names) {
  const line = box.appendChild(document.createElement("p"));
  line.className = "dim";
  line.append("limited by: ");
  for (const [index, name] of names.entries()) {
    const word = line.appendChild(document.createElement("span"));
    word.textContent = ` ■ ${name}`;
    word.style.color = COLOURS[index % COLOURS.length];
  }
}

async function readData(place, address) {
  const inlined = place.querySelector("script"); // in an export
  if (inlined) return JSON.parse(inlined.textContent);
  const reply = await fetch(address);
  return reply.ok ? reply.json() : null;
}

async function drawCharts(place) {
  const data = await readData(place, place.dataset.timeline);
  if (!data?.at) return;
  place.replaceChildren();
  if (data.at.length < 2) return;
  const binds = [...new Set(data.binds)].filter(Boolean);
  for (const [title, series, unit] of CHARTS) {
    const named = { ...series };
    const columns = Object.values(series).map((name) => data[name].map((value) => value / unit));
    if (title === "attempts") {
      for (const [reason, values] of Object.entries(data.waiting)) {
        named[`waiting: ${reason}`] = reason;
        columns.push(values);
      }
    }
    const box = place.appendChild(document.createElement("div"));
    box.className = "chart";
    new uPlot(
      {
        title,
        width: place.clientWidth,
        height: 170,
        cursor: { sync: { key: "run" } },
        hooks: {
          draw: [drawMarks(data.marks), ...(title === "attempts" ? [drawBinds(data.at, data.binds, binds)] : [])],
          ready: [(plot) => plot.over.addEventListener("click", () => showMoment(place, plot.posToVal(plot.cursor.left, "x")))],
        },
        series: [{}, ...Object.keys(named).map((label, at) => ({ label, stroke: COLOURS[at % COLOURS.length], width: 1.5 }))],
        axes: [{ stroke: "#888", grid: { stroke: "#8883" } }, { stroke: "#888", grid: { stroke: "#8883" }, size: 60 }],
      },
      [data.at, ...columns],
      box,
    );
    if (title === "attempts" && binds.length) nameBinds(box, binds);
  }
  const marks = place.appendChild(document.createElement("p"));
  marks.className = "dim";
  marks.textContent = data.marks.map((mark) => `${new Date(mark.at * 1000).toLocaleTimeString()} ${mark.label}`).slice(-8).join(" · ");
}

function showMoment(place, at) {
  if (!place.dataset.moment) return; // in an export
  htmx.ajax("GET", `${place.dataset.moment}?at=${Math.round(at)}`, { target: "#moment", swap: "innerHTML" });
}

// The memory of one sandbox.
function drawMemory(place) {
  const values = place.dataset.values.split(",").map((kib) => kib / 1024);
  const times = values.map((_, at) => at * place.dataset.step);
  const axis = { stroke: "#888", grid: { stroke: "#8883" } };
  new uPlot(
    {
      title: "memory of the sandbox, MiB, by seconds",
      width: Math.min(place.clientWidth, 900),
      height: 150,
      scales: { x: { time: false }, y: { range: (_, __, most) => [0, Math.max(1, 1.1 * most)] } },
      series: [{ label: "s" }, { label: "MiB", stroke: COLOURS[0], fill: "#2a7ab022", width: 1.5, value: (_, v) => v?.toFixed(1) }],
      axes: [axis, { ...axis, size: 60 }],
    },
    [times, values],
    place,
  );
}

// One stream for each page: the server says that something changed, the page asks for its new state.
async function refresh() {
  const reply = await fetch(location.href);
  const page = new DOMParser().parseFromString(await reply.text(), "text/html");
  if (!reply.ok) {
    document.querySelector("main").replaceChildren(...page.querySelector("main").childNodes); // says why
    return;
  }
  for (const id of ["live", "live-control", "live-rest"]) {
    const found = page.getElementById(id);
    if (found) document.getElementById(id)?.replaceWith(found);
  }
  const charts = document.getElementById("charts");
  if (charts) await drawCharts(charts);
  for (const place of document.querySelectorAll(".memory[data-values]:empty")) drawMemory(place);
  htmx.process(document.querySelector("main")); // the new parts have parts that are loaded when they are unfolded
  document.dispatchEvent(new Event("refreshed"));
}

// The view has ended, or cannot be reached: the browser tries again, and the page says that it is old.
function showLoss(lost) {
  let note = document.getElementById("lost");
  if (lost && !note) {
    note = document.createElement("p");
    note.id = "lost";
    note.className = "problem";
    note.textContent = `No connection to the view: this page shows the state of ${new Date().toLocaleTimeString()}.`;
    document.querySelector("main").prepend(note);
  } else if (!lost) note?.remove();
}

// A transcript or a log that grows: only its new end is asked for, so that the reader's place stays.
async function grow() {
  for (const tail of document.querySelectorAll("[data-tail]")) {
    await htmx.ajax("GET", tail.dataset.tail, { target: tail, swap: "outerHTML" });
  }
}

const update = () => (document.querySelector("[data-tail]") ? grow() : refresh());

function listen(place) {
  const stream = new EventSource(place.dataset.live);
  let busy = false;
  let more = false; // a change that comes while the page refreshes is seen right after it
  async function catchUp() {
    more = true;
    if (busy) return;
    busy = true;
    try {
      while (more) {
        more = false;
        await update();
      }
    } finally {
      busy = false;
    }
  }
  stream.addEventListener("changed", catchUp);
  stream.addEventListener("over", () => {
    stream.close();
    catchUp();
  });
  stream.addEventListener("error", () => showLoss(true));
  stream.addEventListener("open", () => {
    showLoss(false);
    if (document.querySelector("[data-tail]")) catchUp(); // it may have grown since the page was made
  });
  addEventListener("pagehide", () => stream.close());
}

document.addEventListener("DOMContentLoaded", () => {
  const charts = document.getElementById("charts");
  if (charts) drawCharts(charts);
  restoreToggles();
  markTurn();
  for (const place of document.querySelectorAll(".memory[data-values]")) drawMemory(place);
  const live = document.querySelector("[data-live]");
  if (live) listen(live);
});
