#!/usr/bin/env bash
# What the kernels owe on a GPU: their tests marked gpu, then their times against a device-to-device copy and torch.
#
#   PYTHON=python3 bash benchmarks/kernels/gpu.sh        # with torch (CUDA), cupy, NVRTC, Cython, g++, pytest installed
#
# Builds in place. Each failure is told at the end; rows go to benchmarks/results/kernels_*.jsonl.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
failed=()

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv || failed+=("nvidia-smi")
"$PYTHON" setup.py -q build_ext --inplace || exit 1
"$PYTHON" -m tests.kernels.registers || failed+=("registers")
COLLECTIVES_REQUIRE_GPU=1 "$PYTHON" -m pytest -q -m "gpu and not multigpu" tests/kernels || failed+=("tests")
for each in benchmarks/kernels/{pack,reduce,quantize,adamw}.py; do
  echo "== $each"
  "$PYTHON" "$each" --device cuda || failed+=("$each")
done
if ((${#failed[@]})); then
  printf 'failed: %s\n' "${failed[@]}"
  exit 1
fi
