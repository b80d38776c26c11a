#!/usr/bin/env bash
# One cell of the matrix in docs/results/fresh-machine.md: a fresh clone and a fresh virtual environment, under one
# condition, and a line of Markdown for each thing that was tried.
#
#   benchmarks/fresh_machine.sh plain
#   PYTHON=python3.13 TORCH='torch==2.14.*' benchmarks/fresh_machine.sh plain
#   PYTHON=/usr/bin/python3 benchmarks/fresh_machine.sh no-root
#
# Conditions: plain, no-compiler, no-ipv6, umask, read-only-home, odd-path, no-root. The last needs a PYTHON that
# others may read; no-ipv6, read-only-home and no-root need root. PLACE (default: /tmp) has the room for a clone,
# an environment and what torch needs. VENV: an environment that is there already, with the packages.
# TESTS: what pytest is given. Nothing of the machine is changed; everything lies in one directory that goes.
set -euo pipefail
condition=${1:?which condition?}
python=${PYTHON:-python3}
torch=${TORCH:-}
tests=${TESTS:-tests/unit tests/ranks/test_world.py tests/ranks/test_engine.py tests/ranks/test_launch.py}
repository=$(cd "$(dirname "$0")/.." && pwd)
place=$(mktemp -d "${PLACE:-/tmp}/fresh-XXXXXX")
trap 'rm -rf "$place"' EXIT
here=$place/here
environment=(PATH="$PATH" HOME="$place/home" TMPDIR="$place/tmp" LC_ALL=C.UTF-8)
enter=()
mkdir -m 755 "$place/home"
mkdir -m 1777 "$place/tmp"
chmod 755 "$place"

case $condition in
  plain) ;;
  odd-path) here="$place/mit Leerzeichen und Ümläuten" ;;
  umask) umask 077 ;;
  no-compiler)
    mkdir "$place/bin"
    IFS=: read -ra directories <<<"$PATH"
    for directory in "${directories[@]}"; do
      for program in "$directory"/*; do
        case ${program##*/} in
          cc | c89* | c99* | gcc* | g++* | c++* | clang* | tcc | *-gcc* | *-g++* | *-clang*) ;;
          *) [ -e "$place/bin/${program##*/}" ] || ln -s "$program" "$place/bin/" ;;
        esac
      done
    done
    environment[0]="PATH=$place/bin"
    ;;
  no-ipv6)
    enter=(unshare --net sh -c 'ip link set lo up; echo 1 | tee /proc/sys/net/ipv6/conf/*/disable_ipv6 >/dev/null; exec "$@"' sh)
    ;;
  read-only-home)
    enter=(unshare --mount sh -c 'mount --bind "$HOME" "$HOME" && mount -o remount,bind,ro "$HOME" && ! touch "$HOME/x" 2>/dev/null && exec "$@"' sh)
    ;;
  no-root)
    enter=(setpriv --reuid=12345 --regid=12345 --clear-groups)
    chmod 777 "$place"
    chown 12345:12345 "$place/home"
    ;;
  *)
    echo "unknown condition $condition" >&2
    exit 2
    ;;
esac

cell="$condition, $("$python" --version 2>&1)${torch:+, $torch}"
row() { printf '| %s | %s | %s | %s |\n' "$cell" "$(date -u +%Y-%m-%d)" "$1" "$2"; }
try() { # NAME COMMAND...: run it under the condition, in the clone
  local name=$1 seconds=$SECONDS code=0 said=$place/said
  shift
  (cd "$here" && env -i "${environment[@]}" "${enter[@]}" "$@") >"$said" 2>&1 </dev/null || code=$?
  if [ $code = 0 ]; then
    row "$name" "passed, $((SECONDS - seconds)) s: $(grep -v '^ *$' "$said" | tail -n 1 | tr '|' '/' | cut -c1-110)"
  else
    row "$name" "FAILED with $code"
    tail -n "${LINES_SHOWN:-40}" "$said" >&2
  fi
}

git clone -q "$repository" "$here"
[ "$condition" != no-root ] || chown -R 12345:12345 "$here"
venv=${VENV:-}
if [ -z "$venv" ]; then
  venv=$here/.venv
  sed "s/^torch==.*/$torch/" "$here/constraints.txt" >"$place/constraints.txt"
  [ -n "$torch" ] || cp "$here/constraints.txt" "$place/constraints.txt"
  chmod 644 "$place/constraints.txt"
  # Packages are fetched with the caller's settings of pip, whatever the condition.
  (cd "$here" && "${enter[@]:0:$([ "$condition" = no-root ] && echo 4 || echo 0)}" env HOME="$place/home" bash -c '
    "$1" -m venv .venv && .venv/bin/pip install -q --no-cache-dir -c "$2" -e ".[test]"' sh "$python" "$place/constraints.txt") \
    >"$place/said" 2>&1 && row "make .venv, pip install" passed || { row "pip install" FAILED; tail -n 20 "$place/said" >&2; exit 1; }
fi
cell="$cell (torch $("$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))'))"
environment+=(PYTHONPATH="$here/src" PYTHONDONTWRITEBYTECODE=1)
try "farandole demo --steps 6" "$venv/bin/python" -m farandole demo --steps 6
try "farandole run -np 2 -- python examples/loop_after.py" "$venv/bin/python" -m farandole run -np 2 -- "$venv/bin/python" examples/loop_after.py
read -ra words <<<"$tests"
try "pytest ${#words[@]} folders and files" "$venv/bin/python" -m pytest -q -p no:cacheprovider "${words[@]}"
