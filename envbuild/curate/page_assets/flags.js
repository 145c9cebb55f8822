// What people type or link to, read as the command line reads it: versions, specs, flags. No page is needed for any of this.

const FLAG_AXES = ["cuda", "torch", "te", "gpu", "python", "driver"];
// What people call an axis; a version may follow at once, as in a cell's id: cu126, te2.6, py312.
const AXIS_NAMES = {
  cuda: "cuda", cu: "cuda", torch: "torch", pytorch: "torch", te: "te", "transformer-engine": "te", transformerengine: "te",
  python: "python", py: "python", cp: "python", gpu: "gpu", driver: "driver", "nvidia-driver": "driver",
};
const SKIPPED_WORDS = new Set(["and", "with", "on", "for", "or", "is", "there", "which", "does", "fit", "image", "+", "&", "?", "a", "the",
  "envbuild", "resolve", "explain", "lock", "render", "run", "pull", "$"]);

const VERSION = /^v?(\d+(?:\.\d+)*)(?:[._-]?(a|b|rc|alpha|beta|c)[._-]?(\d*))?(?:[._-]?post[._-]?(\d*))?(?:[._-]?dev[._-]?(\d*))?(?:\+[\w.]+)?$/i;
const numbers = (text) => text.split(".").map(Number);

// [release, pre-release, post-release, dev-release]: what two versions are compared by; null for a name such as `cpu`.
function versionKey(text) {
  const found = VERSION.exec(text.trim());
  if (!found) return null;
  const [, release, kind, pre, post, dev] = found;
  const rank = { a: 0, alpha: 0, b: 1, beta: 1, c: 2, rc: 2 };
  const before = kind ? [rank[kind.toLowerCase()], Number(pre || 0)] : dev !== undefined && post === undefined ? [-1, 0] : [3, 0];
  return { release: numbers(release), pre: before, isPre: kind !== undefined || dev !== undefined,
    post: post === undefined ? -1 : Number(post || 0), dev: dev === undefined ? Infinity : Number(dev || 0) };
}

function compareNumbers(one, other) {
  for (let n = 0; n < Math.max(one.length, other.length); n += 1) {
    const difference = (one[n] || 0) - (other[n] || 0);
    if (difference) return difference;
  }
  return 0;
}

function compareVersions(one, other) {
  return compareNumbers(one.release, other.release) || compareNumbers(one.pre, other.pre) || one.post - other.post
    || (one.dev === other.dev ? 0 : one.dev - other.dev);
}

const begins = (version, prefix) => prefix.every((number, n) => (version.release[n] || 0) === number);

// One specifier of PEP 440 as a function of a version's key; null when it is none.
function specifier(text) {
  const prefix = /^(\d+(?:\.\d+)*)$/.exec(text); // 12.6 means 12.6.*, so that 2.1 is not 2.10
  if (prefix) return (version) => begins(version, numbers(prefix[1]));
  const found = /^(==|!=|>=|<=|~=|>|<)?\s*([\w.+-]+?)(\.\*)?$/.exec(text);
  const key = found && versionKey(found[2]);
  if (!key) return null;
  const [, sign = "==", , star] = found;
  if (star) {
    if (sign === "==") return (version) => begins(version, key.release);
    return sign === "!=" ? (version) => !begins(version, key.release) : null;
  }
  if (sign === "~=" && key.release.length < 2) return null;
  return (version) => {
    const order = compareVersions(version, key);
    const same = compareNumbers(version.release, key.release) === 0;
    switch (sign) {
      case "==": return order === 0;
      case "!=": return order !== 0;
      case ">=": return order >= 0;
      case "<=": return order <= 0;
      case ">": return order > 0 && !(same && version.post >= 0 && key.post < 0);
      case "<": return order < 0 && !(same && version.isPre && !key.isPre);
      default: return order >= 0 && begins(version, key.release.slice(0, -1));
    }
  };
}

// A whole spec (">=2.6,<2.8", "2.6 || 2.8") as a function of a version's key; null when it is none.
function specifiers(text) {
  const parts = text.split("||").map((part) => part.split(",").map((each) => specifier(each.trim())));
  if (parts.some((part) => part.includes(null))) return null;
  return (version) => parts.some((part) => part.every((each) => each(version)));
}

// What a board's name is without the words that do not decide its compute capability.
const NOISE = /^(nvidia|geforce|tesla|generation|laptop|mobile|gpu|super|d|server|workstation|edition|max|q|blackwell|pcie|sxm\d?|nvl|hbm\d?e?|\d+gb)$/i;
function boardKey(name) {
  const words = name.trim().split(/[\s_-]+/).filter(Boolean);
  const kept = words.filter((word) => !NOISE.test(word));
  return (kept.length ? kept : words).join("").toLowerCase();
}

