#!/bin/sh
# Checks and measures bundles for CUDA on a machine with a GPU. Needs this repository, a C++ compiler, the driver, and
# Python with torch and numpy: no other package, nvcc, network or weights. The first failure ends it, but for one of
# wgmma (below). Run again, it goes on from there: out/gpu/report.json has what was found. Where transformers is
# installed, it is what times are compared with.
#
#   bench/gpu/run.sh bf16.bundle w4a16.bundle w8a8.bundle [--shape llama-3-8b] [--work out/gpu] [--seconds 1]
#
# Bundles are made elsewhere, where nvcc is installed. A step of one sequence, of 64, and a prompt of 2,048 tokens:
#
#   python -m bench.make_model llama-3-8b out/model
#   llmc compile out/model -o out/bf16 --target cuda:sm_80,sm_90,sm_100 --dtype bf16 --max-model-len 2048 \
#     --buckets 'prefill=[1]x[2048],decode=[1,64]x[2048]'
#   llmc bundle create out/bf16 -o bf16.bundle
#
# and the same with --quant w4a16, and with --quant w8a8. A bundle of a target such as cuda:sm_90a+dependent is measured
# both ways: kernels begin early, or in turn. On Hopper, wgmma is an option, too, which only a GPU can judge
# (docs/gpu.md): make bundles with --target cuda:sm_90a+wgmma-many and with cuda:sm_90a+wgmma, and list them behind the
# others. One of these whose checks fail is left out, and the report says so; the others are measured side by side.
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
