#!/bin/sh
# Checks and measures a bundle for CUDA on a machine with a GPU. Needs this repository, a C++ compiler, Python with
# torch and numpy, and the driver; no nvcc, TVM, network or weights. The first failure ends it.
#
#   bench/gpu/run.sh qwen.bundle [--shape qwen2.5-0.5b] [--work out/gpu] [--seconds 1]
#
# A bundle is made elsewhere, where nvcc is installed:
#
#   python -m bench.make_model qwen2.5-0.5b out/model
#   llmc compile out/model -o out/artifact --target cuda:sm_80,sm_90,sm_100 --dtype bf16
#   llmc bundle create out/artifact -o qwen.bundle
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
build=out/gpu/build
native=runtime/native
if [ -z "${LLMC_LIBRARY:-}" ]; then
  mkdir -p "$build"
  flags="-std=c++17 -O2 -fPIC -fno-math-errno -ffp-contract=off -I$native/include -I$native -I$native/tests"
  sources=$(cd "$native" && find core artifact sampling device engine capi -name '*.cc' | sort)
  objects=
  for source in $sources; do
    object=$build/$(echo "$source" | tr / _).o
    [ "$object" -nt "$native/$source" ] || echo "$native/$source $object"
  done >"$build/todo"
  for source in $sources; do objects="$objects $build/$(echo "$source" | tr / _).o"; done
  # shellcheck disable=SC2016,SC2086  # words of the list, and of the flags
  xargs -r -P "$(nproc)" -n 2 sh -c 'exec ${CXX:-c++} '"$flags"' -c "$0" -o "$1"' <"$build/todo"
  # shellcheck disable=SC2086
  ${CXX:-c++} -shared -o "$build/libllmc.so" $objects -ldl -lpthread
  # shellcheck disable=SC2086
  ${CXX:-c++} $flags -o "$build/device_conformance" $native/tests/device/device_conformance.cc $objects -ldl -lpthread
  export LLMC_LIBRARY="$PWD/$build/libllmc.so"
  set -- "$@" --conformance "$build/device_conformance"
fi
exec "$python" -m bench.gpu.measure "$@"
