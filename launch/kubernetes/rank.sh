#!/bin/sh
# One rank of a LeaderWorkerSet's group. Its index, size and leader become the variables of torchrun.
set -eu
export RANK="$LWS_WORKER_INDEX" WORLD_SIZE="$LWS_GROUP_SIZE" MASTER_ADDR="$LWS_LEADER_ADDRESS" MASTER_PORT=29500
# Files of a secret's volume cannot have mode 600, so the job's secret and the API keys are copied.
export CKDIST_JOB_SECRET_FILE=/tmp/job-secret
(umask 077 && cp /var/run/ckdist/secret "$CKDIST_JOB_SECRET_FILE" && cp /var/run/ckdist/api-keys /tmp/api-keys)
exec ckdist "$@"
