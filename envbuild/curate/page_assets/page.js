// The page's data, its tables and its filters.
const data = JSON.parse(document.getElementById("data").textContent);
// Every cell's row of numbers as an object; what many cells share is one and the same object.
data.cells = data.cells.map((row) => {
  const cell = {};
  data.fields.forEach((field, n) => { cell[field] = data.plain.includes(field) ? row[n] : data.shared[row[n]]; });
  return cell;
});
const pairsOf = (cell) => cell.pairs.map((number) => data.shared[number]);
const versionsOf = (cell) => Object.fromEntries(cell.versions.map((number) => data.shared[number]));

const form = document.querySelector(".filters");
const ask = form.elements.ask;
const answer = document.getElementById("answer");
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

// Children that are strings become text, never HTML: so does whatever the data holds.
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
const source = (text, url) => url
  ? element("a", { class: "source", href: url, rel: "noreferrer" }, text)
  : element("span", { class: "source" }, text);

// Every button knows its place: CUDA, torch and TE from the table around it.
const buttons = [];
for (const grid of grids) {
  grid.columns = [...grid.querySelectorAll("thead th[scope=col]")];
  grid.rowsOf = [...grid.querySelectorAll("tbody tr")];
  grid.rowsOf.forEach((row, y) => {
    const title = row.querySelector("th").textContent;
    [...row.querySelectorAll("button")].forEach((button, x) => {
      const kind = [...button.classList].find((name) => name in glyph);
      const place = { button, grid, row, column: grid.columns[x], x, y, kind, cuda: grid.dataset.cuda,
        torch: grid.columns[x].dataset.version, te: title === "no TE" ? "none" : title };
      place.number = Number(button.dataset.n);
      place.cell = place.number >= 0 ? data.cells[place.number] : null;
      button.place = place;
      buttons.push(place);
    });
  });
}
const shortTorch = (place) => place.torch.split("+")[0];
const named = (place) =>
  `${place.cuda === "cpu" ? "CPU build" : `CUDA ${place.cuda}`}, torch ${shortTorch(place)}, ${place.te === "none" ? "no TE" : `TE ${place.te}`}`;

/* What is asked: axis -> what was written, as on the command line; also of axes that no table shows, for the command.
   `shown` is the CUDA whose table is in view. `chosen` is what it means: null is any. */
const asked = {};
let shown = grids[0].dataset.cuda;
let current = null;
let keep = null; // the CUDA of a link that is being opened: its table is in view, whatever fits
const chosen = { cuda: null, torch: null, te: null, gpu: null, python: null, drivers: null, geforce: false };

const namesOf = (axis, version) => [version, ...((data.names[axis] || {})[version] || [])];
const matching = (axis, versions) => new Set(versions.filter((version) =>
  (version === "none" || version === "cpu" ? ["any", "auto", version].includes(asked[axis].trim()) && !(version === "none" && asked[axis] !== "none")
    : releaseMatches(axis, asked[axis], namesOf(axis, version)))));
const every = {
  cuda: grids.map((grid) => grid.dataset.cuda),
  torch: [...new Set(buttons.map((place) => place.torch))],
  te: [...new Set(buttons.map((place) => place.te))],
};

// Work out what is asked; return a line for each value that is nothing in this matrix.
function understand() {
  const notes = [];
  const missing = (axis, known) => {
    const near = similar(asked[axis].replace(/^[<>=!~]+/, ""), known);
    notes.push(`No release of ${axis} on this page matches \u201c${asked[axis]}\u201d${near.length ? `; similar: ${near.join(", ")}` : ""}.`);
  };
  for (const axis of ["cuda", "torch", "te"]) {
    chosen[axis] = asked[axis] === undefined ? null : matching(axis, every[axis]);
    if (chosen[axis] && !chosen[axis].size) missing(axis, every[axis].map((version) => version.split("+")[0]));
  }
  chosen.gpu = chosen.python = chosen.drivers = null;
  chosen.geforce = false;
  if (asked.gpu !== undefined && !["any", "auto"].includes(asked.gpu)) {
    chosen.gpu = new Set(data.gpus.flatMap((gpu, n) => (gpuMatches(asked.gpu, gpu) ? [n] : [])));
    if (asked.gpu === "none") chosen.gpu = new Set([-1]);
    const key = boardKey(asked.gpu);
    chosen.geforce = data.gpus.some((gpu) => gpu[4].some((name) => boardKey(name) === key));
    if (!chosen.gpu.size) missing("gpu", data.gpus.flatMap((gpu) => [gpu[0], ...gpu[2]]));
    if (data.gpus.some((gpu) => gpu[5].some((name) => boardKey(name) === key))) {
      notes.push(`${asked.gpu} has an Arm host, and this page shows cells for x86_64: the command below asks for aarch64.`);
    }
  }
  if (asked.python !== undefined && !["any", "auto"].includes(asked.python)) {
    chosen.python = data.pythons.reduce((mask, version, n) => mask | (releaseMatches("python", asked.python, namesOf("python", version)) ? 1 << n : 0), 0);
    if (!chosen.python) missing("python", data.pythons);
  }
  if (asked.driver === "auto") notes.push("--driver auto is the driver of the machine that runs the command: this page cannot see it.");
  else if (asked.driver !== undefined && asked.driver !== "any") {
    chosen.drivers = driversOf(asked.driver, data.drivers);
    if (!chosen.drivers.length) notes.push(`\u201c${asked.driver}\u201d is not a driver version. Write it as nvidia-smi does, for example 560.35.05.`);
  }
  if (asked.stack !== undefined && !data.stacks.includes(asked.stack)) notes.push(`There is no stack \u201c${asked.stack}\u201d on this page.`);
  const more = Object.keys(asked).filter((axis) => !FLAG_AXES.includes(axis));
  if (more.length) notes.push(`${more.map((axis) => `--${axis}`).join(", ")}: the tables do not filter by ${more.length > 1 ? "these" : "this"}; the command does.`);
  return notes;
}

