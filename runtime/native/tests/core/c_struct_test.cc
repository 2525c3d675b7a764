// Structs of older and newer callers: nothing is written behind what the caller has, and what it lacks has its default.
#include "core/c_struct.h"

#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

#include "core/error.h"
#include "support/check.h"

using namespace llmc;

namespace {

constexpr unsigned char kGuard = 0xA5;

// Calls init with every size up to well past the struct's and looks at each byte.
template <class T>
void TestInit(void (*init)(T*, uint32_t)) {
  T whole;
  init(&whole, sizeof(T));
  CHECK_EQ(whole.struct_size, sizeof(T));
  for (uint32_t size = 0; size <= sizeof(T) + 40; ++size) {
    std::vector<unsigned char> bytes(sizeof(T) + 64, kGuard);
    init(reinterpret_cast<T*>(bytes.data()), size);
    const uint32_t written = size < 8 ? 0 : size;
    std::vector<unsigned char> want(bytes.size(), kGuard);
    std::fill(want.begin(), want.begin() + written, static_cast<unsigned char>(0));
    std::memcpy(want.data(), &whole, std::min<size_t>(written, sizeof(T)));
    if (written != 0) std::memcpy(want.data(), &size, sizeof(size));
    CHECK(bytes == want);
  }
  init(nullptr, sizeof(T));
}

void TestRead() {
  llmc_sampling_params defaults{}, from{};
  defaults.top_p = 0.5f;
  defaults.num_logprobs = 7;
  from.struct_size = offsetof(llmc_sampling_params, num_logprobs);
  from.top_p = 0.25f;
  from.num_logprobs = 3;
  llmc_sampling_params to = defaults;
  CHECK_OK(ReadStruct(&from, "params", &to));
  CHECK(to.struct_size == sizeof(to) && to.top_p == 0.25f && to.num_logprobs == 7);
  from.struct_size = sizeof(from) + 100;
  CHECK_OK(ReadStruct(&from, "params", &to));
  CHECK(to.struct_size == sizeof(to) && to.num_logprobs == 3);
  for (uint32_t size = 0; size < 8; ++size) {
    from.struct_size = size;
    const Status status = ReadStruct(&from, "params", &to);
    CHECK(status.code == LLMC_ERR_INVALID_ARGUMENT && status.message.find("params") != std::string::npos);
  }
  CHECK_EQ(ReadStruct<llmc_sampling_params>(nullptr, "params", &to).code, LLMC_ERR_INVALID_ARGUMENT);
}

// The second ellipsis is cut: it goes whole.
void TestCopyText() {
  const std::string text = "ab\u2026c\u2026";
  char out[16];
  for (size_t room = 1; room <= sizeof(out); ++room) {
    std::memset(out, 'x', sizeof(out));
    CopyText(text.data(), text.size(), room, out);
    const size_t n = room <= 3 ? room - 1 : room <= 5 ? 2 : room == 6 ? 5 : room <= 9 ? 6 : 9;
    CHECK_EQ(std::string(out), text.substr(0, n));
    CHECK(room == sizeof(out) || out[room] == 'x');
  }
}

void TestWriteArray() {
  std::vector<llmc_graph_stats> values(3);
  for (uint64_t i = 0; i < 3; ++i) values[i] = {sizeof(llmc_graph_stats), 0, i + 1, 0, 0, 0};
  for (uint32_t stride : {16u, static_cast<uint32_t>(sizeof(llmc_graph_stats)), 64u}) {
    std::vector<unsigned char> bytes(3 * stride + 16, kGuard);
    std::memcpy(bytes.data(), &stride, sizeof(stride));
    WriteArray(values, 2, reinterpret_cast<llmc_graph_stats*>(bytes.data()));
    for (uint32_t i = 0; i < 2; ++i) {
      llmc_graph_stats head;
      std::memcpy(&head, &bytes[i * stride], 16);
      CHECK(head.struct_size == stride && head.replays == i + 1);
    }
    CHECK(static_cast<size_t>(std::count(bytes.begin() + 2 * stride, bytes.end(), kGuard)) == stride + 16);
  }
  WriteArray(values, 0, static_cast<llmc_graph_stats*>(nullptr));
}

}  // namespace

int main() {
  TestInit(llmc_error_init);
  TestInit(llmc_replayer_options_init);
  TestInit(llmc_batch_init);
  TestInit(llmc_probe_options_init);
  TestInit(llmc_engine_options_init);
  TestInit(llmc_sampling_params_init);
  TestInit(llmc_request_init);
  TestRead();
  TestWriteArray();
  TestCopyText();
  return llmc_test::Finish("c_struct_test");
}
