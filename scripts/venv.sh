#!/usr/bin/env bash
# Makes or refreshes .venv in the checkout: everything that running, testing and checking needs, at the versions of
# constraints.txt. Does nothing (in well under a second) when it is already as pyproject.toml and constraints.txt say.
#
#   scripts/venv.sh            make it
#   source scripts/venv.sh     make it, and set ROOT, VENV and the environment that our processes run in
#
# PYTHON=python3.12 scripts/venv.sh makes it with another interpreter. pip's own settings (PIP_INDEX_URL, PIP_FIND_LINKS, ...)
# say where packages come from, for example a CPU-only build of torch.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$ROOT/.venv"

# One thread a process: ranks and test workers share the cores. Safe path: the checkout's own folders (kernels, workers)
# must never be importable under their bare names.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}" PYTHONSAFEPATH=1
export RAY_USAGE_STATS_ENABLED=0 RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0 RAY_DISABLE_IMPORT_WARNING=1 RAY_COLOR_PREFIX=0
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

# What the environment was made from; the checkout's place counts because the editable install points there.
venv_fingerprint() {
    { cat "$ROOT/constraints.txt" "$ROOT/pyproject.toml" "$ROOT/setup.py"; echo "$ROOT"; } | cksum
}

venv_is_current() {
    [ -x "$VENV/bin/python" ] && [ "$(cat "$VENV/.fingerprint" 2>/dev/null)" = "$(venv_fingerprint)" ]
}

make_venv() {
    local python="${PYTHON:-python3}" log="$VENV.log"
    if ! command -v "$python" >/dev/null; then
        echo "venv.sh: $python is not on the path: install Python 3.11 or later, or name one with PYTHON=..." >&2
        return 1
    fi
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "venv.sh: $("$python" --version 2>&1) is too old: longprefill needs Python 3.11 or later;" \
            "name one with PYTHON=python3.11" >&2
        return 1
    fi
    if ! command -v "${CXX:-g++}" >/dev/null; then
        echo "venv.sh: warning: no C++ compiler (${CXX:-g++}): the C++ kernels" \
            "cannot be built; install g++ or set CXX" >&2
    fi
    # The programs in an environment name its place, so one that was moved or half made is made anew.
    if ! grep -qsF "$VENV" "$VENV/bin/activate" || ! "$VENV/bin/python" -c 'import pip' 2>/dev/null; then
        echo "venv.sh: making $VENV with $("$python" --version) (log: $log)" >&2
        if ! "$python" -m venv --clear "$VENV" >"$log" 2>&1; then
            cat "$log" >&2
            echo "venv.sh: $python cannot make virtual environments (on Debian: install python3-venv)" >&2
            return 1
        fi
    fi
    echo "venv.sh: installing the packages of pyproject.toml at the versions of constraints.txt" >&2
    # Ours is built without isolation, so its build tools come first; the constraints hold for every step, torch above all.
    local pip=("$VENV/bin/python" -m pip --quiet --disable-pip-version-check install --constraint "$ROOT/constraints.txt")
    if ! { "${pip[@]}" setuptools wheel && "${pip[@]}" --no-build-isolation --editable "$ROOT[serve,dev]"; } >"$log" 2>&1; then
        cat "$log" >&2
        echo "venv.sh: the installation failed; what pip said stands above and in $log. Run it again to continue" >&2
        return 1
    fi
    rm -f "$log"
    venv_fingerprint >"$VENV/.fingerprint"
}

ensure_venv() {
    venv_is_current && return 0
    # Two scripts started at once must not install into one environment together.
    if command -v flock >/dev/null; then
        (
            flock 9
            venv_is_current || make_venv
        ) 9>"$ROOT/.venv.lock"
    else
        make_venv
    fi
}

# Tools that read files instead of importing cannot see the mapping of longprefill.X to X: they get a folder of links.
link_typing() {
    local root
    mkdir -p "$ROOT/build/typing/longprefill"
    for root in partition kernels comms workers orchestrator; do
        ln -sfn "../../../$root" "$ROOT/build/typing/longprefill/$root"
    done
}

# A shell script that sources this answers --help with the comment at its own top, before anything is installed. Python
# scripts source it in their first line, for the interpreter, and answer themselves.
is_shell() {
    head -n 1 "$1" | grep -q 'bash$'
}

print_help() {
    awk 'NR > 1 && /^#/ { sub(/^# ?/, ""); print; next } NR > 1 { exit }' "$1"
}

for argument in "$@"; do
    case "$argument" in
        -h | --help) if is_shell "$0"; then print_help "$0"; exit 0; fi ;;
    esac
done
unset argument

ensure_venv || { [ "${BASH_SOURCE[0]}" = "$0" ] && exit 1 || return 1; }
