#!/bin/bash
# A job under torchrun, the same line on every host; $1 is the first host's name, $2 how many hosts there are:
#
#   launch/torchrun.sh node1 2 2 ckdist serve -m /models/model.gguf      # two ranks on each of two hosts
#
# torchrun watches and restarts (--max-restarts); ckdist needs none of PyTorch. The secret must be the same file on
# every host: (umask 077; head -c 32 /dev/urandom | base64 > ~/.ckdist-job-secret), copied by scp -p.
set -euo pipefail
first=${1:?usage: torchrun.sh FIRST_HOST HOSTS RANKS_PER_HOST COMMAND...} hosts=$2 ranks=$3
export CKDIST_JOB_SECRET_FILE=${CKDIST_JOB_SECRET_FILE:-$HOME/.ckdist-job-secret}
exec torchrun --nnodes="$hosts" --nproc-per-node="$ranks" --rdzv-backend=c10d --rdzv-endpoint="$first:29400" \
  --rdzv-id=ckdist --no-python "${@:4}"
