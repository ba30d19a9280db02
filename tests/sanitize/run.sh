#!/usr/bin/env bash
# The host engine under the sanitizers:   run.sh [thread] [address] [conformance]      (all when none is named)
#   thread       threads.cpp, whose ranks are threads, under the thread sanitizer
#   address      threads.cpp under the address (with leaks) and undefined-behaviour sanitizers
#   conformance  the conformance suite on a build of the engine with the latter two
# Environment: CXX (address: g++), PYTHON, SANITIZE_LIMIT (seconds for each program that is run; 600).
# Builds into build/{tsan,asan}; objects that are newer than their sources are kept. Exits non-zero at the first finding.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
CXX=${CXX:-g++}
PYTHON=${PYTHON:-python3}
LIMIT=${SANITIZE_LIMIT:-600}
FLAGS="-std=c++17 -g1 -O1 -fno-omit-frame-pointer -ffp-contract=off -pthread -Ikernels/include -Ihost"

# build DIR FLAGS...: the engine's objects, the library and the driver, instrumented throughout
build() {
  local dir=$1; shift
  mkdir -p "$dir"
  echo "$CXX $FLAGS $*" | cmp -s - "$dir/flags" || echo "$CXX $FLAGS $*" >"$dir/flags"  # newer than the objects if changed
  {
    echo "all: $dir/threads $dir/libcollectives_host.so"
    local objects=()
    local source object isa
    for source in host/*.cpp kernels/host/*.cpp tests/sanitize/threads.cpp; do
      object=$dir/$(echo "${source%.cpp}" | tr / _).o
      isa=; [[ $source == kernels/* ]] && isa=-DCOLL_ISA=baseline
      echo "$object: $source $dir/flags $(echo host/*.h kernels/include/coll/*.h tests/sanitize/*.h); $CXX $FLAGS $* -fPIC -fvisibility=hidden $isa -c $source -o $object"
      [[ $source == tests/* ]] || objects+=("$object")
    done
    echo "$dir/threads: $dir/tests_sanitize_threads.o ${objects[*]}; $CXX $FLAGS $* \$^ -o \$@"
    echo "$dir/libcollectives_host.so: ${objects[*]} host/exports.map; $CXX $FLAGS $* -shared -Wl,-Bsymbolic" \
         "-Wl,-soname,libcollectives_host.so -Wl,--version-script=host/exports.map ${objects[*]} -o \$@"
  } >"$dir/rules.mk"
  make --no-print-directory -s -j"$(nproc)" -f "$dir/rules.mk" all
}

thread() {
  build build/tsan -fsanitize=thread -Wno-tsan  # the fences order sleeping and waking, not data
  # Without random addresses: on kernels with vm.mmap_rnd_bits above 30 the sanitizer can't place its shadow memory.
  local fixed=(); setarch "$(uname -m)" -R true 2>/dev/null && fixed=(setarch "$(uname -m)" -R)
  TSAN_OPTIONS="halt_on_error=1 second_deadlock_stack=1 ${TSAN_OPTIONS:-}" timeout "$LIMIT" "${fixed[@]}" build/tsan/threads
}

build_address() {
  # Not enum: callers are C, where an enum may hold any int, and refusing the wrong ones is what the engine does.
  build build/asan -fsanitize=address,undefined -fno-sanitize=enum -fno-sanitize-recover=all
  export UBSAN_OPTIONS="print_stacktrace=1 ${UBSAN_OPTIONS:-}"
}

address() {
  build_address
  ASAN_OPTIONS="detect_leaks=1 ${ASAN_OPTIONS:-}" timeout "$LIMIT" build/asan/threads
}

conformance() {
  build_address
  # Without what is above the engine (arrays, ring and direct), without 4 and 7 ranks, which show
  # it nothing more than 3 (nor, with the long calls of the default chunk, do 1 and 2), and without
  # what is thorough or needs more instruction sets than one. Python itself leaks on purpose.
  local library tests=(tests/conformance -m "not slow and not gpu and not thorough")
  tests+=(-k "not 7 and not 4 and not instruction_set")
  for above in algorithms algorithm_faults; do
    tests+=(--ignore "tests/conformance/test_$above.py")
  done
  # Gloo's exceptions come out of a library that is loaded behind the sanitizer, which can't pass them on.
  tests+=(--ignore=tests/conformance/test_several_machines.py)
  for less in 1 2; do tests+=(--deselect "tests/conformance/test_collectives.py::test_default_chunk[host-$less]"); done
  library=$("$CXX" -print-file-name=libasan.so)
  ASAN_OPTIONS="detect_leaks=0 handle_segv=1 abort_on_error=0 exitcode=99 ${ASAN_OPTIONS:-}" \
    COLLECTIVES_HOST_LIBRARY=$PWD/build/asan/libcollectives_host.so LD_PRELOAD=$library \
    timeout "$LIMIT" "$PYTHON" -m pytest -q -p no:cacheprovider "${tests[@]}"
}

for what in "${@:-thread address conformance}"; do
  for each in $what; do
    case $each in
      thread | address | conformance) echo "== $each"; $each ;;
      *) echo "run.sh: $each is none of thread, address, conformance" >&2; exit 2 ;;
    esac
  done
done
