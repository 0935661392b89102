// What the pages do beside links and forms: theme, keys, copying, and events of a job. Every page works without it, by reloading.
"use strict";

const root = document.documentElement;
const one = (selector, from = document) => from.querySelector(selector);
const all = (selector, from = document) => [...from.querySelectorAll(selector)];

// Theme: a cookie, so that the server draws the page in it from the first byte.
function chooseTheme() {
  const shown = root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  root.dataset.theme = shown === "dark" ? "light" : "dark";
  document.cookie = `theme=${root.dataset.theme}; Path=/; SameSite=Strict; Max-Age=31536000`;
}

// Rows: j and k move, enter opens, as the row's link is what has the focus.
function moveRow(by) {
  const links = all("[data-row] [data-open]").filter((link) => link.offsetParent !== null);
  if (!links.length) return;
  const at = links.indexOf(document.activeElement);
  const next = at < 0 ? (by > 0 ? 0 : links.length - 1) : Math.min(Math.max(at + by, 0), links.length - 1);
  links[next].focus();
  links[next].scrollIntoView({ block: "nearest" });
}

const isTyping = (target) => target.matches("input, textarea, select, [contenteditable]");

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape" && isTyping(event.target)) {
    event.preventDefault(); // a field for searching would be emptied
    return event.target.blur();
  }
  if (isTyping(event.target) || one("dialog[open]")) return;
  const keys = {
    "/": () => one("[data-search]")?.focus(),
    "?": () => one("#keys").showModal(),
    j: () => moveRow(1),
    k: () => moveRow(-1),
    t: chooseTheme,
    g: () => location.assign(one(".brand").href),
    J: () => location.assign(new URL("jobs", one(".brand").href)),
  };
  if (!keys[event.key]) return;
  event.preventDefault();
  keys[event.key]();
});

// Modules that are open stand in the address, so that the view can be kept. `toggle` doesn't bubble: it is caught on its way.
document.addEventListener("toggle", (event) => {
  const tree = event.target.closest?.(".tree");
  if (!tree || !event.target.matches("details[data-at]")) return;
  const here = new URL(location);
  here.searchParams.delete("open");
  for (const module of all("details[data-at][open]", tree)) {
    if (here.search.length < 6000) here.searchParams.append("open", module.dataset.at);
  }
  if (here.href !== location.href) history.replaceState(history.state, "", here);
}, true);

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  if (button.matches("[data-theme-button]")) chooseTheme();
  if (button.matches("[data-keys]")) one("#keys").showModal();
  if (button.matches("[data-close]")) button.closest("dialog").close();
  if (button.matches("[data-copy]")) {
    const source = one(`#${CSS.escape(button.dataset.copy)}`);
    const said = button.dataset.said || (button.dataset.said = button.textContent);
    try {
      await navigator.clipboard.writeText(source.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(source);
      button.textContent = "Selected";
    }
    setTimeout(() => (button.textContent = said), 1500);
  }
});

// A job's events. The browser itself goes on with Last-Event-ID where a connection broke.
const LOG_LINES = 500;

function follow(place) {
  if (place.dataset.followed) return;
  place.dataset.followed = "yes";
  const events = new EventSource(place.dataset.events);
  if (one("[data-log]", place)) one("[data-log]", place).textContent = ""; // they come again, from the first on
  const data = (event) => JSON.parse(event.data).data;
  events.addEventListener("progress", (event) => {
    const { fraction, text } = data(event);
    const bar = one("progress", place);
    if (bar && typeof fraction === "number") bar.value = fraction;
    if (one("[data-progress-text]", place)) one("[data-progress-text]", place).textContent = text || "";
  });
  events.addEventListener("log", (event) => {
    const log = one("[data-log]", place);
    if (!log) return;
    log.hidden = false;
    const lines = log.textContent.split("\n").concat(data(event).line ?? data(event).text ?? "").slice(-LOG_LINES);
    log.textContent = lines.join("\n").replace(/^\n+/, "");
  });
  events.addEventListener("state", (event) => {
    const { state } = data(event);
    const label = one("[data-state]", place);
    if (label) label.textContent = state;
    if (!["done", "failed", "cancelled", "crashed"].includes(state)) return;
    events.close();
    // What the job came to is the server's to draw: the part is read again, and where it lies nothing else moves.
    const target = place.dataset.select ? one(place.dataset.select) : place;
    const same = new URL(place.dataset.then, location).pathname === location.pathname;
    htmx.ajax("GET", same ? location.pathname + location.search : place.dataset.then, { source: target, target, swap: "outerHTML", select: place.dataset.select });
  });
  addEventListener("pagehide", () => events.close());
}

// What was refused is said where the answer would have stood.
function say(target, text) {
  const problem = document.createElement("p");
  problem.className = "problem";
  problem.setAttribute("role", "alert");
  problem.textContent = text;
  target.replaceChildren(problem);
}
document.addEventListener("htmx:responseError", (event) => {
  const answer = new DOMParser().parseFromString(event.detail.xhr.responseText, "text/html");
  say(event.detail.target, one(".verdict", answer)?.textContent || "The service couldn't answer.");
});
document.addEventListener("htmx:sendError", (event) => say(event.detail.target, "The service can't be reached."));

const followAll = (from) => all("[data-events]", from).concat(from.matches?.("[data-events]") ? from : []).forEach(follow);
document.addEventListener("DOMContentLoaded", () => followAll(document));
document.addEventListener("htmx:load", (event) => followAll(event.detail.elt));
