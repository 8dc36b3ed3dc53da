#!/usr/bin/env bash
# Train with an engine server beside the trainer, on one machine:
#
#     examples/slurm/local.sh --config-name grpo_gsm8k
#     MAXENT=1 VLLM_MODEL=Qwen/Qwen2.5-1.5B-Instruct examples/slurm/local.sh --config-name grpo_gsm8k
#
# Starts the server on the first GPU(s), waits for it, trains on all others, and exits with the
# trainer's exit code when it is done. Arguments are overrides of grpo.py. Logs: $LOG_DIR/server.log
# and $LOG_DIR/trainer.log. Without a GPU both run on the CPU.
#
#     VLLM_MODEL        Qwen/Qwen2.5-1.5B-Instruct: folder or hub id, for server and trainer
#     VLLM_PORT         8000
#     VLLM_TP_SIZE      1: GPUs of the engine
#     VLLM_MAX_LEN      2048: prompt plus response, in tokens
#     VLLM_MEM_UTIL     0.90: share of the engine's GPUs for weights and KV cache
#     VLLM_TIMEOUT      900: seconds until the server must answer
#     MAXENT            0; 1 is preset=maxent_listwise, which other arguments win over
#     TRAIN_ENTRYPOINT  sota-implementations/grpo/grpo.py of this repository, or another script that
#                       reads its keys
#     LOG_DIR           logs
#     PYTHON            python
set -euo pipefail

model=${VLLM_MODEL:-Qwen/Qwen2.5-1.5B-Instruct} port=${VLLM_PORT:-8000} size=${VLLM_TP_SIZE:-1}
logs=${LOG_DIR:-logs} python=${PYTHON:-python}
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
entrypoint=${TRAIN_ENTRYPOINT:-$repo/sota-implementations/grpo/grpo.py}
if [[ ! -f $entrypoint ]]; then
    echo "error: TRAIN_ENTRYPOINT=$entrypoint is no file" >&2
    exit 2
fi
case ${MAXENT:-0} in
    0) objective=() ;;
    1) objective=(preset=maxent_listwise) ;;
    *) echo "error: MAXENT=$MAXENT must be 0 or 1" >&2; exit 2 ;;
esac
for name in VLLM_PORT VLLM_TP_SIZE VLLM_MAX_LEN VLLM_TIMEOUT; do
    if [[ ! ${!name:-1} =~ ^[1-9][0-9]*$ ]]; then
        echo "error: $name=${!name} must be a whole number above 0" >&2
        exit 2
    fi
done
# What listens there would be taken for the server, as soon as it answers.
if (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
    echo "error: VLLM_PORT=$port is in use by something else; give another" >&2
    exit 2
fi
mkdir -p "$logs"

# Which GPUs there are; Slurm sets CUDA_VISIBLE_DEVICES to the job's own.
gpus=()
if [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
    IFS=, read -ra gpus <<<"$CUDA_VISIBLE_DEVICES"
elif command -v nvidia-smi >/dev/null; then
    mapfile -t gpus < <(nvidia-smi --query-gpu=index --format=csv,noheader)
fi
options=(--max-model-len "${VLLM_MAX_LEN:-2048}") training=() engine_gpus="" trainer_gpus=""
dtype=float32  # the trainer's, which vLLM would not choose for every model
if ((${#gpus[@]})); then
    if ((${#gpus[@]} <= size)); then
        echo "error: ${#gpus[@]} GPUs for VLLM_TP_SIZE=$size and the trainer; ask for $((size + 1))," \
            "or run grpo.py, which needs one" >&2
        exit 2
    fi
    engine_gpus=$(IFS=,; echo "${gpus[*]:0:size}")
    trainer_gpus=$(IFS=,; echo "${gpus[*]:size}")
    dtype=bfloat16
    options+=(--gpu-memory-utilization "${VLLM_MEM_UTIL:-0.90}")
    training+=("train_model.num_devices=$((${#gpus[@]} - size))")
fi

sync=transfer adapters=()
for word in "$@"; do  # what the server has to know of the run
    value=${word#*=}
    case ${word%%=*}=${value,,} in
        train_model.torch_dtype=*) dtype=$value ;;
        train_model.lora.enabled=true) sync=lora ;;
        train_model.lora.r=*) adapters+=(--max-lora-rank "$value") ;;
        train_model.fp32_head=true) options+=(--fp32-head) ;;
        hydra.run.dir=/*)  # the adapters are in it; a ${...} of Hydra's is not known here
            folder=${value%%\$*}
            adapters+=(--adapter-root "${folder%/*}/") ;;
    esac
done
[[ $sync == lora ]] && options+=(--enable-lora "${adapters[@]}")

export PYTHONPATH="$repo${PYTHONPATH:+:$PYTHONPATH}"
train=("$python" "$entrypoint" "model.name=$model" "${objective[@]}"
    inference_model.engine=server "inference_model.url=http://127.0.0.1:$port"
    "inference_model.weight_sync=$sync" "${training[@]}" "$@")
# A misspelt key is found now, and not after the engine's start.
"${train[@]}" --cfg job >/dev/null

# A token of this job's own: the port is open to every user of the machine.
GRPO_SERVER_TOKEN=${GRPO_SERVER_TOKEN:-$("$python" -c 'import secrets; print(secrets.token_urlsafe())')}
export GRPO_SERVER_TOKEN

CUDA_VISIBLE_DEVICES=$engine_gpus "$python" -m grpo.server.serve --model "$model" \
    --port "$port" --tensor-parallel-size "$size" --dtype "$dtype" "${options[@]}" >"$logs/server.log" 2>&1 &
server=$!
stop() {
    kill "$server" 2>/dev/null || true
    wait "$server" 2>/dev/null || true
}
trap stop EXIT
trap 'exit 143' TERM INT

deadline=$((SECONDS + ${VLLM_TIMEOUT:-900}))
until "$python" - "$port" <<'PY'
import sys, urllib.request
try:
    urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}/health", timeout=5)
except OSError:
    sys.exit(1)
PY
do
    if ! kill -0 "$server" 2>/dev/null; then
        echo "error: the server ended; the end of $logs/server.log:" >&2
        tail -n 30 "$logs/server.log" >&2
        exit 1
    fi
    if ((SECONDS > deadline)); then
        echo "error: the server did not answer within ${VLLM_TIMEOUT:-900} s; see $logs/server.log" >&2
        exit 1
    fi
    sleep 1
done
echo "server at port $port (GPU ${engine_gpus:-none}), training (GPU ${trainer_gpus:-none})"

# In the background, so that a signal to this script reaches the trainer, which saves a checkpoint;
# the server, which it may need for that, ends after it.
CUDA_VISIBLE_DEVICES=$trainer_gpus "${train[@]}" > >(tee "$logs/trainer.log") 2>&1 &
trainer=$!
trap 'kill "$trainer" 2>/dev/null || true' TERM INT
while :; do
    code=0
    wait "$trainer" || code=$?  # a signal cuts it short
    kill -0 "$trainer" 2>/dev/null || break
done
wait "$trainer" || code=$?
exit "$code"
