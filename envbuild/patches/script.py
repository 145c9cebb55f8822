"""Applying patches inside a build: shell for a stage that has git and no envbuild."""

import shlex
from collections.abc import Iterable

from envbuild.patches.manifest import Patch, in_order

# The stage that patches a source has git and no envbuild. The files are patched as copies in a separate folder, so
# that git sees no repository, no attributes and no configuration, and the tree changes only once every id is right.
_SCRIPT_HEAD = r"""(
unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE GIT_DEFAULT_HASH CDPATH
export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null HOME=/nonexistent XDG_CONFIG_HOME=/nonexistent LC_ALL=C
fail() { printf 'envbuild: error: %s\n' "$1" >&2; exit 4; }
tree=$(pwd -P)
[ -d "${PATCHES:-}" ] || fail 'PATCHES names no folder'
command -v git >/dev/null || fail 'git is missing'
patches=$(cd "$PATCHES" && pwd -P)
stage=$(mktemp -d) && stage=$(cd "$stage" && pwd -P) || fail 'no place for temporary files'
trap 'rm -rf "$stage"' EXIT
export GIT_CEILING_DIRECTORIES="$stage"
mkdir "$stage/new" "$stage/old" && cd "$stage/new" || fail 'no place for temporary files'
changed=
blob() { git hash-object --no-filters --stdin < "$1"; }
take() {
  folder=$(dirname "$1")
  [ -e "$tree/$1" ] || [ -L "$tree/$1" ] || fail "$1 is missing in $tree"
  place=$tree
  [ "$folder" = . ] || place=${tree%/}/$folder
  [ ! -L "$tree/$1" ] && [ "$(cd "$tree/$folder" && pwd -P)" = "$place" ] || fail "$1 is or lies behind a symbolic link in $tree"
  [ -f "$tree/$1" ] || fail "$1 is no file in $tree"
  mkdir -p "./$folder" "../old/$folder" && cat "$tree/$1" > "./$1" && cp "./$1" "../old/$1" || fail "$1 cannot be read in $tree"
}
begin() { patch=$1 file=$2 known=$3 before='' after=''; }
image() {
  found=$(blob "./$1") || fail "git cannot hash $1"
  if [ "$found" = "$2" ]; then before="$before $1"; return; fi
  case " $3 $4 " in *" $found "*) after="$after $1"; return;; esac
  why=
  bare=$(tr -d '\r' < "./$1" | git hash-object --no-filters --stdin)
  case " $2 $3 " in *" $bare "*) why='; it is that file with CRLF line ends';; esac
  fail "patch $patch: $1 has blob $found, expected $2 (before) or $3 (after); the patch knows $known$why"
}
change() {
  if [ -z "$before" ]; then echo "patch $patch: already applied"; return 1; fi
  [ -z "$after" ] || fail "patch $patch is in$after already but not in$before"
  git apply --whitespace=nowarn "$patches/$file" || fail "patch $patch: $patches/$file does not apply"
}
became() {
  found=$(blob "./$1")
  [ "$found" = "$2" ] || fail "patch $patch makes blob $found of $1, its manifest states $2"
  changed="$changed $1"
}
"""

_SCRIPT_TAIL = r"""for path in $changed; do
  cp -p "$tree/$path" "$tree/$path.envbuild" && cat "./$path" > "$tree/$path.envbuild" || {
    for undo in $changed; do rm -f "$tree/$undo.envbuild"; done
    fail "$path cannot be written in $tree"
  }
done
for path in $changed; do
  [ ! -e "$tree/$path.envbuild" ] || mv -f "$tree/$path.envbuild" "$tree/$path" || {
    for undo in $changed; do cat "../old/$undo" > "$tree/$undo"; rm -f "$tree/$undo.envbuild"; done
    fail "$path cannot be replaced in $tree"
  }
done
) || exit $?
"""


def apply_script(patches: Iterable[Patch]) -> str:
    """Return POSIX shell that applies the patches to the tree in the current folder, for a stage that has git.

    It finds the diffs at `$PATCHES/TARGET/NAME.patch`, verifies every blob id before and after, says so and changes
    nothing where a patch is in already, and exits with 4 and one message, the tree untouched, where one is refused. The
    tree need not be a git checkout.

    Raises:
        DataError: the patches contradict each other.

    """
    ordered = in_order(patches)
    if not ordered:
        return ""
    lines = [f"take {path}" for path in sorted({file.path for patch in ordered for file in patch.files})]
    for index, patch in enumerate(ordered):
        behind = [later for later in ordered[index + 1 :] if later.target == patch.target]
        lines.append(f"begin {patch.name} {patch.filename} {shlex.quote(patch.known())}")
        for file in patch.files:
            posts = " ".join(f.post for later in behind for f in later.files if f.path == file.path)
            lines.append(f"image {file.path} {file.pre} {file.post} '{posts}'")
        became = "; ".join(f"became {file.path} {file.post}" for file in patch.files)
        lines.append(f"if change; then {became}; echo 'patch {patch.name}: applied'; fi")
    return _SCRIPT_HEAD + "\n".join(lines) + "\n" + _SCRIPT_TAIL
