"use strict";
(() => {
  const body = JSON.parse(document.getElementById("body").textContent);
  const PAGE = 10; // queries shown at a time
  const root = document.documentElement;

  function make(tag, text, name) {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text; // never markup
    if (name) element.className = name;
    return element;
  }

  function color(name) {
    return getComputedStyle(root).getPropertyValue("--" + name).trim();
  }

  // ---- charts ----

  function template() {
    const [text, line, panel] = ["text", "line", "panel"].map(color);
    const axis = { gridcolor: line, linecolor: line, showline: true, zerolinecolor: line };
    return {
      data: { bar: [{ error_y: { color: text } }] },
      layout: {
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: text }, xaxis: axis, yaxis: axis,
        hoverlabel: { bgcolor: panel, bordercolor: line, font: { color: text } },
      },
    };
  }

  function paint(trace) {
    const shade = color("c" + (trace.meta % 8));
    return { ...trace, line: { ...trace.line, color: shade }, marker: { ...trace.marker, color: shade } };
  }

  const plots = [];

  function lay() {
    for (const place of document.querySelectorAll("[data-charts]")) {
      for (const chart of body.charts[place.dataset.charts]) {
        const figure = make("figure");
        const caption = make("figcaption", chart.title);
        if (chart.note) caption.append(make("small", chart.note));
        const plot = make("div", undefined, "plot");
        plot.id = "chart-" + chart.id;
        figure.append(caption, plot);
        place.append(figure);
        plots.push([plot, chart.figure]);
      }
    }
  }

  async function draw() {
    for (const swatch of document.querySelectorAll(".swatch, .fill")) {
      swatch.style.background = color("c" + (Number(swatch.dataset.color) % 8));
    }
    if (!window.Plotly) return;
    for (const [plot, figure] of plots) {
      const layout = { ...figure.layout, template: template() };
      await window.Plotly.react(plot, figure.data.map(paint), layout, { responsive: true, displayModeBar: false });
    }
    root.dataset.drawn = String(plots.length);
  }

  async function load() {
    const packed = Uint8Array.from(atob(document.getElementById("library").textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = make("script", await new Response(stream).text());
    document.head.append(script);
  }

  // ---- queries ----

  const state = { shown: PAGE, matching: [] };

  function label(id) {
    return body.labels[id] ?? "label " + id;
  }

  function haystack(query) {
    const ids = [...query.positives];
    for (const view of query.runs) ids.push(...view.predictions.map((p) => p[0]), ...view.negatives.map((n) => n[0]));
    return [query.key, query.text, ...ids.map(label)].join("\n").toLowerCase();
  }

  const kinds = {
    all: () => true,
    weak: (query) => query.weak,
    suspect: (query) => query.runs.some((view) => view.suspects > 0),
    miss: (query) => query.runs.some((view) => view.hit === false),
    differ: (query) => new Set(query.runs.map((view) => (view.predictions[0] || [null])[0])).size > 1,
  };

  function list(title, rows) {
    const box = make("div");
    box.append(make("h5", title));
    const items = make("ul");
    for (const [text, score, name] of rows) {
      const item = make("li", undefined, name);
      item.append(make("span", text), make("span", score === null || score === undefined ? "" : score.toFixed(2)));
      items.append(item);
    }
    box.append(items);
    return box;
  }

  function article(query) {
    const box = make("article");
    const head = make("header");
    head.append(make("span", query.split), make("span", query.key), make("span", "row " + query.row.toLocaleString("en")));
    box.append(head, make("p", query.text));
    const views = make("div", undefined, "views");
    query.runs.forEach((view, number) => {
      const column = make("div");
      if (body.runs.length > 1) column.append(make("h4", body.runs[number]));
      const lists = make("div", undefined, "lists");
      const top = new Set(view.predictions.map((p) => p[0]));
      lists.append(list("positives", query.positives.map((id, i) => [label(id), view.positives[i], top.has(id) ? "hit" : ""])));
      if (view.predictions.length) {
        const positives = new Set(query.positives);
        lists.append(list("predictions", view.predictions.map(([id, score]) => [label(id), score, positives.has(id) ? "hit" : ""])));
      }
      if (view.negatives.length) {
        lists.append(list("hard negatives", view.negatives.map(([id, score, suspect]) => [label(id), score, suspect ? "suspect" : ""])));
      }
      column.append(lists);
      views.append(column);
    });
    box.append(views);
    return box;
  }

  function show() {
    document.getElementById("found").replaceChildren(...state.matching.slice(0, state.shown).map(article));
    document.getElementById("more").hidden = state.matching.length <= state.shown;
    document.getElementById("count").textContent = state.matching.length.toLocaleString("en") + " of " + body.queries.length.toLocaleString("en");
  }

  function search() {
    const words = document.getElementById("words").value.toLowerCase().split(/\s+/).filter(Boolean);
    const split = document.getElementById("split").value;
    const kind = kinds[document.getElementById("kind").value];
    state.matching = body.queries.filter(
      (query) => (split === "" || query.split === split) && kind(query) && words.every((word) => query.hay.includes(word)));
    state.shown = PAGE;
    show();
  }

  function prepare() {
    if (!body.queries.length) return;
    for (const query of body.queries) query.hay = haystack(query);
    const splits = document.getElementById("split");
    const whole = make("option", "every split");
    whole.value = "";
    splits.append(whole, ...[...new Set(body.queries.map((query) => query.split))].map((name) => {
      const option = make("option", name);
      option.value = name;
      return option;
    }));
    if (body.runs.length < 2) document.querySelector("#kind option[value=differ]").remove();
    document.getElementById("search").addEventListener("input", search);
    document.getElementById("search").addEventListener("submit", (event) => event.preventDefault());
    document.getElementById("more").addEventListener("click", () => { state.shown += PAGE; show(); });
    search();
  }

  // ---- tables ----

  function field(cell) {
    const text = (cell.dataset.value ?? cell.textContent).trim();
    const safe = /^[=+\-@\t]/.test(text) && isNaN(Number(text)) ? "'" + text : text; // a spreadsheet would run it
    return /[",\n]/.test(safe) ? '"' + safe.replaceAll('"', '""') + '"' : safe;
  }

  function csv(table) {
    return [...table.rows].map((row) => [...row.cells].map(field).join(",")).join("\r\n") + "\r\n";
  }

  function offer() {
    for (const box of document.querySelectorAll("[data-csv]")) {
      const button = make("button", "CSV ↓", "csv");
      button.type = "button";
      button.title = "download this table";
      button.addEventListener("click", () => {
        const link = make("a");
        link.href = URL.createObjectURL(new Blob(["\ufeff" + csv(box.querySelector("table"))], { type: "text/csv" }));
        link.download = box.dataset.csv.replace(/[^\w.-]+/g, "-") + ".csv";
        link.click();
        setTimeout(() => URL.revokeObjectURL(link.href), 1000);
      });
      box.after(button);
    }
  }

  // ---- theme ----

  const dark = matchMedia("(prefers-color-scheme: dark)");

  function theme(isDark) {
    root.classList.toggle("dark", isDark);
    draw();
  }

  theme(dark.matches);
  dark.addEventListener("change", (event) => theme(event.matches));
  document.getElementById("theme").addEventListener("click", () => theme(!root.classList.contains("dark")));
  prepare();
  offer();
  lay();
  load().then(draw).catch((error) => {
    for (const [plot] of plots) plot.replaceChildren(make("p", "This browser cannot unpack the chart library: " + error.message, "note"));
  });
})();
