#!/usr/bin/env bash
# One run over whole servers: a torchrun on each, a process for each of its GPUs. From the folder of the checkout, with
# fourfold's environment active (source .venv/bin/activate) and whatever your site asks for in front of it:
#   sbatch --nodes=32 --partition=... tools/launch/slurm.sh task=smollm2 tier=hsdp
# output_dir and cache_dir must lie on a file system that all servers see. Options of sbatch win over the lines below.
#SBATCH --job-name=fourfold
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=%x-%j.out
# Two minutes before the time limit ask the run to stop: it saves, and goes on with resume=auto.
#SBATCH --signal=TERM@120
set -euo pipefail

: "${SLURM_JOB_ID:?start it with sbatch}"
MAIN_HOST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MAIN_PORT=$((20000 + SLURM_JOB_ID % 20000)) # two jobs on one server do not meet
export MAIN_HOST MAIN_PORT

# The part in single quotes is run on each server, where SLURM_NODEID is its rank.
# shellcheck disable=SC2016
exec srun --kill-on-bad-exit=1 bash -c '
    exec torchrun \
        --nnodes "$SLURM_NNODES" --node_rank "$SLURM_NODEID" --nproc_per_node "${SLURM_GPUS_ON_NODE:-gpu}" \
        --master_addr "$MAIN_HOST" --master_port "$MAIN_PORT" \
        -m fourfold "$@"' fourfold "$@"
