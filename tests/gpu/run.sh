#!/usr/bin/env bash
# Runs this folder on the GPUs there are, a file a process, each under a time limit of its own.
#
# usage: tests/gpu/run.sh MODELS OUT [FILE...]
#   MODELS  folder with small/ and small-dflash/
#   OUT     a log for each file, and summary.txt
#   FILE    test files of this folder; default: all
# Environment: PYTHON (python3), LIMIT (seconds a file may take, 300), GPUS (default: all).
# One GPU serves one file at a time; test_engine_parallel.py runs last and sees them all.
set -uo pipefail
models=$(realpath "$1"); out=$(realpath -m "$2"); shift 2
cd "$(dirname "$0")/../.."
mkdir -p "$out"
export VLLM_DDTREE_SMALL=$models PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export OUT=$out PYTHON=${PYTHON:-python3} LIMIT=${LIMIT:-300}
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
gpus=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
[ "$gpus" -ge 1 ] || { echo "no GPU"; exit 2; }
[ $# -gt 0 ] || set -- tests/gpu/test_*.py

run_file() {  # FILE [DEVICES]
    local name status; name=$(basename "$1" .py)
    CUDA_VISIBLE_DEVICES=${2-${SLOT:-0}} timeout --kill-after=10 "$LIMIT" \
        "$PYTHON" -m pytest "$1" -v -s --durations=0 > "$OUT/$name.log" 2>&1
    status=$?
    [ $status -eq 124 ] || [ $status -eq 137 ] && echo "timed out" >> "$OUT/$name.log"
    echo "$name: exit $status, $(tail -n 1 "$OUT/$name.log")" >> "$OUT/summary.txt"
    [ $status -eq 0 ] || [ $status -eq 5 ]  # 5: nothing to run
}
export -f run_file

: > "$OUT/summary.txt"
failed=0
# Those with the most engines first.
for file in "$@"; do
    case $file in
        *parallel*) ;;
        *graphs*) echo "0 $file" ;;
        *engine*) echo "1 $file" ;;
        *) echo "2 $file" ;;
    esac
done | sort | cut -d' ' -f2 |
    xargs -r -P "$gpus" --process-slot-var=SLOT -I{} bash -c 'run_file {}' || failed=1
for file in "$@"; do
    case $file in
        *parallel*) run_file "$file" "$(seq -s, 0 $((gpus - 1)))" || failed=1 ;;
    esac
done
cat "$OUT/summary.txt"
exit $failed
