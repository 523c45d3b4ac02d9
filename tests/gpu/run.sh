#!/usr/bin/env bash
# Runs this folder on the GPUs there are, a file a process, each under a time limit of its own.
#
# usage: tests/gpu/run.sh MODELS OUT [FILE...]
#   MODELS  folder with small/ and small-dflash/
#   OUT     a log for each file, and summary.txt
#   FILE    test files of this folder; default: all
# Environment: PYTHON (python3), LIMIT (seconds a file may take, 300), DEVICES (numbers of the GPUs,
# "0,1" for example; default: all), PER_GPU (files that share a GPU, 1). Files that watch the GPU's memory run first and have one to
# themselves; test_engine_parallel.py runs last and sees them all. The summary is printed at the end,
# also of a run that is interrupted.
set -uo pipefail
[ $# -ge 2 ] || { sed -n '/^# usage/,/^set/s/^# \{0,1\}//p' "$0"; exit 2; }
models=$(realpath "$1"); out=$(realpath -m "$2"); shift 2
cd "$(dirname "$0")/../.."
mkdir -p "$out"
export VLLM_DDTREE_SMALL=$models PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export OUT=$out PYTHON=${PYTHON:-python3} LIMIT=${LIMIT:-300}
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
export DEVICES=${DEVICES:-$(nvidia-smi --list-gpus | awk '{print NR - 1}' | paste -sd,)}
[ -n "$DEVICES" ] || { echo "no GPU" >&2; exit 2; }
GPUS=$(tr , '\n' <<< "$DEVICES" | wc -l)
"$PYTHON" - "$models" << 'CHECK' || exit 2
import importlib.util, os, sys
from importlib.metadata import entry_points

for name, fix in (("vllm", "pip install 'vllm>=0.32,<0.34'"), ("pytest", "pip install pytest")):
    if importlib.util.find_spec(name) is None:
        sys.exit(f"{sys.executable} has no {name}: {fix}")
if not any(point.name == "ddtree" for point in entry_points(group="vllm.general_plugins")):
    sys.exit(f"{sys.executable} does not have the plugin installed: pip install --no-deps -e {os.getcwd()}")
for name in ("small", "small-dflash"):
    if not os.path.isdir(os.path.join(sys.argv[1], name)):
        sys.exit(f"{sys.argv[1]} has no {name}/: MODELS is the folder of both")
CHECK
[ $# -gt 0 ] || set -- tests/gpu/test_*.py

run_file() {  # FILE [DEVICES]; without them, the one of its slot
    local name status devices; name=$(basename "$1" .py)
    devices=${2-$(tr , '\n' <<< "$DEVICES" | awk -v slot="${SLOT:-0}" '{d[NR - 1] = $1} END {print d[slot % NR]}')}
    CUDA_VISIBLE_DEVICES=$devices timeout --kill-after=10 "$LIMIT" \
        "$PYTHON" -m pytest "$1" -v -s --durations=0 > "$OUT/$name.log" 2>&1 &
    echo $! > "$OUT/running/$name"
    wait $!
    status=$?
    [ $status -eq 124 ] || [ $status -eq 137 ] && echo "timed out" >> "$OUT/$name.log"
    echo "$name: exit $status, $(tail -n 1 "$OUT/$name.log")" >> "$OUT/summary.txt"
    rm -f "$OUT/running/$name"
    [ $status -eq 0 ] || [ $status -eq 5 ]  # 5: nothing to run
}
export -f run_file

rm -rf "$OUT/running"
mkdir "$OUT/running"
: > "$OUT/summary.txt"
failed=0 jobs=
interrupted() {  # no more files; those that run are stopped, and say so in the summary
    trap '' INT TERM
    [ -z "$jobs" ] || kill "$jobs" 2> /dev/null
    cat "$OUT"/running/* 2> /dev/null | xargs -r kill 2> /dev/null
    for _ in $(seq 150); do
        [ -n "$(ls "$OUT/running")" ] || break
        sleep 0.1
    done
    echo "interrupted" >> "$OUT/summary.txt"
    exit 130
}
trap interrupted INT TERM
trap 'rm -rf "$OUT/running"; cat "$OUT/summary.txt"' EXIT

run_files() {  # JOBS FILE...
    local parallel=$1; shift
    # In the background: bash runs a trap during `wait`, but only after a command of the foreground.
    printf '%s\n' "$@" |
        xargs -r -P "$parallel" --process-slot-var=SLOT -I{} bash -c 'run_file {}' &
    jobs=$!
    wait "$jobs" || failed=1
    jobs=
}
alone=() shared=() last=()
for file in "$@"; do
    case $file in
        *parallel*) last+=("$file") ;;
        *graphs* | *sleep*) alone+=("$file") ;;
        *engine*) shared=("$file" "${shared[@]}") ;;  # those that take longest first
        *) shared+=("$file") ;;
    esac
done
[ ${#alone[@]} -eq 0 ] || run_files "$GPUS" "${alone[@]}"
[ ${#shared[@]} -eq 0 ] || run_files $((GPUS * ${PER_GPU:-1})) "${shared[@]}"
for file in "${last[@]}"; do
    run_file "$file" "$DEVICES" || failed=1
done
exit $failed
