#!/bin/sh
# One rank of a LeaderWorkerSet's group: its index, size and leader are what torchrun would tell.
set -eu
export RANK="$LWS_WORKER_INDEX" WORLD_SIZE="$LWS_GROUP_SIZE" MASTER_ADDR="$LWS_LEADER_ADDRESS" MASTER_PORT=29500
# A secret's volume cannot be its reader's alone; the rank takes the job's secret and the API keys from files that are.
export CKDIST_JOB_SECRET_FILE=/tmp/job-secret
(umask 077 && cp /var/run/ckdist/secret "$CKDIST_JOB_SECRET_FILE" && cp /var/run/ckdist/api-keys /tmp/api-keys)
exec ckdist "$@"
