#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes all test pairs side by side on one GPU.
#
# usage: benchmarks/training/run_all.sh OUT SECONDS MODELS
#
# MODELS holds small, small-dflash, nano, nano-dflash. OUT gets trained.00, trained.01, ... (see
# pack.py) and run.log. It ends within SECONDS (500 and more are of use). PYTHON: the interpreter.
# WORK: where the checkpoints grow (a new folder under /tmp). TRIAL: a few steps of each, tiny.
set -u
OUT=$(mkdir -p "$1" && cd "$1" && pwd)
SECONDS_IN_ALL=$2
MODELS=$(cd "$3" && pwd)
cd "$(dirname "$0")/../.." || exit 1
PYTHON=${PYTHON:-python3}
WORK=${WORK:-$(mktemp -d /tmp/training.XXXX)}
mkdir -p "$WORK"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-6}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
START=$(date +%s)

at() { # time of a share of the whole
    "$PYTHON" -c "print($START + $1 * $SECONDS_IN_ALL)"
}
TRIAL=${TRIAL:-}
MEGABYTES=80
HYBRID=() HYBRID_NANO=(--batch 48 --rollouts 1024) ROLLOUTS=() HEADS=() DRAFTERS=()
if [ -n "$TRIAL" ]; then
    MEGABYTES=4
    HYBRID=(--steps "$TRIAL" --batch 1 --length 128 --rollouts 2 --rollout-length 96 --held 1)
    HYBRID_NANO=("${HYBRID[@]}")
    ROLLOUTS=(--batch 2 --length 96 --held 1)
    HEADS=(--steps "$TRIAL" --batch 2 --anchors 2)
    DRAFTERS=("${HEADS[@]}")
fi

start() { # NAME MODULE ARGUMENTS...
    local name=$1
    shift
    timeout "$(($(date +%s) < START + SECONDS_IN_ALL - 20 ? START + SECONDS_IN_ALL - 20 - $(date +%s) : 1))" \
        "$PYTHON" -u -m "benchmarks.training.$@" >"$WORK/$name.log" 2>&1
    echo "$name: rc $? after $(($(date +%s) - START)) s"
}

target_and_conditional() {
    start rollouts rollouts "$MODELS/small" "$WORK/small.npz" "$WORK/small-rollouts.npz" \
        --until "$(at 0.17)" "${ROLLOUTS[@]}"
    start heads conditional small "$MODELS/small" "$MODELS/small-dflash" \
        "$WORK/small-rollouts.npz" "$WORK" --until "$(at 0.40)" "${HEADS[@]}"
    start dspark drafters dspark small "$MODELS/small" "$MODELS/small-dflash" \
        "$WORK/small-rollouts.npz" "$WORK" --until "$(at 0.80)" "${DRAFTERS[@]}"
}
wide() {
    start wide drafters wide small "$MODELS/small" "$MODELS/small-dflash" \
        "$WORK/small-rollouts.npz" "$WORK" --until "$(at 0.70)" "${DRAFTERS[@]}"
}
nano() {
    start nano-rollouts rollouts "$MODELS/nano" "$WORK/nano.npz" "$WORK/nano-rollouts.npz" \
        --until "$(at 0.12)" "${ROLLOUTS[@]}"
    start nano-hybrid hybrid nano "$MODELS/nano" "$MODELS/nano-dflash" "$WORK/nano.npz" "$WORK" \
        --target-until "$(at 0.38)" --until "$(at 0.60)" "${HYBRID_NANO[@]}"
    start nano-heads conditional nano "$MODELS/nano" "$MODELS/nano-dflash" \
        "$WORK/nano-rollouts.npz" "$WORK" --until "$(at 0.75)" "${HEADS[@]}"
}
hybrid() {
    start hybrid hybrid small "$MODELS/small" "$MODELS/small-dflash" "$WORK/small.npz" "$WORK" \
        --target-until "$(at 0.61)" --until "$(at 0.90)" "${HYBRID[@]}"
}

(
    start corpus corpus "$WORK" --megabytes "$MEGABYTES" \
        --tokenizer small="$MODELS/small" --tokenizer nano="$MODELS/nano" &
    hybrid &
    target_and_conditional &
    wide &
    nano &
    wait
) 2>&1 | tee "$WORK/run.log"
"$PYTHON" -m benchmarks.training.pack "$WORK" "$OUT" '*.json' '*.log' small-hybrid \
    small-hybrid-dflash small-heads.safetensors nano-hybrid nano-hybrid-dflash \
    nano-heads.safetensors small-dflash-wide small-dspark | tee -a "$WORK/run.log"
tail -n 8 "$WORK"/*.log >"$OUT/run.log"
cat "$OUT/run.log"
echo "ended after $(($(date +%s) - START)) s"
