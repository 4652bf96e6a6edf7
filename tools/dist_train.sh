#!/usr/bin/env bash
# Usage: tools/dist_train.sh CONFIG PROCESSES [options of tools/train.py]
# Several machines: set NNODES, NODE_RANK, MASTER_ADDR and PORT on each.
set -euo pipefail
if [ $# -lt 2 ]; then
    sed -n 2,3p "$0" >&2
    exit 2
fi
CONFIG=$1
GPUS=$2
shift 2

PYTHONPATH="$(dirname "$0")/..:${PYTHONPATH:-}" \
exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes="${NNODES:-1}" \
    --node_rank="${NODE_RANK:-0}" \
    --master_addr="${MASTER_ADDR:-127.0.0.1}" \
    --master_port="${PORT:-29500}" \
    --nproc_per_node="$GPUS" \
    "$(dirname "$0")/train.py" "$CONFIG" --launcher pytorch "$@"
