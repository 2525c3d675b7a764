// Streaming generation from C++: embed ARTIFACT MAX_TOKENS TOKEN_ID...  prints token ids as they come.
#include <llmc/llmc.h>

#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

// A status of the C ABI becomes an exception with the library's sentence.
struct Error {
  llmc_error error;
  Error() { llmc_error_init(&error, sizeof error); }
  void check(llmc_status status) const {
    if (status != LLMC_OK) throw std::runtime_error(error.message);
  }
};

// Closes what the C ABI opened.
template <auto Close>
struct Closer {
  template <class T>
  void operator()(T *handle) const {
    Close(handle);
  }
};
using Artifact = std::unique_ptr<llmc_artifact, Closer<llmc_artifact_close>>;
using Device = std::unique_ptr<llmc_device, Closer<llmc_device_close>>;
using Engine = std::unique_ptr<llmc_engine, Closer<llmc_engine_destroy>>;

void generate(const char *path, uint32_t max_tokens, const std::vector<int32_t> &prompt) {
  Error error;
  llmc_artifact *opened = nullptr;
  error.check(llmc_artifact_open(path, &opened, &error.error));
  const Artifact artifact(opened);
  llmc_device *chosen = nullptr;
  error.check(llmc_device_open("cpu", nullptr, 0, &chosen, &error.error));
  const Device device(chosen);
  llmc_engine *created = nullptr;
  error.check(llmc_engine_create(device.get(), artifact.get(), nullptr, &created, &error.error));
  const Engine engine(created);  // destroyed first: it uses the other two

  llmc_sampling_params sampling;
  llmc_sampling_params_init(&sampling, sizeof sampling);
  sampling.temperature = 0.0F;
  sampling.max_tokens = max_tokens;
  llmc_request request;
  llmc_request_init(&request, sizeof request);
  request.prompt_token_ids = prompt.data();
  request.num_prompt_tokens = prompt.size();
  request.sampling = &sampling;
  uint64_t id = 0;
  error.check(llmc_engine_submit(engine.get(), &request, &id, &error.error));

  for (bool finished = false; !finished;) {
    error.check(llmc_engine_step(engine.get(), nullptr, &error.error));
    llmc_event events[8] = {};
    events[0].struct_size = sizeof events[0];
    uint64_t count = 0;
    error.check(llmc_engine_poll(engine.get(), events, 8, &count, &error.error));
    for (uint64_t i = 0; i < count; ++i) {
      if (events[i].kind == LLMC_EVENT_FAILED) throw std::runtime_error(events[i].message);
      if (events[i].kind == LLMC_EVENT_TOKEN) std::printf("%d ", events[i].token_id);
      finished |= events[i].kind == LLMC_EVENT_FINISHED;
    }
    std::fflush(stdout);
  }
  if (std::printf("\n") < 0 || std::fflush(stdout) != 0 || std::ferror(stdout)) {
    throw std::runtime_error("cannot write the tokens to stdout");
  }
}

}  // namespace

int main(int argc, char **argv) {
  if (argc < 4) return std::fprintf(stderr, "usage: %s ARTIFACT MAX_TOKENS TOKEN_ID...\n", argv[0]), 2;
  try {
    std::vector<int32_t> prompt;
    for (int i = 3; i < argc; ++i) prompt.push_back(std::stoi(argv[i]));
    generate(argv[1], static_cast<uint32_t>(std::stoul(argv[2])), prompt);
  } catch (const std::exception &error) {
    return std::fprintf(stderr, "embed: %s\n", error.what()), 1;
  }
  return 0;
}