function gpuMatches(text, gpu) {
  const [version, , aliases, boards] = gpu;
  const capability = /^(\d{1,2})\.(\d)[af]?$/i.exec(text);
  const arch = /^(?:sm|compute)?[_ ]?(\d{2,3})[af]?$/i.exec(text);
  const wanted = capability ? `sm_${capability[1]}${capability[2]}` : arch ? `sm_${arch[1]}` : null;
  if (text === "any" || text === "auto" || text === version || wanted === version) return true;
  return [...aliases, ...boards].some((name) => boardKey(name) === boardKey(text));
}

// Whether a release of an axis is what a spec asks for. `names`: its version, its aliases, its commit.
function releaseMatches(axis, spec, names) {
  let text = spec.trim();
  if (text === "any" || text === "auto" || names.includes(text)) return true;
  if (/^[0-9a-f]{7,40}$/.test(text) && names.some((name) => /^[0-9a-f]{40}$/.test(name) && name.startsWith(text))) return true;
  const variant = axis === "cuda" && /^cu(?:da)?[ _-]?(\d{1,2})\.?(\d)(?:\.\d+)?$/i.exec(text);
  const python = axis === "python" && /^(?:py|cp|python) ?3\.?(\d{1,2})$/i.exec(text);
  if (variant) text = `${variant[1]}.${variant[2]}`;
  else if (python) text = `3.${python[1]}`;
  else text = text.replace(/^(?:[A-Za-z]+[_-])?[vV]?(?=\d)/, "");
  const fits = text.includes("+") ? null : specifiers(text);
  const key = fits && versionKey(names[0]);
  return Boolean(key) && fits(key);
}