// The best that the drivers asked for do with a cell on a GPU (-1: none): "starts", "compat" or "no".
function driven(cuda, gpu) {
  const facts = gpu < 0 ? null : data.gpus[gpu][6];
  const found = chosen.drivers.map((driver) => driverVerdict(data.cuda[cuda], facts, driver, chosen.geforce));
  return found.includes("starts") ? "starts" : found.includes("compat") ? "compat" : "no";
}
const bits = (cell) => Object.values(cell.on).reduce((all, mask) => all | mask, 0);
// The bits of the Pythons with which a cell exists on what is chosen.
function pythonsOf(cell, withDriver) {
  let all = 0;
  for (const [gpu, mask] of Object.entries(cell.on)) {
    if (chosen.gpu !== null && !chosen.gpu.has(Number(gpu))) continue;
    if (withDriver && chosen.drivers !== null && driven(cell.cuda, Number(gpu)) === "no") continue;
    all |= mask;
  }
  return chosen.python === null ? all : all & chosen.python;
}
const fits = (cell) => pythonsOf(cell, true) !== 0;
const listedIn = (place, axes) => axes.every((axis) => chosen[axis] === null || chosen[axis].has(place[axis]));

// A run counts for the GPU and the Python that it was on: with another of them chosen, it was elsewhere.
function differs(cell) {
  const own = versionsOf(cell);
  const gpu = data.gpus.findIndex((each) => each[0] === own.gpu);
  const python = data.pythons.indexOf(own.python);
  return (chosen.gpu !== null && !chosen.gpu.has(gpu)) || (chosen.python !== null && !(chosen.python >> python & 1));
}
const claimed = (cell, found) => (found.claim === "run-on-this-gpu" && differs(cell) ? "run-elsewhere" : found.claim);
const counted = ({ kind, cell }) =>
  (kind === "ran" || kind === "stale") && claimed(cell, cell.standing[0]) !== cell.standing[0].claim ? "elsewhere" : kind;

// Show what fits what is asked; return the lines about what was not understood.
function filter() {
  const notes = understand();
  const counts = {}; // of every CUDA, whichever is asked for
  for (const place of buttons) {
    place.shown = place.cell === null ? "no" : fits(place.cell) ? counted(place) : "out";
    const listed = listedIn(place, ["torch", "te"]);
    place.listed = listed && listedIn(place, ["cuda"]);
    counts[place.cuda] = (counts[place.cuda] || 0) + (listed && place.shown !== "no" && place.shown !== "out");
    if (place.button.dataset.shown !== place.shown) {
      place.button.className = `k ${place.shown}`;
      place.button.dataset.shown = place.shown;
      place.button.textContent = place.shown === "out" ? "–" : glyph[place.shown];
      place.button.setAttribute("aria-label", `${named(place)}: ${words[place.shown]}`);
    }
  }
  const allowed = every.cuda.filter((cuda) => chosen.cuda === null || chosen.cuda.has(cuda));
  if (!allowed.includes(shown) || (keep !== shown && !counts[shown] && allowed.some((cuda) => counts[cuda]))) {
    shown = allowed.find((cuda) => counts[cuda]) || allowed[0] || shown;
  }
  for (const grid of grids) {
    grid.hidden = grid.dataset.cuda !== shown;
    if (grid.hidden) continue;
    for (const row of grid.rowsOf) row.hidden = chosen.te !== null && chosen.te.size > 0 && !chosen.te.has(row.querySelector("button").place.te);
    const out = grid.columns.map((column) => chosen.torch !== null && chosen.torch.size > 0 && !chosen.torch.has(column.dataset.version));
    // what is asked is nothing in this table: all of it stays in view, with its reasons
    const none = out.every(Boolean);
    grid.columns.forEach((column, x) => { column.hidden = !none && out[x]; });
    for (const place of buttons) if (place.grid === grid) place.button.parentElement.hidden = !none && out[place.x];
  }
  for (const input of form.elements.cuda) {
    input.checked = input.value === shown;
    input.parentElement.classList.toggle("none", !counts[input.value]);
    input.parentElement.title = `${counts[input.value] || 0} combinations`;
  }
  const sum = Object.values(counts).reduce((all, count) => all + count, 0);
  const filters = FLAG_AXES.filter((axis) => axis !== "cuda" && asked[axis] !== undefined).map((axis) => `${axis} ${asked[axis]}`);
  form.elements.count.textContent =
    `${counts[shown] || 0} possible combinations ${shown === "cpu" ? "for the CPU build" : `for CUDA ${shown}`}${filters.length ? ` with ${filters.join(", ")}` : ""}; ${sum} with any CUDA.`;
  form.elements.reset.hidden = !Object.keys(asked).length;
  roving();
  if (current) show(current, false);
  return { notes, count: allowed.reduce((all, cuda) => all + (counts[cuda] || 0), 0) };
}

// One stop for Tab in the table; arrows move inside it.
const inView = (place) => place.cuda === shown && !place.row.hidden && !place.column.hidden;
function roving() {
  const here = buttons.filter(inView);
  const stop = here.includes(current) ? current : here.find((place) => place.shown !== "no" && place.shown !== "out") || here[0];
  for (const place of here) place.button.tabIndex = place === stop ? 0 : -1;
}
