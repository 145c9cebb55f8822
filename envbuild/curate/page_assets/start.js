// The search field, the address, and what people do with the page.
const known = { flags: [...FLAG_AXES, ...data.flags.filter((flag) => !FLAG_AXES.includes(flag))], gpus: data.gpus };
let asking = []; // what of the search field or the address was not understood

// What is asked as text for the address: every filter, in the query, so that links inside the page leave it as it is.
function writeAddress(hash) {
  const query = new URLSearchParams(Object.entries(asked)).toString();
  history.replaceState(null, "", `${location.pathname}${query ? `?${query}` : ""}${hash === undefined ? location.hash : hash}`);
}
const linkOf = (place) => `#cell=${place.cell ? place.cell.id : [place.cuda, shortTorch(place), place.te].join("/")}`;

// Answer what is asked in a line or two, with a command to copy.
function respond({ notes, count }, more) {
  const lines = [...asking, ...notes, ...(more || [])];
  const parts = lines.map((line) => (typeof line === "string" ? element("p", { class: "note" }, line) : line));
  if (Object.keys(asked).length) {
    if (count) {
      parts.unshift(element("p", {}, element("b", {}, `Yes: ${count} combination${count > 1 ? "s" : ""} fit${count > 1 ? "" : "s"}. `), "envbuild chooses the best of them:"),
        command(`envbuild image ${flagText(asked)}`));
    } else {
      const here = buttons.filter((place) => place.listed);
      const common = {};
      for (const place of here) if (place.cell === null) common[place.number] = (common[place.number] || 0) + 1;
      const [most] = Object.entries(common).sort((a, b) => b[1] - a[1])[0] || [];
      parts.unshift(element("p", {}, element("b", {}, "No combination fits.")),
        ...(most !== undefined && here.every((place) => place.cell === null) ? [steps(-1 - Number(most))] : []),
        command(`envbuild explain --nearest ${flagText(asked)}`));
    }
  }
  answer.replaceChildren(...parts);
  answer.hidden = !parts.length;
}

function fillForm(field) {
  if (field !== ask) ask.value = flagText(asked);
  for (const axis of ["torch", "te", "driver"]) if (field !== form.elements[axis]) form.elements[axis].value = asked[axis] || "";
  for (const [axis, only] of [["gpu", chosen.gpu], ["python", chosen.python]]) {
    const numbers = axis === "gpu" ? [...(only || [])] : data.pythons.map((_, n) => n).filter((n) => only >> n & 1);
    form.elements[axis].value = numbers.length === 1 ? String(numbers[0]) : "";
  }
}

function apply(field, more) {
  const found = filter();
  fillForm(field);
  respond(found, more);
}

function replaceAsked(next) {
  for (const axis of Object.keys(asked)) delete asked[axis];
  Object.assign(asked, next);
}

const linked = (place, text) => element("li", {}, element("a", { href: linkOf(place) }, text || place.cell.id));

/* The places that a link names: a cell's id or how it begins, or CUDA/torch/TE. An id of another matrix is read as the
   combination that it names. Returns places and a line for the reader. */
function findCell(text) {
  const wanted = text.trim();
  const parts = wanted.split("/");
  if (parts.length > 1) {
    const found = buttons.filter((place) => [place.cuda, shortTorch(place), place.te].every((version, n) =>
      !parts[n] || version === parts[n] || releaseMatches(["cuda", "torch", "te"][n], parts[n], [version])));
    return { places: found, note: found.length ? null : `This page has no combination \u201c${wanted}\u201d (CUDA/torch/TE).` };
  }
  if (!wanted) return { places: [], note: "The link names no cell." };
  const found = buttons.filter((place) => place.cell && place.cell.id.startsWith(wanted.toLowerCase()));
  if (found.length) return { places: found, note: null };
  const ended = buttons.filter((place) => place.cell && wanted.length >= 4 && place.cell.id.endsWith(`-${wanted.toLowerCase()}`));
  if (ended.length) return { places: ended, note: null };
  const id = /^(cpu|cu(\d+))-.*?torch([\w.]+?)(?:-te([\w.]+?))?(?:-|$)/i.exec(wanted);
  if (id) {
    const near = buttons.filter((place) => (id[2] ? place.cuda.replace(".", "") === id[2] : place.cuda === "cpu")
      && shortTorch(place) === id[3] && place.te === (id[4] || "none"));
    if (near.length === 1) {
      return { places: near, note: `\u201c${wanted}\u201d has these versions of CUDA, torch and TE; asked for alone, they resolve to another cell today, shown here.` };
    }
  }
  return { places: [], note: `No cell of this matrix begins with \u201c${wanted.length > 120 ? `${wanted.slice(0, 120)}…` : wanted}\u201d. The link may be of another version of the matrix; search below.` };
}