// What a text of the command line is split into; quotes hold words together, and one that is never closed ends with the text.
function shellWords(text) {
  const words = [];
  // curly quotes and dashes are what a chat or a text processor makes of the ones that were typed
  const typed = text.replace(/[\u2018\u2019]/g, "'").replace(/[\u201c\u201d]/g, '"').replace(/(^|\s)[\u2013\u2014](?=\w)/g, "$1--");
  for (const match of typed.matchAll(/(?:[^\s"']+|"[^"]*"?|'[^']*'?)+/g)) words.push(match[0].replace(/["']/g, ""));
  return words;
}

const similar = (text, known) => {
  const distance = (one, other) => {
    let row = [...other].map((_, n) => n + 1);
    row.unshift(0);
    [...one].forEach((letter, y) => {
      const next = [y + 1];
      [...other].forEach((wanted, x) => next.push(Math.min(row[x + 1] + 1, next[x] + 1, row[x] + (letter !== wanted))));
      row = next;
    });
    return row[other.length];
  };
  const near = known.map((name) => [name.startsWith(text) || text.startsWith(name) ? 0 : distance(text, name), name]);
  return near.filter(([far]) => far <= Math.max(1, Math.floor(text.length / 3))).sort((a, b) => a[0] - b[0]).slice(0, 3).map(([, name]) => name);
};

/* Read what somebody typed: flags as on the command line, or words such as "CUDA 12.6 and TE 2.6?".
   `known`: {flags: axes and other flags of a cell, gpus}. Returns {asked: flag -> spec, notes: what was not understood, cell}. */
function readFlags(text, known) {
  const asked = {};
  const notes = [];
  let cell = null;
  const listed = new Set(known.flags);
  const take = (flag, value) => {
    if (flag in asked && asked[flag] !== value) notes.push(`--${flag} is there twice; the last one counts: ${value}`);
    asked[flag] = value;
  };
  const unknown = (written, name) => {
    const near = similar(name.toLowerCase(), known.flags).map((each) => `--${each}`);
    notes.push(`There is no flag ${written}. ${near.length ? `Similar: ${near.join(", ")}.` : `This page filters by ${FLAG_AXES.map((each) => `--${each}`).join(", ")}.`}`);
  };
  let whole = text.trim();
  const first = whole[0];
  if (/^["'\u201c\u2018]/.test(first || "") && /["'\u201d\u2019]$/.test(whole) && whole.length > 1
    && !/["'\u201c\u201d\u2018\u2019]/.test(whole.slice(1, -1))) whole = whole.slice(1, -1); // the whole of it is quoted
  const words = shellWords(whole.replace(/transformer[ _-]+engine/gi, "transformer-engine").replace(/nvidia[ _-]+driver/gi, "nvidia-driver"));
  for (let n = 0; n < words.length; n += 1) {
    const word = words[n];
    const flag = /^(-{1,2})([A-Za-z][\w-]*)(?:=(.*))?$/.exec(word);
    if (flag) {
      const [, dashes, written, joined] = flag;
      const name = AXIS_NAMES[written.toLowerCase()] || written.toLowerCase().replaceAll("_", "-");
      const next = words[n + 1];
      const value = joined !== undefined ? joined : next !== undefined && !/^--?[A-Za-z]/.test(next) ? next : undefined;
      if (joined === undefined && value !== undefined) n += 1;
      if (!listed.has(name)) unknown(`${dashes}${written}`, name);
      else if (!value) notes.push(`--${name} needs a value, for example ${name === "gpu" ? "--gpu h100" : `--${name} ${{ cuda: "12.6", te: "2.6", python: "3.12", driver: "560.35.05" }[name] || "VERSION"}`}.`);
      else take(name, value);
      continue;
    }
    const plain = word.replace(/[?!,;]+$/, "");
    if (!plain || SKIPPED_WORDS.has(plain.toLowerCase())) continue;
    const named = AXIS_NAMES[plain.toLowerCase()] || (listed.has(plain.toLowerCase()) ? plain.toLowerCase() : null);
    if (named) { // te 2.6
      const value = (words[n + 1] || "").replace(/[?!,;]+$/, "");
      if (value && !AXIS_NAMES[value.toLowerCase()] && !value.startsWith("-")) { take(named, value); n += 1; }
      else notes.push(`${plain}: which version? For example --${named} ${named === "gpu" ? "h100" : "2.6"}.`);
      continue;
    }
    if (/^(cu\d+|cpu)-py\d/i.test(plain)) { cell = plain; continue; }
    const joined = /^([a-z][a-z_-]*?)\s*(?:=(?!=)|(?=[=<>!~]))(.+)$/i.exec(plain); // te=2.6, torch==2.8.0, te>=2.6
    const axis = joined && (AXIS_NAMES[joined[1].toLowerCase()] || (listed.has(joined[1].toLowerCase()) ? joined[1].toLowerCase() : null));
    if (axis) { take(axis, joined[2]); continue; }
    const tight = /^([a-z]+)[-_]?(\d[\w.+]*)$/i.exec(plain); // cu126, te2.6, torch2.8.0, py312
    const tightAxis = tight && AXIS_NAMES[tight[1].toLowerCase()];
    if (tightAxis) {
      const digits = /^3\d+$/.test(tight[2]) && tightAxis === "python" ? `3.${tight[2].slice(1)}`
        : /^\d{3}$/.test(tight[2]) && tightAxis === "cuda" ? `${tight[2].slice(0, -1)}.${tight[2].slice(-1)}` : tight[2];
      take(tightAxis, digits);
      continue;
    }
    if (/^[a-z]/i.test(plain) && known.gpus.some((gpu) => gpuMatches(plain, gpu))) { take("gpu", plain); continue; }
    if (VERSION.test(plain)) notes.push(`${plain}: of what? Write --cuda ${plain} or --te ${plain}, for example.`);
    else notes.push(`\u201c${plain}\u201d is not understood. Write flags as on the command line, for example --cuda 12.6 --te 2.6.`);
  }
  return { asked, notes, cell };
}

// A value as a shell reads it back.
const shellQuoted = (text) => (/^[\w.+:@%/=-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);
const flagText = (asked) => Object.entries(asked).map(([flag, value]) => `--${flag} ${shellQuoted(value)}`).join(" ");

/* Whether a driver starts a CUDA release on a GPU: "starts", "compat" (with the package cuda-compat alone) or "no".
   `facts`: {floor, branches} of the release; `gpu`: {first, last, dataCenter}, null where none is chosen. */
function driverVerdict(facts, gpu, version, geforce) {
  if (!facts.floor) return "starts"; // torch's CPU build
  const branch = version.release[0];
  if (gpu && ((gpu.first && branch < gpu.first) || (gpu.last && branch > gpu.last))) return "no";
  if (compareVersions(version, versionKey(facts.floor)) >= 0) return "starts";
  return facts.branches.includes(String(branch)) && gpu && gpu.dataCenter && !geforce ? "compat" : "no";
}

// The drivers that a spec names: those that are listed, or the very version, which need not be.
function driversOf(spec, listed) {
  const text = spec.trim();
  const own = /^\d+(\.\d+)*$/.test(text) ? versionKey(text) : null;
  if (own && text.includes(".")) return [own];
  const fits = text === "any" ? () => true : specifiers(text);
  const found = fits ? listed.map(versionKey).filter(fits) : [];
  return found.length ? found : own ? [own] : [];
}
