// One combination in full, and the commands that people copy.
const flags = (place, withFilters) => {
  const own = {};
  if (place.cuda) own.cuda = place.cuda;
  own.torch = place.torch;
  own.te = place.te;
  if (withFilters) for (const [axis, text] of Object.entries(asked)) if (!(axis in own)) own[axis] = text;
  return flagText(own);
};
// a flag and its value stay on one line
const flagged = (text) => text.split(/ (?=--)/).flatMap((part) => [element("span", {}, part), " "]);
const command = (text) => {
  const copy = element("button", { type: "button", class: "copy", "aria-label": `Copy ${text}` }, "Copy");
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      copy.textContent = "Copied";
    } catch { // a page from a file, or without the permission
      getSelection().selectAllChildren(copy.previousElementSibling);
      copy.textContent = document.execCommand("copy") ? "Copied" : "Select and copy";
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
const sameCombination = (place, one) => one.cuda === place.cuda && one.torch === place.torch && one.te === place.te;

// On which boards it ran, the runs in an image and those in an environment of a host apart.
function ranOn(place) {
  const found = data.proof.filter((one) => sameCombination(place, one));
  if (!found.length) return [];
  return [element("h4", {}, "Ran on"), element("ul", { class: "boards" }, ...found.map((one) => element("li", { class: `standing ${one.status}` },
    element("b", {}, one.board), `, ${one.by}: `, one.status === "verified" ? "passed" : one.status, `, ${age(one.date)}`,
    Number(one.ranks) > 1 ? `, ${one.ranks} ranks` : "", " · ", element("a", { href: `#evidence-${one.record}` }, "record"))))];
}

function publishedAs(place) {
  const found = data.published.filter(([cuda, torch, te]) => sameCombination(place, { cuda, torch, te }));
  if (!found.length) return [];
  return [element("h4", {}, "Pull a published image"), ...found.flatMap(([, , , id, reference, platform]) =>
    [element("p", { class: "cellid" }, element("code", {}, id), ` · ${platform}`), command(`docker pull ${reference}`)])];
}

// Why a combination that exists does not fit the filters.
function whyOut({ cell, cuda }) {
  const parts = [];
  const listed = Object.keys(cell.on).map(Number);
  const names = [...(chosen.gpu || [])].filter((n) => n >= 0).map((n) => data.gpus[n][0]).join(", ");
  const onGpu = chosen.gpu === null ? listed : listed.filter((n) => chosen.gpu.has(n));
  if (chosen.gpu !== null && listed.includes(-1) && listed.length === 1) {
    parts.push(element("p", {}, "torch's CPU build has no kernels for a GPU."));
  } else if (!onGpu.length) {
    for (const n of chosen.gpu) if (n in cell.no_gpu) parts.push(element("h4", {}, `Not on ${data.gpus[n][0]}`), steps(cell.no_gpu[n]));
  }
  if (chosen.python !== null) {
    data.pythons.forEach((python, n) => {
      if (chosen.python >> n & 1 && n in cell.no_python && parts.length < 8) parts.push(element("h4", {}, `Not with Python ${python}`), steps(cell.no_python[n]));
    });
  }
  if (chosen.drivers !== null && onGpu.length && onGpu.every((n) => driven(cuda, n) === "no")) {
    const facts = data.cuda[cuda];
    const known = onGpu.some((n) => n < 0 || chosen.drivers.some((driver) => {
      const { first, last } = data.gpus[n][6];
      return !(first && driver.release[0] < first) && !(last && driver.release[0] > last);
    }));
    const compat = facts.branches.length ? ` Below it only the branches ${facts.branches.join(", ")} start it, with cuda-compat, on data-center GPUs.` : "";
    parts.push(element("h4", {}, `Not with driver ${asked.driver}`),
      element("p", {}, known ? `CUDA ${cuda} runs from driver ${facts.floor}.${compat}` : `No driver of this branch knows ${names || "a GPU of this cell"}.`));
  }
  if (!parts.length) parts.push(element("p", {}, "Each of the filters has a cell, and none fits all of them."));
  return parts;
}

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
  const { cell } = place;
  if (cell === null) {
    parts.push(steps(-1 - place.number), element("h4", {}, "The nearest cells that exist"), command(`envbuild explain --nearest ${flags(place, false)}`));
  } else {
    if (place.shown === "out") parts.push(...whyOut(place), command(`envbuild explain ${flags(place, true)}`), element("h4", {}, "Without the filters"));
    else if (chosen.drivers !== null && Object.keys(cell.on).map(Number).every((n) => (chosen.gpu !== null && !chosen.gpu.has(n)) || driven(place.cuda, n) !== "starts")) {
      parts.push(element("p", { class: "note" }, `Driver ${asked.driver} starts it with the package cuda-compat alone, which the image then contains.`));
    }
    parts.push(element("h4", {}, "Build it"), command(`envbuild image ${flags(place, place.shown !== "out")}`), ...publishedAs(place));
    parts.push(element("h4", {}, "Proof"), cell.standing.length
      ? element("ul", {}, ...cell.standing.map(entry(cell)))
      : element("p", { class: "standing never" }, `${proofs[cell.tried]}: the rules allow it, ${cell.tried === "tried" ? "trials of its components with each other passed, " : ""}and no run is recorded.`));
    parts.push(...ranOn(place));
    if (cell.together.length) {
      parts.push(element("p", {}, "Tested together upstream: ",
        ...cell.together.flatMap((number, n) => [n ? ", " : "", element("a", { href: `#rule-${data.rules[number][0]}` }, element("code", {}, data.rules[number][0]))])));
    }
    if (cell.pairs.length) {
      parts.push(element("h4", {}, "Its pairs of releases"), element("ul", { class: "tried" },
        ...pairsOf(cell).map(([text, known, verdict]) => element("li", { class: `${known} ${verdict}` }, text))));
    }
    const list = element("dl", { class: "pairs" });
    for (const [axis, version] of Object.entries(versionsOf(cell))) list.append(element("dt", {}, axis), element("dd", {}, version));
    parts.push(element("p", { class: "cellid" }, "Resolves to ", element("code", {}, cell.id), " ",
      element("a", { href: `#cell=${cell.id}` }, "link")), list, element("h4", {}, "It exists"));
    const gpus = Object.keys(cell.on).map(Number).filter((n) => n >= 0).map((n) => data.gpus[n][0]).sort((a, b) => a.slice(3) - b.slice(3));
    const pythons = data.pythons.filter((_, n) => bits(cell) >> n & 1);
    parts.push(element("p", {}, (gpus.length ? `on ${gpus.join(", ")}; ` : "") + `with Python ${pythons.join(", ")}`));
    const rules = element("details", {}, element("summary", {}, `${cell.rules.length} rules apply`));
    rules.append(element("ul", {}, ...cell.rules.map((number) => {
      const [id, kind, why] = data.rules[number];
      return element("li", {}, element("a", { href: `#rule-${id}` }, element("code", {}, id)), ` (${kind}): ${why}`);
    })));
    parts.push(rules);
  }
  panel.replaceChildren(...parts);
  panel.scrollTop = 0;
  if (focus) {
    panel.classList.add("open");
    roving();
    writeAddress(linkOf(place));
  }
}

// Hover shows the verdict in a line; a click shows the rest in the panel.
function hover(place) {
  let text = words[place.shown];
  const gpu = chosen.gpu && chosen.gpu.size === 1 ? [...chosen.gpu][0] : null;
  const number = place.cell === null ? -1 - place.number : place.shown === "out" ? place.cell.no_gpu[gpu] : undefined;
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
