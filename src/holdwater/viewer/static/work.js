// Shows the events of long work: the hits of a search, an index, the usage of models. It ends with the page.
"use strict";

const work = new Set(); // open streams

function openWork(address, handlers) {
  const stream = new EventSource(address);
  const end = (text) => {
    stream.close();
    work.delete(stream);
    handlers.end(text);
  };
  work.add(stream);
  stream.addEventListener("problem", (event) => showProblem(event.data));
  for (const [name, handle] of Object.entries(handlers)) {
    if (name !== "end") stream.addEventListener(name, (event) => handle(event.data));
  }
  stream.addEventListener("end", (event) => end(event.data));
  stream.addEventListener("over", () => end(""));
  stream.addEventListener("error", () => end("the connection ended before the work did"));
  return () => end("stopped");
}

function showProblem(text) {
  document.getElementById("problems").appendChild(document.createElement("p")).textContent = text;
}

function search(table) {
  const [status, stop, more] = ["search", "stop", "more"].map((id) => document.getElementById(id));
  const halt = openWork(table.dataset.hits, {
    hit: (row) => table.insertAdjacentHTML("beforeend", row), // rendered and escaped by the server
    progress: (text) => (status.textContent = text),
    more: (query) => {
      more.href = query;
      more.hidden = false;
      status.textContent = "the first hits are shown";
    },
    end: (text) => {
      if (text) status.textContent = text;
      stop.hidden = true;
      table.dataset.over = "";
    },
  });
  stop.addEventListener("click", halt);
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-work]");
  if (!button) return;
  button.disabled = true;
  const status = document.getElementById("work");
  const show = (text) => text && (status.textContent = text);
  const part = (html) => (document.getElementById("part").innerHTML = html); // escaped by the server
  openWork(button.dataset.work, { progress: show, part, end: show });
});

document.addEventListener("DOMContentLoaded", () => {
  const table = document.getElementById("hits");
  if (table) search(table);
});
addEventListener("pagehide", () => work.forEach((stream) => stream.close()));
addEventListener("pageshow", (event) => event.persisted && location.reload());
