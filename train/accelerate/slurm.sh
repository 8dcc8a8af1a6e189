#!/usr/bin/env bash
# Two machines of 8 GPUs each under SLURM, one launcher a machine. From the root of the repository:
#
#   sbatch train/accelerate/slurm.sh \
#     train/recipes/wmt14_en_de_big.yaml --corpus data/wmt14_en_de --output runs/big --workers 2
#
# What stands behind the script goes to train/train.py. All machines must see this folder, the corpus and the run's
# folder. Started again, by hand or by --requeue, it goes on from the newest checkpoint. Not run on a cluster yet.
#SBATCH --job-name=vanilla-transformer
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
port=$((10000 + SLURM_JOB_ID % 50000)) # not that of another job on the same machine

# In single quotes, as SLURM_NODEID is another on every machine.
srun --kill-on-bad-exit=1 bash -c '
  accelerate launch --config_file train/accelerate/machines_2_gpu_8.yaml \
    --num_machines "$SLURM_NNODES" --num_processes "$((SLURM_NNODES * SLURM_GPUS_ON_NODE))" \
    --machine_rank "$SLURM_NODEID" --main_process_ip "$1" --main_process_port "$2" \
    train/train.py "${@:3}"
' launch "$first" "$port" "$@"
