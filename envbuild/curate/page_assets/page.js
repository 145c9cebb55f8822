"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const form = document.querySelector(".filters");
  const panel = document.getElementById("panel");
  const tip = document.getElementById("tip");
  const grids = [...document.querySelectorAll(".grid")];
  const glyph = { ran: "●", elsewhere: "◑", tried: "◐", stale: "◌", failed: "!", tested: "◎", open: "○", no: "·" };
  const proofs = JSON.parse(document.querySelector("main").dataset.words);
  const words = {
    ran: proofs["run-on-this-gpu"], elsewhere: proofs["run-elsewhere"], tried: proofs.tried,
    stale: "stale: the smoke tests have changed since", failed: "failed", tested: `${proofs.stated}, tested together upstream`,
    open: proofs.stated, no: "no such cell", out: "not with these filters",
  };
  document.body.classList.add("scripted");
  form.hidden = false;

  const element = (name, attributes, ...children) => {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
    made.append(...children.filter((child) => child !== null && child !== undefined));
    return made;
  };
  const age = (then) => {
    const seconds = Math.max(0, (Date.now() - Date.parse(then)) / 1000);
    for (const [unit, size] of [["year", 31557600], ["month", 2629800], ["day", 86400], ["hour", 3600], ["minute", 60]]) {
      const count = Math.floor(seconds / size);
      if (count) return `${count} ${unit}${count > 1 ? "s" : ""} ago`;
    }
    return "just now";
  };
  for (const time of document.querySelectorAll("time")) {
    time.title = time.dateTime;
    if (time.closest(".standing")) time.textContent = age(time.dateTime);
  }
  const source = (text, url) => url
    ? element("a", { class: "source", href: url, rel: "noreferrer" }, text)
    : element("span", { class: "source" }, text);

  // Every button knows its place: CUDA, torch and TE from the table around it.
  const buttons = [];
  for (const grid of grids) {
    const columns = [...grid.querySelectorAll("thead th[scope=col]")];
    [...grid.querySelectorAll("tbody tr")].forEach((row, y) => {
      const te = row.querySelector("th").textContent;
      [...row.querySelectorAll("button")].forEach((button, x) => {
        const kind = [...button.classList].find((name) => name in glyph);
        const place = { button, grid, row, column: columns[x], x, y, kind, cuda: grid.dataset.cuda, torch: columns[x].textContent.trim(), te };
        place.cell = Number(button.dataset.n) >= 0 ? data.cells[Number(button.dataset.n)] : null;
        button.place = place;
        buttons.push(place);
      });
    });
  }
  const named = (place) =>
    `${place.cuda === "cpu" ? "CPU build" : `CUDA ${place.cuda}`}, torch ${place.torch}, ${place.te === "no TE" ? "no TE" : `TE ${place.te}`}`;

  const chosen = { gpu: null, python: null };
  const bits = (cell) => Object.values(cell.on).reduce((all, mask) => all | mask, 0);
  const fits = (cell) => {
    if (chosen.gpu !== null && "-1" in cell.on) return false; // a CPU build has no GPU
    const mask = chosen.gpu === null ? bits(cell) : cell.on[chosen.gpu] || 0;
    return chosen.python === null ? mask !== 0 : (mask >> chosen.python & 1) === 1;
  };

  // A run counts for the GPU and the Python that it was on: with another of them chosen, it was elsewhere.
  const differs = (cell) =>
    (chosen.gpu !== null && data.gpus[chosen.gpu][0] !== cell.versions.gpu) ||
    (chosen.python !== null && data.pythons[chosen.python] !== cell.versions.python);
  const claimed = (cell, found) => (found.claim === "run-on-this-gpu" && differs(cell) ? "run-elsewhere" : found.claim);
  const counted = ({ kind, cell }) =>
    (kind === "ran" || kind === "stale") && claimed(cell, cell.standing[0]) !== cell.standing[0].claim ? "elsewhere" : kind;

  function filter() {
    for (const key of ["gpu", "python"]) chosen[key] = form[key].value === "" ? null : Number(form[key].value);
    const cuda = form.elements.cuda.value;
    const counts = {};
    for (const place of buttons) {
      const shown = place.cell === null ? "no" : fits(place.cell) ? counted(place) : "out";
      counts[place.cuda] = (counts[place.cuda] || 0) + (shown !== "no" && shown !== "out");
      place.shown = shown;
      if (!place.button.classList.contains(shown) || place.button.dataset.shown !== shown) {
        place.button.className = `k ${shown}`;
        place.button.dataset.shown = shown;
        place.button.textContent = shown === "out" ? "–" : glyph[shown];
        place.button.setAttribute("aria-label", `${named(place)}: ${words[shown]}`);
      }
    }
    for (const grid of grids) grid.hidden = grid.dataset.cuda !== cuda;
    for (const input of form.elements.cuda) input.parentElement.classList.toggle("none", !counts[input.value]);
    const parts = [
      chosen.gpu === null ? null : data.gpus[chosen.gpu][0],
      chosen.python === null ? null : `Python ${data.pythons[chosen.python]}`,
    ].filter(Boolean);
    const all = Object.values(counts).reduce((sum, count) => sum + count, 0);
    const what = cuda === "cpu" ? "for the CPU build" : `for CUDA ${cuda}`;
    form.elements.count.textContent =
      `${counts[cuda] || 0} possible combinations ${what}${parts.length ? ` with ${parts.join(" and ")}` : ""}; ${all} in all.`;
    roving(cuda);
    if (current && current.cuda === cuda) show(current, false);
  }

  // One stop for Tab in each table; arrows move inside it.
  function roving(cuda) {
    const here = buttons.filter((place) => place.cuda === cuda);
    const stop = current && current.cuda === cuda ? current : here.find((place) => place.shown !== "no" && place.shown !== "out") || here[0];
    for (const place of here) place.button.tabIndex = place === stop ? 0 : -1;
  }
  document.querySelector(".grids").addEventListener("keydown", (event) => {
    const place = event.target.place;
    const step = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key];
    if (!place || !step) return;
    const next = buttons.find((other) => other.grid === place.grid && other.x === place.x + step[0] && other.y === place.y + step[1]);
    if (!next) return;
    event.preventDefault();
    place.button.tabIndex = -1;
    next.button.tabIndex = 0;
    next.button.focus();
  });

  const flags = (place, withFilters) => {
    const words = [];
    if (place.cuda) words.push(`--cuda ${place.cuda}`);
    words.push(`--torch ${place.cell ? place.cell.torch : place.torch}`, `--te ${place.te === "no TE" ? "none" : place.te}`);
    if (withFilters && chosen.gpu !== null) words.push(`--gpu ${data.gpus[chosen.gpu][0]}`);
    if (withFilters && chosen.python !== null) words.push(`--python ${data.pythons[chosen.python]}`);
    return words.join(" ");
  };
  // a flag and its value stay on one line
  const flagged = (text) => text.split(/ (?=--)/).flatMap((part) => [element("span", {}, part), " "]);
  const command = (text) => {
    const copy = element("button", { type: "button" }, "Copy");
    copy.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(text);
        copy.textContent = "Copied";
      } catch {
        copy.textContent = "Select and copy";
      }
    });
    return element("div", { class: "command" }, element("code", {}, ...flagged(text)), copy);
  };
  const steps = (number) =>
    element("ol", {}, ...data.reasons[number].map((step) => {
      const known = data.rules.some((rule) => rule[0] === step.rule);
      return element("li", {}, step.text, element("br"),
        known ? element("a", { href: `#rule-${step.rule}` }, element("code", {}, step.rule)) : null,
        ...step.source.flatMap(([text, url], n) => [known || n ? " · " : "", source(text, url)]));
    }));
  const placed = (cell, found) => {
    const claim = proofs[claimed(cell, found)];
    const how = found.status === "failed" ? "failed" : found.status === "stale" ? `stale: ${claim}` : claim;
    return [how, `${found.status === "failed" ? " on" : ":"} ${found.where}${found.gpu.startsWith("sm_") ? ` (${found.gpu})` : ""}, ${age(found.date)}`];
  };
  const entry = (cell) => (found) => {
    const [how, where] = placed(cell, found);
    const line = element("li", { class: `standing ${found.status}` }, element("b", {}, how), where,
      found.why ? ` (${found.why})` : "", element("br"));
    line.append(element("a", { href: `#evidence-${found.record}` }, element("code", {}, found.cell)));
    return line;
  };

  let current = null;
  function show(place, focus) {
    current = place;
    for (const other of document.querySelectorAll("[aria-pressed]")) other.removeAttribute("aria-pressed");
    for (const other of document.querySelectorAll(".here")) other.classList.remove("here");
    place.button.setAttribute("aria-pressed", "true");
    place.row.classList.add("here");
    place.column.classList.add("here");
    const close = element("button", { type: "button", class: "close", "aria-label": "Close" }, "×");
    close.addEventListener("click", () => { panel.classList.remove("open"); place.button.focus(); });
    const parts = [close, element("h3", {}, named(place)), element("span", { class: `verdict ${place.shown}` }, words[place.shown])];
    const cell = place.cell;
    if (cell === null) {
      parts.push(steps(-1 - Number(place.button.dataset.n)), element("h4", {}, "The nearest cells that exist"),
        command(`envbuild explain --nearest ${flags(place, false)}`));
    } else {
      if (place.shown === "out") {
        const python = chosen.python === null ? null : data.pythons[chosen.python];
        const gpu = chosen.gpu === null ? null : data.gpus[chosen.gpu][0];
        if (gpu !== null && "-1" in cell.on) parts.push(element("p", {}, "torch's CPU build has no kernels for a GPU."));
        else if (gpu !== null && chosen.gpu in cell.no_gpu) parts.push(element("h4", {}, `Not on ${gpu}`), steps(cell.no_gpu[chosen.gpu]));
        if (python !== null && chosen.python in cell.no_python) parts.push(element("h4", {}, `Not with Python ${python}`), steps(cell.no_python[chosen.python]));
        if (parts.length === 3) parts.push(element("p", {}, `There is a cell on ${gpu} and one with Python ${python}, and none with both.`));
        parts.push(command(`envbuild explain ${flags(place, true)}`), element("h4", {}, "Without the filters"));
      }
      parts.push(cell.standing.length
        ? element("ul", {}, ...cell.standing.map(entry(cell)))
        : element("p", { class: "standing never" }, `${proofs[cell.tried]}: the rules allow it, ${cell.tried === "tried" ? "trials of its components with each other passed, " : ""}and no run is recorded.`));
      if (cell.together.length) {
        parts.push(element("p", {}, "Tested together upstream: ",
          ...cell.together.flatMap((number, n) => [n ? ", " : "", element("a", { href: `#rule-${data.rules[number][0]}` }, element("code", {}, data.rules[number][0]))])));
      }
      if (cell.pairs.length) {
        parts.push(element("h4", {}, "Its pairs of releases"), element("ul", { class: "tried" },
          ...cell.pairs.map(([text, known, verdict]) => element("li", { class: `${known} ${verdict}` }, text))));
      }
      const all = bits(cell);
      const list = element("dl", { class: "pairs" });
      for (const [axis, version] of Object.entries(cell.versions)) list.append(element("dt", {}, axis), element("dd", {}, version));
      parts.push(element("p", { class: "cellid" }, "Resolves to ", element("code", {}, cell.id)), list);
      parts.push(element("h4", {}, "It exists"));
      const gpus = Object.keys(cell.on).map(Number).filter((n) => n >= 0).map((n) => data.gpus[n][0]).sort((a, b) => a.slice(3) - b.slice(3));
      const pythons = data.pythons.filter((_, n) => all >> n & 1);
      parts.push(element("p", {}, (gpus.length ? `on ${gpus.join(", ")}; ` : "") + `with Python ${pythons.join(", ")}`));
      parts.push(element("h4", {}, "Build it"), command(`envbuild image ${flags(place, place.shown !== "out")}`));
      const rules = element("details", {}, element("summary", {}, `${cell.rules.length} rules apply`));
      const items = element("ul", {});
      for (const number of cell.rules) {
        const [id, kind, why] = data.rules[number];
        items.append(element("li", {}, element("a", { href: `#rule-${id}` }, element("code", {}, id)), ` (${kind}): ${why}`));
      }
      rules.append(items);
      parts.push(rules);
    }
    panel.replaceChildren(...parts);
    panel.scrollTop = 0;
    if (focus) {
      panel.classList.add("open");
      roving(place.cuda);
      history.replaceState(null, "", `#cell=${[place.cuda, place.torch, place.te === "no TE" ? "none" : place.te].join("/")}`);
    }
  }
  document.querySelector(".grids").addEventListener("click", (event) => {
    const button = event.target.closest("button[data-n]");
    if (button) show(button.place, true);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { panel.classList.remove("open"); tip.hidden = true; }
  });

  // Hover shows the verdict in a line; a click shows the rest in the panel.
  function hover(place) {
    let text = words[place.shown];
    const number = place.cell === null ? -1 - Number(place.button.dataset.n)
      : place.shown === "out" ? place.cell.no_gpu[chosen.gpu] ?? place.cell.no_python[chosen.python] : undefined;
    if (number !== undefined) {
      const reason = data.reasons[number];
      text = reason.length ? reason[reason.length - 1].text : text;
    } else if (place.shown !== "out" && place.cell.standing.length) {
      text = placed(place.cell, place.cell.standing[0]).join("");
    }
    tip.replaceChildren(element("b", {}, named(place)), text.length > 220 ? `${text.slice(0, 220)}…` : text);
    tip.hidden = false;
    const box = place.button.getBoundingClientRect();
    const wide = document.documentElement.clientWidth;
    const left = Math.max(8, Math.min(box.left + scrollX, scrollX + wide - tip.offsetWidth - 8));
    const below = box.bottom + tip.offsetHeight + 12 < innerHeight;
    tip.style.left = `${left}px`;
    tip.style.top = `${scrollY + (below ? box.bottom + 8 : box.top - tip.offsetHeight - 8)}px`;
  }
  const grounds = document.querySelector(".grids");
  grounds.addEventListener("pointerover", (event) => {
    const button = event.target.closest("button[data-n]");
    if (button && event.pointerType === "mouse") hover(button.place);
    else tip.hidden = true;
  });
  grounds.addEventListener("pointerleave", () => { tip.hidden = true; });

  for (const input of document.querySelectorAll("[data-search]")) {
    input.parentElement.hidden = false;
    const items = [...document.getElementById(input.dataset.search).children];
    const texts = items.map((item) => item.textContent.toLowerCase());
    input.addEventListener("input", () => {
      const asked = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      items.forEach((item, n) => { item.hidden = !asked.every((word) => texts[n].includes(word)); });
    });
  }

  function fromAddress() {
    const match = decodeURIComponent(location.hash).match(/^#cell=([^/]+)\/([^/]+)\/(.+)$/);
    const place = match && buttons.find((p) => p.cuda === match[1] && p.torch === match[2] && (p.te === "no TE" ? "none" : p.te) === match[3]);
    if (!place) return;
    form.elements.cuda.value = place.cuda;
    filter();
    show(place, true);
    place.button.scrollIntoView({ block: "nearest", inline: "center", behavior: "instant" });
    // above the sheet that covers the lower part of a narrow screen
    scrollBy({ top: place.button.getBoundingClientRect().top - innerHeight / 5, behavior: "instant" });
  }
  form.addEventListener("change", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  filter();
  fromAddress();
  addEventListener("hashchange", fromAddress);
})();
