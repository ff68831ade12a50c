#!/bin/sh
# Record one part of the figures of docs/lab/results on a Hopper GPU; each takes about 45 seconds once its kernels are
# compiled.
#
#     examples/benchmarks/record.sh PART [FOLDER [COMMIT]]
#
# PART is one of the names below. COMMIT where this is no checkout with git. The part window comes first, while the card
# is cool: its short calls follow the clock most. The part mytorch needs a checkout of github.com/priyammaz/MyTorch,
# whose path is in MYTORCH. The part random_shapes draws CELLS problems from SEED. The parts paper_io and counters need
# ncu, and counters the records of the dense and the float32 parts. The parts mma... take the kernels of other GPUs, the
# parts ring and ring_processes four GPUs, allreduce and allreduce_processes two. The part offload takes 9 GB of pinned
# memory and up to 100 seconds.
set -eu
part=$1 folder=${2:-docs/lab/results} commit=${3:-}

bench() {
    python3 -m cuflash bench ${commit:+--commit "$commit"} --json "$folder/$part.jsonl" "$@"
}

case $part in
forward) bench --direction forward --peers cuflash fa3 cudnn --budget-ms 12 ;;
backward_full) bench --direction backward --mask full --peers cuflash fa3 cudnn --budget-ms 12 ;;
backward_causal) bench --direction backward --mask causal --peers cuflash fa3 cudnn --budget-ms 12 ;;
fp16)
    part=fp16_forward bench --dtype float16 --direction forward --peers cuflash fa3 cudnn --budget-ms 8
    part=fp16_backward bench --dtype float16 --direction backward --peers cuflash fa3 --budget-ms 8
    ;;
mma) CUFLASH_WITHOUT_WGMMA=1 bench --peers cuflash flash --budget-ms 8 ;;
mma_fp16) CUFLASH_WITHOUT_WGMMA=1 bench --dtype float16 --peers cuflash flash --budget-ms 8 ;;
mma_sparse) CUFLASH_WITHOUT_WGMMA=1 bench --suite sparse --peers cuflash plain --budget-ms 8 ;;
mma_float32) CUFLASH_WITHOUT_WGMMA=1 bench --suite float32 --peers cuflash efficient --budget-ms 12 ;;
errors) python3 examples/benchmarks/errors.py ${commit:+--commit "$commit"} --json "$folder/errors.jsonl" ;;
truth) python3 examples/benchmarks/truth.py ${commit:+--commit "$commit"} --json "$folder/truth.jsonl" ;;
small_grids) python3 examples/benchmarks/small_grids.py ${commit:+--commit "$commit"} --json "$folder/small_grids.jsonl" ;;
random_shapes)
    bench --suite random --seed "${SEED:-1}" --cells "${CELLS:-300}" --rounds 3 --budget-ms 6 --peers cuflash fa3 cudnn \
        --picture "$folder/random_shapes.svg"
    ;;
few_queries) python3 examples/benchmarks/few_queries.py --splits ${commit:+--commit "$commit"} --json "$folder/few_queries.jsonl" ;;
dropout) python3 examples/benchmarks/dropout.py ${commit:+--commit "$commit"} --json "$folder/dropout.jsonl" ;;
counters) python3 examples/benchmarks/counters.py ${commit:+--commit "$commit"} --results "$folder" ;;
options) bench --suite options dbias --head-dim 128 256 --peers cuflash plain --budget-ms 12 ;;
deterministic) bench --suite deterministic --peers cuflash plain fa3 --budget-ms 12 ;;
window) bench --suite window --peers cuflash fa3 --budget-ms 12 ;;
sparse) bench --suite sparse --peers cuflash plain --budget-ms 8 ;;
shapes) bench --suite gqa varlen decode --peers cuflash plain fa3 cudnn --budget-ms 12 ;;
float32) bench --suite float32 --peers cuflash efficient --budget-ms 12 ;;
ring) python3 examples/benchmarks/ring.py ${commit:+--commit "$commit"} --json "$folder/ring.jsonl" ;;
ring_processes)
    export MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 WORLD_SIZE=4
    for rank in 0 1 2 3; do
        RANK=$rank LOCAL_RANK=$rank python3 examples/benchmarks/ring.py ${commit:+--commit "$commit"} \
            --json "$folder/ring_processes.jsonl" &
    done
    wait
    ;;
allreduce) python3 examples/benchmarks/allreduce.py ${commit:+--commit "$commit"} --json "$folder/allreduce.jsonl" ;;
allreduce_processes)
    export MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 WORLD_SIZE=2
    for rank in 0 1; do
        RANK=$rank LOCAL_RANK=$rank python3 examples/benchmarks/allreduce.py ${commit:+--commit "$commit"} \
            --json "$folder/allreduce_processes.jsonl" &
    done
    wait
    ;;
offload) python3 examples/benchmarks/offload.py ${commit:+--commit "$commit"} --json "$folder/offload.jsonl" ;;
host) python3 examples/benchmarks/host.py ${commit:+--commit "$commit"} --json "$folder/host.jsonl" ;;
gpt2)
    for kind in "" _fp8; do
        for context in 1024 4096; do
            python3 -m cuflash.examples.train_gpt2 --compare 3 --context $context --batch $((32768 / context)) \
                ${kind:+--fp8} ${commit:+--commit "$commit"} --json "$folder/gpt2_$context$kind.jsonl"
        done
    done
    ;;
loss)
    run=$(mktemp -d -p "${SCRATCH:-/tmp}") # checkpoints of 1.5 GB
    library=$(python3 -c 'import os; print(os.path.dirname(os.__file__))')
    cat "$library"/*.py "$library"/*/*.py >"$run/text"
    for kind in "" _fp8; do
        python3 -m cuflash.examples.train_gpt2 --text "$run/text" --context 1024 --batch 16 --steps 200 --out "$run$kind" \
            ${kind:+--fp8} ${commit:+--commit "$commit"}
        cp "$run$kind/losses.jsonl" "$folder/gpt2_loss$kind.jsonl"
        rm "$run$kind/checkpoint.npz"
    done
    ;;
paper)
    rm -f "$folder/paper.jsonl" # whose rows new ones join
    python3 examples/benchmarks/paper.py ${commit:+--commit "$commit"} --out "$folder" --longest 1
    ;;
paper_io) python3 examples/benchmarks/paper.py --io ${commit:+--commit "$commit"} --out "$folder" ;;
mytorch)
    python3 examples/clients/mytorch_client.py "${MYTORCH:?the path of a checkout of MyTorch}" --batch 32 \
        ${commit:+--commit "$commit"} --json "$folder/mytorch.jsonl"
    ;;
*)
    echo "unknown part: $part" >&2
    exit 2
    ;;
esac
