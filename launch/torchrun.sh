#!/bin/bash
# A job under torchrun, with the same line on every host. $1: name of the first host, $2: number of hosts.
#
#   launch/torchrun.sh node1 2 2 ckdist serve -m /models/model.gguf      # two ranks on each of two hosts
#
# torchrun supervises and restarts (--max-restarts). ckdist itself does not use PyTorch. Every host must have the same
# secret file: create it with (umask 077; head -c 32 /dev/urandom | base64 > ~/.ckdist-job-secret), copy it with scp -p.
set -euo pipefail
first=${1:?usage: torchrun.sh FIRST_HOST HOSTS RANKS_PER_HOST COMMAND...} hosts=$2 ranks=$3
export CKDIST_JOB_SECRET_FILE=${CKDIST_JOB_SECRET_FILE:-$HOME/.ckdist-job-secret}
exec torchrun --nnodes="$hosts" --nproc-per-node="$ranks" --rdzv-backend=c10d --rdzv-endpoint="$first:29400" \
  --rdzv-id=ckdist --no-python "${@:4}"
