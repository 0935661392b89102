// Curves that can be read off and zoomed into: uPlot in the place of the server's picture, which stays for files and print.
"use strict";

(() => {
  const HEIGHT = 280;
  const COLOURS = 6;
  const drawn = new Set();

  // The colour that a variable of the style sheet has now: canvases don't know variables.
  const probe = document.createElement("span");
  probe.hidden = true;
  document.body.append(probe);
  const colour = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };

  const short = (value) => (value === null || value === undefined ? "-" : String(Number(value.toPrecision(6))));

  // Ticks of powers with the digits that they have; uPlot leaves those out between them that it has no room for.
  const powers = (_plot, ticks) =>
    ticks.map((value) => (value === null ? "" : value >= 1e-3 && value < 1e6 ? short(value) : value.toExponential(0)));

  // Ticks with as many digits as tell them apart.
  const apart = (_plot, ticks, _axis, _space, step) =>
    ticks.map((value) => String(Number(value.toFixed(Math.min(Math.max(-Math.floor(Math.log10(step)), 0), 20)))));

  // What hardly differs gets a range that ticks can tell apart: uPlot fails on a narrower one.
  const wide = (_plot, low, high) => {
    if (low === null) return [0, 1];
    const least = 1e-6 * Math.max(Math.abs(low), Math.abs(high));
    return high - low < least ? [low - least, high + least] : uPlot.rangeNum(low, high, 0.1, true);
  };

  function guides(said) {
    return (plot) => {
      const { ctx, bbox } = plot;
      for (const [name, value] of Object.entries(said.guides)) {
        const y = plot.valToPos(value, "y", true);
        if (!(y >= bbox.top && y <= bbox.top + bbox.height)) continue;
        ctx.save();
        ctx.strokeStyle = ctx.fillStyle = colour("c1");
        ctx.setLineDash([5 * devicePixelRatio, 3 * devicePixelRatio]);
        ctx.beginPath();
        ctx.moveTo(bbox.left, y);
        ctx.lineTo(bbox.left + bbox.width, y);
        ctx.stroke();
        ctx.textAlign = "right";
        ctx.fillText(name, bbox.left + bbox.width - 4, y - 5);
        ctx.restore();
      }
    };
  }

  function options(said, width) {
    const names = Object.keys(said.curves);
    const axis = { stroke: colour("dim"), grid: { stroke: colour("faint"), width: 1 }, ticks: { stroke: colour("faint"), width: 1 } };
    const whole = [1, 2, 5].flatMap((n) => [...Array(12).keys()].map((power) => n * 10 ** power)).sort((a, b) => a - b);
    return {
      width,
      height: HEIGHT,
      scales: { x: { time: false }, y: said.powers ? { distr: 3 } : { range: wide } },
      cursor: { drag: { x: true, y: false } },
      series: [
        { label: said.index },
        ...names.map((name, i) => ({
          label: name,
          stroke: colour(`c${i % COLOURS}`),
          width: 2,
          points: { show: said.at.length <= 100, size: 6 },
          value: (_, value) => short(value),
        })),
      ],
      axes: [
        { ...axis, label: said.index, labelSize: 20, size: 36, ...(said.whole ? { incrs: whole } : {}) },
        { ...axis, label: said.unit, labelSize: 20, size: 68, values: said.powers ? powers : apart },
      ],
      hooks: { draw: [guides(said)] },
    };
  }

  // By keys: arrows go from point to point, + and - zoom around it, 0 shows everything.
  function steer(plot, place, said) {
    const say = document.createElement("p");
    say.className = "hidden-label";
    say.setAttribute("aria-live", "polite");
    place.append(say);
    let at = -1;
    const go = (to) => {
      at = Math.min(Math.max(to, 0), said.at.length - 1);
      plot.setCursor({ left: plot.valToPos(said.at[at], "x"), top: plot.over.clientHeight / 2 });
      const values = Object.entries(said.curves).map(([name, curve]) => `${name} ${short(curve[at])}`);
      say.textContent = `${said.index} ${short(said.at[at])}: ${values.join(", ")}`;
    };
    const zoom = (factor) => {
      const { min, max } = plot.scales.x;
      const middle = at < 0 ? (min + max) / 2 : said.at[at];
      const low = Math.max(said.at[0], middle - (middle - min) * factor);
      const high = Math.min(said.at.at(-1), middle + (max - middle) * factor);
      if (high > low) plot.setScale("x", { min: low, max: high });
    };
    const keys = {
      ArrowRight: () => go(at + 1),
      ArrowLeft: () => go(at - 1),
      Home: () => go(0),
      End: () => go(said.at.length - 1),
      "+": () => zoom(0.5),
      "-": () => zoom(2),
      0: () => plot.setScale("x", { min: said.at[0], max: said.at.at(-1) }),
    };
    place.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
      event.preventDefault();
      keys[event.key]();
    });
  }

  function draw(figure) {
    const said = JSON.parse(figure.dataset.curves);
    const picture = figure.querySelector("svg.plot");
    if (said.at.length < 2 || !picture) return;
    figure.querySelector(".curves")?.remove();
    const place = document.createElement("div");
    place.className = "curves";
    place.tabIndex = 0;
    place.setAttribute("role", "group");
    place.setAttribute("aria-label", `${picture.getAttribute("aria-label")}. Arrows read it off, + and - zoom, 0 shows all.`);
    picture.before(place);
    // Unlike a picture, a plot needs points in order.
    const order = [...said.at.keys()].sort((a, b) => said.at[a] - said.at[b]);
    const sorted = (values) => order.map((i) => values[i]);
    said.at = sorted(said.at);
    for (const name of Object.keys(said.curves)) said.curves[name] = sorted(said.curves[name]);
    picture.setAttribute("hidden", "");
    const plot = new uPlot(options(said, place.clientWidth), [said.at, ...Object.values(said.curves)], place);
    steer(plot, place, said);
    new ResizeObserver(() => {
      if (place.clientWidth && place.clientWidth !== plot.width) plot.setSize({ width: place.clientWidth, height: HEIGHT });
    }).observe(place);
    drawn.add(figure);
  }

  const drawAll = (from) => {
    for (const figure of from.querySelectorAll("figure[data-curves]")) if (!drawn.has(figure)) draw(figure);
  };
  const again = () => {
    const each = [...drawn].filter((figure) => figure.isConnected);
    drawn.clear();
    each.forEach(draw);
  };
  drawAll(document);
  document.addEventListener("htmx:load", (event) => drawAll(event.target.parentNode ?? document));
  new MutationObserver(again).observe(document.documentElement, { attributeFilter: ["data-theme"] });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
})();
