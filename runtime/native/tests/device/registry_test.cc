// Kinds of devices: what is registered is found, options are checked, and a device of another kind is one file.
#include "device/registry.h"

#include <cstring>
#include <string>

#include "engine/engine.h"
#include "support/check.h"
#include "support/hand_made_artifact.h"
#include "support/null_device.h"

using namespace llmc_test;
using llmc::Status;

namespace {

// A toy: it loads any artifact and computes hashes.
class OpenToy final : public llmc::OpenDevice {
 public:
  Status Load(std::shared_ptr<const llmc::Artifact> artifact, const llmc::LoadOptions& options,
              std::unique_ptr<llmc::Device>* out) const override {
    *out = std::make_unique<NullDevice>(artifact->shape(), options.num_blocks);
    return Status::Ok();
  }
  std::vector<std::pair<std::string, std::string>> Facts() const override { return {{"speed", speed}}; }
  std::string speed;
};

const llmc::DeviceKind kToy = {"toy", "Hashes instead of numbers.",
                               [](const llmc::DeviceOptions& given, std::unique_ptr<llmc::OpenDevice>* out) {
                                 auto toy = std::make_unique<OpenToy>();
                                 uint32_t speed = 7;
                                 llmc::OptionReader reader("toy", given);
                                 reader.Number("speed", 9, &speed);
                                 LLMC_RETURN_IF_ERROR(reader.Finish());
                                 toy->speed = std::to_string(speed);
                                 *out = std::move(toy);
                                 return Status::Ok();
                               }};

llmc_status Open(const char* kind, std::vector<llmc_key_value> options, std::string* said) {
  llmc_error error;
  llmc_error_init(&error, sizeof(error));
  error.message[0] = 0;
  llmc_device* device = nullptr;
  const llmc_status status = llmc_device_open(kind, options.data(), options.size(), &device, &error);
  CHECK_EQ(status == LLMC_OK, device != nullptr);
  *said = error.message;
  llmc_device_close(device);
  return status;
}

void TestOptions() {
  std::string said;
  CHECK(Open("cpu", {}, &said) == LLMC_OK);
  CHECK(Open("cpu", {{"threads", "1"}, {"pin", "0"}, {"idle_spin_us", "0"}, {"weights", "mapped"}}, &said) == LLMC_OK);
  CHECK(Open("cpu", {{"weights", "lost"}, {"weights", "auto"}}, &said) == LLMC_OK);
  CHECK(Open("abacus", {}, &said) == LLMC_ERR_NOT_FOUND &&
        said.find("'abacus'; this library has cpu") != std::string::npos);
  CHECK(Open("cpu", {{"stream", "3"}}, &said) == LLMC_ERR_INVALID_ARGUMENT);
  CHECK(said.find("no option 'stream'; it knows threads, pin, idle_spin_us, weights") != std::string::npos);
  CHECK(Open("cpu", {{"weights", "lost"}}, &said) == LLMC_ERR_INVALID_ARGUMENT);
  CHECK(said.find("is 'lost'; use auto, mapped or copied") != std::string::npos);
  for (const char* bad : {"", "-1", "1025", "99999999999999999999", "2 ", "two"}) {
    CHECK(Open("cpu", {{"threads", bad}}, &said) == LLMC_ERR_INVALID_ARGUMENT);
    CHECK(said.find(std::string("'") + bad + "'; use a whole number from 0 to 1024") != std::string::npos);
  }
  CHECK(Open("cpu", {{"pin", "yes"}}, &said) == LLMC_ERR_INVALID_ARGUMENT &&
        said.find("use 0 or 1") != std::string::npos);
  CHECK(Open("cpu", {{nullptr, "1"}}, &said) == LLMC_ERR_INVALID_ARGUMENT);
  CHECK(Open("cpu", {{"pin", nullptr}}, &said) == LLMC_ERR_INVALID_ARGUMENT);
  CHECK(llmc_device_open("cpu", nullptr, 1, nullptr, nullptr) == LLMC_ERR_INVALID_ARGUMENT);
  CHECK(llmc_device_open(nullptr, nullptr, 0, nullptr, nullptr) == LLMC_ERR_INVALID_ARGUMENT);
}

void TestFacts() {
  llmc_device* device = OpenCpu("threads", "3");
  llmc_key_value facts[16];
  uint64_t count = 0;
  CHECK(llmc_device_get_facts(device, nullptr, 0, &count, nullptr) == LLMC_OK && count > 0 && count <= 16);
  CHECK(llmc_device_get_facts(device, facts, 16, &count, nullptr) == LLMC_OK);
  bool threads = false;
  for (uint64_t i = 0; i < count; ++i)
    threads |= !std::strcmp(facts[i].key, "threads") && !std::strcmp(facts[i].value, "3");
  CHECK(threads);
  llmc_device_close(device);
}

// One file and one registration: then the C ABI opens it, and an engine runs on it.
void TestAnotherKind() {
  llmc::RegisterDeviceKind(&kToy);
  llmc::RegisterDeviceKind(&kToy);
  llmc_device_kind kinds[4];
  kinds[0].struct_size = sizeof(kinds[0]);
  uint64_t count = 0;
  CHECK(llmc_device_list_kinds(kinds, 4, &count, nullptr) == LLMC_OK);
  CHECK_EQ(count, 4u);
  CHECK(kinds[0].name == std::string("cpu") && kinds[1].name == std::string("opencl"));
  CHECK(kinds[2].name == std::string("cuda") && kinds[3].name == std::string("toy"));
  std::string said;
  CHECK(Open("toy", {{"speed", "10"}}, &said) == LLMC_ERR_INVALID_ARGUMENT);

  MakeArtifact();
  llmc_artifact* artifact = nullptr;
  CHECK(llmc_artifact_open(g_dir.c_str(), &artifact, nullptr) == LLMC_OK);
  llmc_device* device = nullptr;
  CHECK(llmc_device_open("toy", nullptr, 0, &device, nullptr) == LLMC_OK);
  llmc_engine* engine = nullptr;
  CHECK(llmc_engine_create(device, artifact, nullptr, &engine, nullptr) == LLMC_OK);
  llmc_replayer* replayer = nullptr;
  CHECK(llmc_replayer_create(device, artifact, nullptr, &replayer, nullptr) == LLMC_OK);
  llmc_device_close(device);
  llmc_artifact_close(artifact);
  llmc_replay_stats stats;
  stats.struct_size = sizeof(stats);
  CHECK(llmc_replayer_get_stats(replayer, &stats, nullptr) == LLMC_ERR_INVALID_ARGUMENT);  // it does not measure
  llmc_replayer_destroy(replayer);
  const int32_t prompt[] = {3, 4};
  llmc_request request;
  llmc_request_init(&request, sizeof(request));
  request.prompt_token_ids = prompt;
  request.num_prompt_tokens = 2;
  llmc_sampling_params sampling;
  llmc_sampling_params_init(&sampling, sizeof(sampling));
  sampling.ignore_eos = sampling.max_tokens = 1;
  request.sampling = &sampling;
  uint64_t id = 0;
  CHECK(llmc_engine_submit(engine, &request, &id, nullptr) == LLMC_OK);
  uint32_t progressed = 1;
  while (progressed) CHECK(llmc_engine_step(engine, &progressed, nullptr) == LLMC_OK);
  llmc_event event;
  event.struct_size = sizeof(event);
  CHECK(llmc_engine_poll(engine, &event, 1, &count, nullptr) == LLMC_OK);
  CHECK(count == 1 && event.kind == LLMC_EVENT_TOKEN && event.request_id == id);
  llmc_device_stat counted;
  counted.struct_size = sizeof(counted);
  CHECK(llmc_engine_get_device_stats(engine, &counted, 1, &count, nullptr) == LLMC_OK && count == 0);
  llmc_engine_destroy(engine);
  RemoveArtifact();
}

}  // namespace

int main() {
  TestOptions();
  TestFacts();
  TestAnotherKind();
  return Finish("registry_test");
}