// Open what a link names; show it and its panel, or answer why not.
function openCell(text) {
  const { places, note } = findCell(text);
  const lines = note ? [note] : [];
  const [place] = places;
  if (places.length === 1) {
    shown = place.cuda;
    if (chosen.cuda !== null && !chosen.cuda.has(place.cuda)) asked.cuda = place.cuda;
    if (chosen.torch !== null && !chosen.torch.has(place.torch)) delete asked.torch;
    if (chosen.te !== null && !chosen.te.has(place.te)) delete asked.te;
    current = place;
    keep = place.cuda;
    apply(null, lines);
    keep = null;
    show(place, true);
    intoView(place);
    return;
  }
  if (places.length > 1) {
    lines.push(element("p", { class: "note" }, `${places.length} cells begin with \u201c${text}\u201d; choose one:`),
      element("ul", { class: "found" }, ...places.slice(0, 12).map((each) => linked(each, each.cell ? each.cell.id : named(each))),
        ...(places.length > 12 ? [element("li", {}, `… and ${places.length - 12} more`)] : [])));
  }
  apply(null, lines);
  answer.scrollIntoView({ block: "center", behavior: "instant" });
}

// The combination and its panel: next to each other where there is room, else above the sheet that covers the lower part.
function intoView(place) {
  const box = place.button.closest(".scroll");
  const at = place.button.getBoundingClientRect();
  const frame = box.getBoundingClientRect();
  box.scrollTop += at.top - frame.top - box.clientHeight / 4;
  box.scrollLeft += at.left - frame.left - box.clientWidth / 2;
  const sheet = getComputedStyle(panel).position === "fixed";
  const top = sheet ? place.button.getBoundingClientRect().top - innerHeight / 5 : panel.parentElement.getBoundingClientRect().top - 16;
  scrollBy({ top, behavior: "instant" });
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch { // a lone % is no code
    return text;
  }
}

function fromHash() {
  const hash = decoded(location.hash.slice(1));
  if (hash.startsWith("cell=")) openCell(hash.slice(5));
  else if (hash && !document.getElementById(hash)) {
    if (/^(cu\d+|cpu)-|^[0-9a-f]{6,8}$/i.test(hash)) openCell(hash);
    else {
      apply(null, [`This page has nothing that is called \u201c${hash.slice(0, 120)}\u201d.`]);
      answer.scrollIntoView({ block: "center", behavior: "instant" });
    }
  }
}

function fromQuery() {
  const next = {};
  asking = [];
  for (const [axis, text] of new URLSearchParams(location.search)) {
    if (!data.flags.includes(axis)) asking.push(`The address asks for \u201c${axis.slice(0, 60)}\u201d, which is no flag of a cell; it is left out.`);
    else if (text.trim()) next[axis] = text.trim().slice(0, 200).replace(/[\u0000-\u001f\u007f-\u009f]/g, " ");
  }
  replaceAsked(next);
}

function fromSearch() {
  const read = readFlags(ask.value.slice(0, 1000), known);
  asking = read.notes;
  replaceAsked(read.asked);
  writeAddress();
  if (read.cell) openCell(read.cell);
  else apply(ask);
}

form.hidden = false;
document.body.classList.add("scripted");
for (const time of document.querySelectorAll("time")) {
  time.title = time.dateTime;
  if (time.closest(".standing")) time.textContent = age(time.dateTime);
}
for (const code of document.querySelectorAll("[data-command]")) code.replaceWith(command(code.dataset.command));

form.addEventListener("input", (event) => {
  const { name, value } = event.target;
  if (name === "ask") { fromSearch(); return; }
  if (name === "cuda") shown = value;
  if (name === "cuda" || value.trim()) {
    asked[name] = name === "gpu" ? data.gpus[value][0] : name === "python" ? data.pythons[value] : value.trim();
  } else delete asked[name];
  asking = [];
  apply(event.target);
  writeAddress();
});
form.addEventListener("submit", (event) => { event.preventDefault(); fromSearch(); });
form.elements.reset.addEventListener("click", () => {
  replaceAsked({});
  asking = [];
  apply(null);
  writeAddress();
  ask.focus();
});

const grounds = document.querySelector(".grids");
grounds.addEventListener("keydown", (event) => {
  const { place } = event.target;
  const step = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key];
  if (!place || !step) return;
  const [across, down] = step;
  const ahead = buttons.filter((other) => other.grid === place.grid && inView(other)
    && (across ? other.y === place.y && (other.x - place.x) * across > 0 : other.x === place.x && (other.y - place.y) * down > 0));
  const next = across + down > 0 ? ahead[0] : ahead[ahead.length - 1];
  if (!next) return;
  event.preventDefault();
  place.button.tabIndex = -1;
  next.button.tabIndex = 0;
  next.button.focus();
});
grounds.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-n]");
  if (button) show(button.place, true);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") { panel.classList.remove("open"); tip.hidden = true; }
});
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
    const wanted = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    items.forEach((item, n) => { item.hidden = !wanted.every((word) => texts[n].includes(word)); });
  });
}

fromQuery();
apply(null);
fromHash();
addEventListener("hashchange", fromHash);
addEventListener("popstate", () => { fromQuery(); apply(null); });
