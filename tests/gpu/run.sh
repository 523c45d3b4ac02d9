#!/usr/bin/env bash
# Runs this folder on the GPUs there are, a file a process, each under a time limit of its own.
#
# usage: tests/gpu/run.sh MODELS OUT [FILE...]
#   MODELS  folder with small/ and small-dflash/
#   OUT     a log for each file, and summary.txt
#   FILE    test files of this folder; default: all
# Environment: PYTHON (python3), LIMIT (seconds a file may take, 300), GPUS (default: all),
# PER_GPU (files that share a GPU, 1). Files that watch the GPU's memory run first and have one to
# themselves; test_engine_parallel.py runs last and sees them all.
set -uo pipefail
models=$(realpath "$1"); out=$(realpath -m "$2"); shift 2
cd "$(dirname "$0")/../.."
mkdir -p "$out"
export VLLM_DDTREE_SMALL=$models PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export OUT=$out PYTHON=${PYTHON:-python3} LIMIT=${LIMIT:-300}
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
export GPUS=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
[ "$GPUS" -ge 1 ] || { echo "no GPU"; exit 2; }
[ $# -gt 0 ] || set -- tests/gpu/test_*.py

run_file() {  # FILE [DEVICES]
    local name status; name=$(basename "$1" .py)
    CUDA_VISIBLE_DEVICES=${2-$((${SLOT:-0} % GPUS))} timeout --kill-after=10 "$LIMIT" \
        "$PYTHON" -m pytest "$1" -v -s --durations=0 > "$OUT/$name.log" 2>&1
    status=$?
    [ $status -eq 124 ] || [ $status -eq 137 ] && echo "timed out" >> "$OUT/$name.log"
    echo "$name: exit $status, $(tail -n 1 "$OUT/$name.log")" >> "$OUT/summary.txt"
    [ $status -eq 0 ] || [ $status -eq 5 ]  # 5: nothing to run
}
export -f run_file

: > "$OUT/summary.txt"
failed=0
run_files() {  # JOBS FILE...
    local jobs=$1; shift
    printf '%s\n' "$@" |
        xargs -r -P "$jobs" --process-slot-var=SLOT -I{} bash -c 'run_file {}' || failed=1
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
    run_file "$file" "$(seq -s, 0 $((GPUS - 1)))" || failed=1
done
cat "$OUT/summary.txt"
exit $failed
