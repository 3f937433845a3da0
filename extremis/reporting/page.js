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
    const axis = {
      gridcolor: line, linecolor: line, showline: true, zerolinecolor: line,
      automargin: true, title: { standoff: 8, font: { size: 12 } },
    };
    return {
      layout: {
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: text, size: 12 }, xaxis: axis,
        yaxis: axis, margin: { l: 48, r: 12, t: 8, b: 40 }, hovermode: "x unified", hoverdistance: -1, boxmode: "group",
        bargap: 0.15, legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11 } },
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
        if (chart.said) {
          const said = make("p", undefined, "said");
          said.append(make("b", chart.title), ": " + chart.said + ".");
          place.before(said);
          continue;
        }
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

  // An open document in a frame delays the page's load event, so that a print or a picture after it has the charts.
  function hold() {
    const frame = make("iframe");
    frame.hidden = true;
    document.body.append(frame);
    frame.contentDocument?.open();
    return () => { frame.contentDocument?.close(); frame.remove(); };
  }

  async function unpack(id) {
    const packed = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
    return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  }

  async function load() {
    document.head.append(make("script", await unpack("library")));
    if (body.tables.length) listLabels(JSON.parse(await unpack("packed")));
  }

  // ---- queries and labels ----

  function name(id) {
    const [text, key, , shared] = body.labels[id] ?? ["label " + id];
    const box = make("span", text);
    if (shared) box.append(" ", make("small", key));
    return box;
  }

  function named(ids) {
    return [...ids].map((id) => (body.labels[id] ?? []).slice(0, 2).join("\n"));
  }

  const kinds = {
    all: () => true,
    weak: (query) => query.weak,
    suspect: (query) => query.runs.some((view) => view.suspects > 0),
    miss: (query) => query.runs.some((view) => view.hit === false),
    differ: (query) => new Set(query.runs.map((view) => (view.predictions[0] || [null])[0])).size > 1,
  };

  const score = (value) => (value === null || value === undefined ? "" : value.toFixed(2));

  function list(title, rows, className) {
    const box = make("div", undefined, className);
    box.append(make("h5", title));
    const items = make("ul");
    for (const [what, number, mark] of rows) {
      const item = make("li", undefined, mark);
      item.append(what, make("span", number));
      items.append(item);
    }
    box.append(items);
    return box;
  }

  function article(facts, text, listsOf) {
    const box = make("article");
    const head = make("header");
    head.append(...facts.map((fact) => make("span", fact)));
    const views = make("div", undefined, "views");
    body.runs.forEach((run, number) => {
      const column = make("div");
      if (body.runs.length > 1) column.append(make("h4", run));
      const lists = make("div", undefined, "lists");
      lists.append(...listsOf(number).filter(Boolean));
      column.append(lists);
      views.append(column);
    });
    box.append(head, make("p", text), views);
    return box;
  }

  function ofQuery(query) {
    const facts = [query.split, query.key, "row " + query.row.toLocaleString("en")];
    const positives = new Set(query.positives);
    return article(facts, query.text, (number) => {
      const view = query.runs[number];
      const top = new Set(view.predictions.map((p) => p[0]));
      return [
        list("positives", query.positives.map((id, i) => [name(id), score(view.positives[i]), top.has(id) ? "hit" : ""])),
        view.predictions.length && list("predictions", view.predictions.map(
          ([id, value]) => [name(id), score(value), positives.has(id) ? "hit" : ""]), "ranked"),
        view.negatives.length && list("hard negatives", view.negatives.map(
          ([id, value, suspect]) => [name(id), score(value), suspect ? "suspect" : ""])),
      ];
    });
  }

  const first = (query, number) => query.runs[number].predictions.slice(0, body.k).map((p) => p[0]);

  function ofLabel(label) {
    const [text, key, points] = body.labels[label.id];
    return article([key, points.toLocaleString("en") + " training points"], text, (number) => {
      const missed = label.queries.filter((query) => !first(query, number).includes(label.id));
      const wrong = new Map();
      for (const query of missed) {
        for (const id of first(query, number)) {
          if (!query.positives.includes(id)) wrong.set(id, (wrong.get(id) ?? 0) + 1);
        }
      }
      const confused = [...wrong].sort((a, b) => b[1] - a[1]).slice(0, PAGE);
      const near = body.near[number][label.id] ?? [];
      const more = label.queries.length > PAGE ? `, ${PAGE} of ${label.queries.length}` : "";
      return [
        label.queries.length && list("its queries on this page" + more, label.queries.slice(0, PAGE).map(
          (query) => [make("span", query.text), query.key, missed.includes(query) ? "" : "hit"]), "cut"),
        near.length && list("nearest labels", near.map(([id, cosine]) => [name(id), score(cosine)])),
        confused.length && list("predicted instead", confused.map(([id, count]) => [name(id), "× " + count])),
      ];
    });
  }

  function find(prefix, items, show, matches = () => true) {
    const at = (id) => document.getElementById(prefix + id);
    let found = items, shown = PAGE;
    function lay() {
      at("found").replaceChildren(...found.slice(0, shown).map(show));
      at("more").hidden = found.length <= shown;
      at("count").textContent = found.length.toLocaleString("en") + " of " + items.length.toLocaleString("en");
    }
    function search() {
      const words = at("words").value.toLowerCase().split(/\s+/).filter(Boolean);
      found = items.filter((item) => matches(item) && words.every((word) => item.hay.includes(word)));
      shown = PAGE;
      lay();
    }
    at("search").addEventListener("input", search);
    at("search").addEventListener("submit", (event) => event.preventDefault());
    at("more").addEventListener("click", () => { shown += PAGE; lay(); });
    search();
  }

  function prepare() {
    if (!body.queries.length) return;
    const labels = Object.keys(body.labels).map(Number).map(
      (id) => ({ id, hay: named([id])[0].toLowerCase(), queries: [], missed: 0 }));
    const byId = new Map(labels.map((label) => [label.id, label]));
    for (const query of body.queries) {
      const ids = query.runs.flatMap((view) => [...view.predictions, ...view.negatives].map((pair) => pair[0]));
      query.hay = [query.key, query.text, ...named(new Set([...query.positives, ...ids]))].join("\n").toLowerCase();
      for (const label of query.positives.map((id) => byId.get(id)).filter(Boolean)) {
        label.queries.push(query);
        label.missed += query.runs.filter((view, number) => !first(query, number).includes(label.id)).length;
      }
    }
    labels.sort((a, b) => b.missed - a.missed || a.id - b.id);
    const splits = document.getElementById("split");
    const whole = make("option", "every split");
    whole.value = "";
    splits.append(whole, ...[...new Set(body.queries.map((query) => query.split))].map((split) => {
      const option = make("option", split);
      option.value = split;
      return option;
    }));
    if (body.runs.length < 2) document.querySelector("#kind option[value=differ]").remove();
    find("", body.queries, ofQuery, (query) => {
      const split = splits.value;
      return (split === "" || query.split === split) && kinds[document.getElementById("kind").value](query);
    });
    find("label-", labels, ofLabel);
  }

  // ---- every label ----

  const ROWS = 25;
  const ROUND = (value) => (value === null ? "" : value.toFixed(1));
  const COUNT = (value) => value.toLocaleString("en");
  const COLUMNS = [
    ["label", "name"], ["F1", "F1", ROUND], ["precision", "precision", ROUND], ["recall", "recall", ROUND],
    ["positives", "support", COUNT], ["given", "predicted", COUNT], ["average precision", "average_precision", ROUND],
    ["median rank", "median_rank"], ["training points", "training_points", COUNT],
  ];
  const WHICH = {
    all: () => true,
    lost: (row) => row.support > 0 && row.found === 0,
    silent: (row) => row.predicted === 0,
    wrong: (row) => row.predicted > 2 * row.found,
    good: (row) => row.support === row.found && row.predicted === row.found,
  };

  function rowsOf(columns) {
    const times = new Map();
    for (const text of columns.text) times.set(text, (times.get(text) ?? 0) + 1);
    return columns.label.map((_, place) => {
      const row = {};
      for (const [name, values] of Object.entries(columns)) row[name] = values[place];
      row.name = row.text || row.label;
      row.shared = row.text && times.get(row.text) > 1;
      row.hay = (row.text + "\n" + row.label).toLowerCase();
      if (row.support && row.median_rank === null) row.median_rank = Infinity;
      return row;
    });
  }

  function confused(row, name) {
    return row[name].map((key, i) => (row[name + "_texts"][i] || key) + " (" + COUNT(row[name + "_queries"][i]) + ")").join(", ");
  }

  function details(row) {
    const box = make("td", undefined, "details");
    box.colSpan = COLUMNS.length;
    const list = make("dl");
    const missed = row.support - row.found, wrong = row.predicted - row.found;
    const facts = [
      ["key", row.label],
      missed && ["missed", `${COUNT(missed)} of ${COUNT(row.support)} queries`],
      row.missed_for.length && ["given there instead", confused(row, "missed_for")],
      row.missed_query && ["for example", row.missed_query + ": " + row.missed_query_text],
      wrong && ["given wrongly", `${COUNT(wrong)} of ${COUNT(row.predicted)} times`],
      row.given_for.length && ["missed there", confused(row, "given_for")],
      row.wrong_query && ["for example", row.wrong_query + ": " + row.wrong_query_text],
    ];
    for (const [term, text] of facts.filter(Boolean)) list.append(make("dt", term), make("dd", text));
    box.append(list);
    const line = make("tr");
    line.append(box);
    return line;
  }

  function listLabels(tables) {
    const at = (id) => document.getElementById("every-" + id);
    const head = document.querySelector("#every thead tr"), lines = document.querySelector("#every tbody");
    let rows = [], found = [], start = 0, by = null, sign = 1;

    function lay() {
      const { depth } = body.tables[Number(at("table").value)];
      lines.replaceChildren(...found.slice(start, start + ROWS).map((row) => {
        const line = make("tr");
        COLUMNS.forEach(([, name, show], number) => {
          const cell = make("td", undefined, number ? "n" : "text");
          if (!number) {
            const opener = make("button", row.name, "opener");
            opener.type = "button";
            opener.ariaExpanded = "false";
            opener.addEventListener("click", () => {
              const isOpen = opener.ariaExpanded === "true";
              opener.ariaExpanded = String(!isOpen);
              if (isOpen) line.nextSibling.remove(); else line.after(details(row));
            });
            cell.append(opener);
            if (row.shared) cell.append(" ", make("small", row.label));
          } else if (name === "median_rank") {
            cell.textContent = row[name] === Infinity ? "> " + depth : row[name] === null ? "" : String(row[name]);
          } else cell.textContent = show(row[name]);
          line.append(cell);
        });
        return line;
      }));
      if (!found.length) {
        const cell = make("td", "No label matches.", "details");
        cell.colSpan = COLUMNS.length;
        lines.append(make("tr"));
        lines.lastChild.append(cell);
      }
      const end = Math.min(start + ROWS, found.length);
      at("place").textContent = found.length ? `${COUNT(start + 1)} to ${COUNT(end)} of ${COUNT(found.length)}` : "";
      at("count").textContent = COUNT(found.length) + " of " + COUNT(rows.length);
      at("back").disabled = !start;
      at("next").disabled = end >= found.length;
      head.querySelectorAll("th").forEach((cell, number) => {
        cell.ariaSort = COLUMNS[number][1] !== by ? "none" : sign > 0 ? "ascending" : "descending";
      });
    }

    function search() {
      const words = at("words").value.toLowerCase().split(/\s+/).filter(Boolean);
      const which = WHICH[at("kind").value];
      found = rows.filter((row) => which(row) && words.every((word) => row.hay.includes(word)));
      if (by === "name") found.sort((a, b) => sign * a.name.localeCompare(b.name));
      else if (by) {  // labels without the figure come last
        const value = (row) => (row[by] === null ? sign * Infinity : row[by]);
        found.sort((a, b) => (value(a) === value(b) ? 0 : sign * (value(a) - value(b))));
      }
      start = 0;
      lay();
    }

    function open() {
      const table = body.tables[Number(at("table").value)];
      rows = rowsOf(tables[Number(at("table").value)]);
      const silent = table.labels - table.listed;
      at("note").textContent = `Labels of ${table.run} on ${table.title} (${table.decision}), those with the most errors first; figures in %. `
        + "A click on a label shows what it is confused with. "
        + (silent ? `${COUNT(silent)} labels without positives and predictions are left out. ` : "")
        + (table.shown < table.listed ? `Of the others, the page has room for ${COUNT(table.shown)}: all are in the file of evaluate --labels.` : "");
      search();
    }

    for (const [number, [title, name]] of COLUMNS.entries()) {
      const cell = make("th", undefined, number ? "n" : "");
      const button = make("button", title, "sorter");
      button.type = "button";
      button.addEventListener("click", () => {
        sign = by === name ? -sign : 1;
        by = name;
        search();
      });
      cell.append(button);
      head.append(cell);
    }
    at("search").addEventListener("input", search);
    at("search").addEventListener("submit", (event) => event.preventDefault());
    at("table").addEventListener("change", open);
    at("table").hidden = tables.length < 2;
    at("back").addEventListener("click", () => { start = Math.max(0, start - ROWS); lay(); });
    at("next").addEventListener("click", () => { start += ROWS; lay(); });
    for (const link of document.querySelectorAll(".lost")) {
      link.addEventListener("click", () => {
        at("table").value = link.dataset.table;
        at("kind").value = "lost";
        at("words").value = "";
        open();
      });
    }
    open();
  }

  // ---- tables ----

  function field(cell) {
    const text = (cell.dataset.value ?? cell.textContent).trim();
    const safe = /^[=+\-@\t]/.test(text) && isNaN(Number(text)) ? "'" + text : text; // a spreadsheet would run a formula
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

  // A table that is wider than its box gets a mark, and can be scrolled with the keyboard.
  function measure() {
    const seen = new ResizeObserver((entries) => {
      for (const { target } of entries) {
        const isWide = target.scrollWidth > target.clientWidth + 1;
        target.classList.toggle("wide", isWide);
        if (isWide) target.tabIndex = 0; else target.removeAttribute("tabindex");
      }
    });
    for (const box of document.querySelectorAll(".scroll")) seen.observe(box);
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
  measure();
  lay();
  const release = hold();
  load().then(draw).catch((error) => {
    for (const [plot] of plots) plot.replaceChildren(make("p", "This browser cannot decompress the chart library: " + error.message, "note"));
  }).finally(release);
})();
