#!/usr/bin/env bash
# The demo and a selection of every front end's tests on several versions of torch, each in an environment of its own.
#
#   PYTHON=python3 bash tests/matrix.sh 2.8.0 2.15.0
#
# `===` takes the registry's own build of a version, which has CUDA. The extensions are those that `make setup` has built
# in place, for the same Python: they don't depend on torch's version. Environments that pass are removed unless
# MATRIX_KEEP=1. The exit status is 1 where any version failed; the last lines say which.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
SECONDS_EACH=${MATRIX_SECONDS:-900}
tests=(
  tests/base/test_torch_compat.py tests/comm/test_engine.py tests/optim
  tests/gradients/test_compiled.py tests/gradients/test_gradient_buckets.py tests/ddp/test_fast_path.py tests/ddp/test_zero_copy.py
  tests/auto/test_auto.py tests/elastic/test_torchrun.py
  tests/sharded
  tests/backend/test_collectives.py tests/backend/test_ddp_and_futures.py tests/backend/test_options.py
  tests/horovod/test_optimizer*.py tests/horovod/test_functions.py
)
result=()

one() {
  local version=$1 folder=.venv-matrix/$1 python
  python=$folder/bin/python
  [ -x "$python" ] || "$PYTHON" -m venv "$folder" || return 1
  "$python" -m pip --disable-pip-version-check --no-input install -q --no-cache-dir "torch===$version" numpy \
    "setuptools>=77" "cython>=3.1" hypothesis matplotlib pytest pytest-timeout scikit-learn tqdm || return 1
  "$python" -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda)' || return 1
  export PYTHONPATH=$PWD OMP_NUM_THREADS=1
  timeout --foreground --kill-after=30 300 "$python" -m torch.distributed.run --nproc-per-node 2 examples/train_digits.py || return 1
  timeout --foreground --signal=INT --kill-after=30 "$SECONDS_EACH" "$python" -m pytest -q -rfE -p no:cacheprovider \
    -m "not thorough and not gpu and not slow" "${tests[@]}"
}

failed=0
for version in "$@"; do
  echo "== torch $version"
  if (one "$version"); then
    result+=("torch $version: passed")
    [ "${MATRIX_KEEP:-0}" = 1 ] || rm -rf ".venv-matrix/$version"
  else
    result+=("torch $version: FAILED")
    failed=1
  fi
done
printf '%s\n' "${result[@]}"
exit $failed
