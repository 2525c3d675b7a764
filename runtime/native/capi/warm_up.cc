// llmc_engine_warm_*, _walk_graph, _enable_graph, _release_graph, _add_graphs: the C boundary of the warm-up.
#include "artifact/artifact.h"
#include "capi/c_engine.h"
#include "core/c_struct.h"
#include "core/error.h"

extern "C" {

llmc_status llmc_engine_warm_graph(llmc_engine* engine, uint32_t graph, uint64_t* ns, llmc_error* error) {
  return llmc::Guard(error, [&]() -> llmc::Status {
    LLMC_RETURN_IF_ERROR(llmc::CheckEngine(engine));
    return engine->engine->WarmGraph(graph, {}, ns);
  });
}

llmc_status llmc_engine_warm_load(llmc_engine* engine, uint32_t graph, const llmc_warm_load* load, uint64_t* ns,
                                  llmc_error* error) {
  return llmc::Guard(error, [&]() -> llmc::Status {
    LLMC_RETURN_IF_ERROR(llmc::CheckEngine(engine));
    llmc_warm_load l{};
    LLMC_RETURN_IF_ERROR(llmc::ReadStruct(load, "load", &l));
    return engine->engine->WarmGraph(graph, {l.num_seqs, l.tokens_each, l.context}, ns);
  });
}

llmc_status llmc_engine_walk_graph(llmc_engine* engine, uint32_t graph, uint64_t* ns, llmc_error* error) {
  return llmc::Guard(error, [&]() -> llmc::Status {
    LLMC_RETURN_IF_ERROR(llmc::CheckEngine(engine));
    return engine->engine->WalkGraph(graph, ns);
  });
}

llmc_status llmc_engine_warm_draft(llmc_engine* engine, uint64_t* ns, llmc_error* error) {
  return llmc::Guard(error, [&]() -> llmc::Status {
    LLMC_RETURN_IF_ERROR(llmc::CheckEngine(engine));
    return engine->engine->WarmDraft(ns);
  });
}

llmc_status llmc_engine_enable_graph(llmc_engine* engine, uint32_t graph, uint32_t on, llmc_error* error) {
  return llmc::Guard(error, [&]() -> llmc::Status {
    LLMC_RETURN_IF_ERROR(llmc::CheckEngine(engine));
    return engine->engine->EnableGraph(graph, on != 0);
  });
}

llmc_status llmc_engine_release_graph(llmc_engine* engine, uint32_t graph, llmc_error* error) {
  return llmc::Guard(error, [&]() -> llmc::Status {
    LLMC_RETURN_IF_ERROR(llmc::CheckEngine(engine));
    return engine->engine->ReleaseGraph(graph);
  });
}

llmc_status llmc_engine_add_graphs(llmc_engine* engine, const llmc_artifact* artifact, llmc_error* error) {
  return llmc::Guard(error, [&]() -> llmc::Status {
    LLMC_RETURN_IF_ERROR(llmc::CheckEngine(engine));
    if (artifact == nullptr) return llmc::NullArgument("artifact");
    return engine->engine->AddGraphs(artifact->artifact);
  });
}

}  // extern "C"
