# SPDX-License-Identifier: Apache-2.0
#
# What .ci/run and .ci/long share. Sourced from the root of the repository.

work="$(mktemp -d "${TMPDIR:-/tmp}/tiledattn-ci.XXXXXX")"
keep_python="${PYTHON:-python3}"
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1

fail() {
  echo "FAILED: $*" >&2
  exit 1
}

# python_environment FOLDER [PYTHON]: makes a new virtual environment and activates it.
python_environment() {
  "${2:-$keep_python}" -m venv "$1"
  # shellcheck disable=SC1091
  source "$1/bin/activate"
  pip install --quiet --upgrade "pip>=25.1"
}

# The files that git tracks or would track: what a clone has, before a commit as well.
tracked_files() {
  git ls-files -z --cached --others --exclude-standard --deduplicate
}

cxx_files() {
  tracked_files | grep -zE '\.(h|inl|c|cpp|cu|cuh)$'
}

# clean_copy FOLDER: the tree without build outputs.
clean_copy() {
  mkdir -p "$1"
  tracked_files | tar --null --files-from=- --create --ignore-failed-read | tar --extract --directory "$1"
}

# build FOLDER: the log goes to FOLDER.log; on failure its end is shown.
build() {
  if ! cmake --build "$1" --parallel 2 >"$1.log" 2>&1; then
    grep -E -A 12 "FAILED|error:" "$1.log" | tail -n 80
    fail "build in $1"
  fi
}

# run_steps "A B" or run_steps A B: each in a subshell, so that environments do not mix; a failed one ends the script.
run_steps() {
  local step start
  # shellcheck disable=SC2048,SC2086
  for step in $*; do
    [ "$(type -t "$step")" = function ] || fail "there is no step '$step'"
    echo "== $step"
    start=$SECONDS
    (set -euo pipefail; "$step")
    times="${times:-}$(printf '%-12s %4d s' "$step" $((SECONDS - start)))"$'\n'
    [ "$step" = readme ] || echo "== $step took $((SECONDS - start)) s"
  done
}
