#!/usr/bin/env bash
# Everything that is timed, on one GPU, in under 8 minutes: each step has a limit of its own, the limits add up to less,
# and a step that fails costs a line.
#
#     bash benchmarks/gpu.sh              all steps
#     bash benchmarks/gpu.sh ttft load    these only
#
# Results: JSON, what was printed (.txt) and what went wrong (.log) under $OUT. MODEL, DEVICE, DTYPE and PYTHON may be
# set. Random weights in the shape of a 3B model: time and memory depend on shapes alone, answers mean nothing.
set -u
cd "$(dirname "$0")/.."
OUT=${OUT:-benchmarks/results/gpu}
MODEL=${MODEL:-shape:qwen2.5-3b}
DEVICE=${DEVICE:-cuda}
DTYPE=${DTYPE:-bfloat16}
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
wanted=" $* "
failed=0
mkdir -p "$OUT"

# step NAME SECONDS SCRIPT [OPTION...]
step() {
    local name=$1 limit=$2 script=$3 started=$SECONDS status
    shift 3
    [[ $wanted == "  " || $wanted == *" $name "* ]] || return 0
    timeout -k 5 "$limit" "$PYTHON" "benchmarks/$script" --model "$MODEL" --device "$DEVICE" --dtype "$DTYPE" \
        --json "$OUT/$name.json" "$@" >"$OUT/$name.txt" 2>"$OUT/$name.log"
    status=$?
    if [ "$status" -eq 0 ]; then
        echo "== $name: $((SECONDS - started)) s"
        head -n 30 "$OUT/$name.txt"
    else
        failed=$((failed + 1))
        echo "== $name: failed after $((SECONDS - started)) s, exit status $status (124: over its limit of $limit s):" \
            "$(tail -n 1 "$OUT/$name.log")"
    fi
}

step ttft 140 ttft.py --sweeps contexts headline repair --contexts 512 2048 8192 32768 --max-seconds 100
step profile 30 profile_request.py --repair query --context 8192
step ingest 75 ingest.py --documents 24 --rounds 5
step load 70 load.py --requests 16 --new 4
step memory 50 memory.py --contexts 2048 4096 8192 32768
step bugs 70 bug_localization.py --limit 40 --memory 0
step profile_none 30 profile_request.py --repair none --context 8192
echo "$failed steps failed, $SECONDS s in all; results in $OUT"
[ "$failed" -eq 0 ]
