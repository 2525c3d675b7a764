// llmc_engine_load_adapter, llmc_engine_unload_adapter: the C boundary of adapters.
#include <algorithm>
#include <cstring>
#include <vector>

#include "capi/c_engine.h"
#include "core/c_struct.h"
#include "core/error.h"

extern "C" {

llmc_status llmc_engine_load_adapter(llmc_engine* engine, const llmc_adapter_matrix* matrices, uint64_t count,
                                     uint64_t* id, llmc_error* error) {
  return llmc::Guard(error, [&]() -> llmc::Status {
    LLMC_RETURN_IF_ERROR(llmc::CheckEngine(engine));
    if (id == nullptr) return llmc::NullArgument("id");
    std::vector<llmc::AdapterMatrix> all;
    if (count > 0) LLMC_RETURN_IF_ERROR(llmc::CheckStruct(matrices, "matrices[0]"));
    for (uint64_t i = 0; i < count; ++i) {
      // The first struct gives the size of all.
      const std::size_t size = matrices->struct_size;
      llmc_adapter_matrix m{};
      std::memcpy(&m, reinterpret_cast<const char*>(matrices) + i * size, std::min(size, sizeof(m)));
      all.push_back({m.linear, m.part, m.rank, m.scale, m.a, m.b});
    }
    return engine->engine->LoadAdapter(all, id);
  });
}

llmc_status llmc_engine_unload_adapter(llmc_engine* engine, uint64_t id, llmc_error* error) {
  return llmc::Guard(error, [&]() -> llmc::Status {
    LLMC_RETURN_IF_ERROR(llmc::CheckEngine(engine));
    return engine->engine->UnloadAdapter(id);
  });
}

}  // extern "C"
