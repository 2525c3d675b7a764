// Memory spread over nodes: which nodes, by the files of machines that do not exist; which ranges, before anyone touched
// them; what a refusal leaves; and this machine's own system calls.
#include "device/cpu/memory_nodes.h"

#include <errno.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "device/cpu/cpu_device.h"
#include "device/cpu/cpu_topology.h"
#include "engine/engine.h"
#include "support/check.h"
#include "support/device_stat.h"
#include "support/fake_root.h"
#include "support/hand_made_artifact.h"

namespace {

using namespace llmc_test;
using llmc::MemoryNodes;
using llmc::NodeMask;
using Numbers = std::vector<int>;
using Sizes = std::vector<uint64_t>;

constexpr uint64_t kMiB = 1u << 20;
constexpr uint64_t kBiasBytes = 7 * kMiB + 8, kWeightBytes = 128 + kBiasBytes + kTailBytes;
constexpr uint64_t kArenaBytes = 5 * kMiB + 64;
constexpr uint32_t kBlocks = 2049;
constexpr uint64_t kPoolBytes = uint64_t{kBlocks} * (4 + 16) * 16 * 4;

class FakeMachine : public FakeRoot {
 public:
  // Node i has the CPUs of list i, and memory.
  explicit FakeMachine(std::initializer_list<std::string> cpus) {
    const std::string all = "0-" + std::to_string(cpus.size() - 1) + "\n";
    int node = 0;
    for (const std::string& list : cpus) Cpus(node++, list);
    Nodes("online", all).Nodes("has_memory", all).Mems(all);
  }
  FakeMachine& Nodes(const std::string& file, const std::string& text) {
    Write("/sys/devices/system/node/" + file, text);
    return *this;
  }
  FakeMachine& Cpus(int node, const std::string& list) {
    return Nodes("node" + std::to_string(node) + "/cpulist", list + "\n");
  }
  FakeMachine& Mems(const std::string& list) {
    Write("/proc/self/status", "Name:\tllmc\nMems_allowed:\t00000000,00000003\nMems_allowed_list:\t" + list + "x: 7\n");
    return *this;
  }
  Numbers Of(const Numbers& cpus) const { return MemoryNodes(cpus, root()); }
};

void TestNodes() {
  FakeMachine two({"0-1,4-5", "2-3,6-7"});
  CHECK(two.Of({0, 1, 2, 3, 4, 5, 6, 7}) == Numbers({0, 1}));
  CHECK(two.Of({3, 5}) == Numbers({0, 1}));
  CHECK(two.Of({4, 1}) == Numbers({0}));
  CHECK(two.Of({6}) == Numbers({1}));
  CHECK(two.Of({8}).empty());
  CHECK(two.Of({}).empty());
  FakeMachine memory_only({"0", "1", ""});
  CHECK(memory_only.Of({0, 1}) == Numbers({0, 1}));
  FakeMachine no_memory({"0", "1", "2"});
  no_memory.Nodes("has_memory", "0,2\n");
  CHECK(no_memory.Of({0, 1, 2}) == Numbers({0, 2}));
  CHECK(no_memory.Of({0, 1}) == Numbers({0}));
  FakeMachine offline({"0", "1", "2"});
  offline.Nodes("online", "0,2\n");
  CHECK(offline.Of({0, 1, 2}) == Numbers({0, 2}));
  FakeMachine cpuset({"0", "1", "2"});
  cpuset.Mems("1-2\n");
  CHECK(cpuset.Of({0, 1, 2}) == Numbers({1, 2}));
  cpuset.Mems("1\n");
  CHECK(cpuset.Of({0, 1, 2}) == Numbers({1}));
  // A number that no Linux gives.
  FakeMachine many({"0", "1"});
  many.Nodes("online", "0-1,1023-1025").Nodes("has_memory", "0-1025").Mems("0-1025\n");
  many.Cpus(1023, "2").Cpus(1024, "3").Cpus(1025, "4");
  CHECK(many.Of({0, 1, 2, 3, 4}) == Numbers({0, 1, 1023}));
}

void TestMalformed() {
  FakeMachine machine({"0", "1"});
  machine.Cpus(1, "one");
  CHECK(machine.Of({0, 1}) == Numbers({0}));
  machine.Cpus(1, "1-");
  CHECK(machine.Of({0, 1}) == Numbers({0}));
  machine.Cpus(1, "1,x");
  CHECK(machine.Of({0, 1}) == Numbers({0, 1}));
  // What says nothing limits nothing.
  for (const char* text : {"", "Mems_allowed_list:", "Mems_allowed_list:\n1\n", "Mems_allowed_list:\tall\n",
                           "Name: Mems_allowed_list: 1\n", "Mems_allowed:\t1\n"}) {
    machine.Write("/proc/self/status", text);
    CHECK(machine.Of({0, 1}) == Numbers({0, 1}));
  }
  machine.Write("/proc/self/status", "Mems_allowed_list:\t1");
  CHECK(machine.Of({0, 1}) == Numbers({1}));
  machine.Mems("0-1\n").Nodes("has_memory", "some\n");
  CHECK(machine.Of({0, 1}) == Numbers({0, 1}));
  for (const char* online : {"", "all\n", "-1\n", "99999999999\n"}) {
    machine.Nodes("online", online);
    CHECK(machine.Of({0, 1}).empty());
  }
  CHECK(MemoryNodes({0, 1}, machine.root() + "/nowhere").empty());
}

// What was asked of the system.
struct Range {
  const char* data;
  uint64_t bytes;
  NodeMask nodes;
  bool untouched;
};
std::vector<Range> ranges;
int policy_questions = 0;
bool own_policy = false;
int refusal = 0;

bool AskPolicy() {
  ++policy_questions;
  return own_policy;
}

bool IsUntouched(void* data, uint64_t bytes) {
  const uint64_t page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> resident((bytes + page - 1) / page);
  CHECK(::mincore(data, bytes, resident.data()) == 0);
  return std::none_of(resident.begin(), resident.end(), [](unsigned char r) { return r & 1; });
}

int Record(void* data, uint64_t bytes, const NodeMask& nodes) {
  ranges.push_back({static_cast<const char*>(data), bytes, nodes, IsUntouched(data, bytes)});
  return refusal;
}

llmc::NodeSystem SystemOf(const FakeMachine& machine) {
  ranges.clear();
  policy_questions = refusal = 0;
  own_policy = false;
  return {machine.root(), AskPolicy, Record};
}

NodeMask MaskOf(const Numbers& nodes) {
  NodeMask mask{};
  auto* bytes = reinterpret_cast<unsigned char*>(mask.data());  // a bit a node, lowest first
  for (const int node : nodes) bytes[node / 8] |= static_cast<unsigned char>(1 << node % 8);
  return mask;
}

llmc::Pages Allocate(uint64_t bytes) {
  llmc::Pages pages;
  CHECK_OK(llmc::Pages::Allocate(bytes, "test", &pages));
  return pages;
}

void TestSpread() {
  FakeMachine machine({"0", "1"});
  machine.Nodes("online", "0-1,65,1023").Nodes("has_memory", "0-1,65,1023").Mems("0-1,65,1023\n");
  machine.Cpus(65, "2").Cpus(1023, "3");
  const llmc::NodeSystem system = SystemOf(machine);
  llmc::NodeSpread spread({0, 2, 3}, system);
  CHECK_EQ(spread.num_nodes(), 3u);
  const llmc::Pages pages = Allocate(9 * kMiB + 5), small = Allocate(2 * kMiB - 1);
  CHECK_EQ(spread.Place(pages), 9 * kMiB + 5);
  CHECK_EQ(spread.Place(small), 0u);
  if (CHECK_EQ(ranges.size(), 1u)) {
    CHECK(ranges[0].data == pages.data() && ranges[0].bytes == 9 * kMiB + 5 && ranges[0].untouched);
    CHECK(ranges[0].nodes == MaskOf({0, 65, 1023}));
    CHECK_EQ(reinterpret_cast<uintptr_t>(ranges[0].data) % (2 * kMiB), 0u);
  }
  CHECK_EQ(spread.error(), 0);
}

void TestNothingToDo() {
  FakeMachine two({"0", "1"}), one({"0-1"});
  ranges.clear();
  const llmc::Pages pages = Allocate(4 * kMiB);
  const auto check = [&](llmc::NodeSpread spread, uint32_t num_nodes) {
    CHECK_EQ(spread.Place(pages), 0u);
    CHECK_EQ(spread.num_nodes(), num_nodes);
    CHECK(ranges.empty() && spread.error() == 0);
  };
  check({}, 1);
  check({{0, 1}, SystemOf(one)}, 1);
  CHECK_EQ(policy_questions, 0);
  check({{1}, SystemOf(two)}, 1);
  check({{}, SystemOf(two)}, 1);
  llmc::NodeSystem system = SystemOf(two);
  system.root += "/nowhere";
  check({{0, 1}, system}, 1);
  two.Mems("1\n");
  check({{0, 1}, SystemOf(two)}, 1);
  CHECK_EQ(policy_questions, 0);
  // Who started the process has decided.
  two.Mems("0-1\n");
  system = SystemOf(two);
  own_policy = true;
  check({{0, 1}, system}, 2);
  CHECK_EQ(policy_questions, 1);
}

void TestRefusal() {
  const FakeMachine machine({"0", "1"});
  for (const int error : {EPERM, ENOSYS}) {
    llmc::NodeSpread spread({0, 1}, SystemOf(machine));
    refusal = error;
    const llmc::Pages pages = Allocate(4 * kMiB);
    CHECK_EQ(spread.Place(pages), 0u);
    CHECK_EQ(spread.error(), error);
    CHECK_EQ(ranges.size(), 1u);
  }
}

// This machine's CPUs, the first of them on a node of its own; a single one is of both.
FakeMachine& Split(FakeMachine* machine) {
  const Numbers cpus = llmc::PlanCpus().cpus;
  std::string others = cpus.size() == 1 ? std::to_string(cpus[0]) : "";
  for (std::size_t i = 1; i < cpus.size(); ++i) others += (i > 1 ? "," : "") + std::to_string(cpus[i]);
  machine->Cpus(0, std::to_string(cpus.at(0))).Cpus(1, others);
  return *machine;
}

std::shared_ptr<const llmc::Artifact> OpenArtifact() {
  std::shared_ptr<const llmc::Artifact> artifact;
  CHECK_OK(llmc::Artifact::Open(g_dir, &artifact));
  return artifact;
}

std::unique_ptr<llmc::CpuDevice> MakeDevice(llmc::WeightMode mode, uint32_t threads, const llmc::NodeSystem& nodes) {
  llmc::CpuDeviceOptions options;
  options.num_threads = threads;
  options.pool.blocks = kBlocks;
  options.weights = {mode, 0, 2 * kMiB};
  options.nodes = nodes;
  std::unique_ptr<llmc::CpuDevice> device;
  CHECK_OK(llmc::CpuDevice::Create(OpenArtifact(), options, &device));
  return device;
}

void Replay(llmc::CpuDevice* device) {
  const Batch b;
  const float* logits = nullptr;
  CHECK_OK(device->Replay({0, b.num_tokens, b.num_seqs, b.num_samples, b.stride, b.ids.data(), b.positions.data(),
                           b.slots.data(), b.tables.data(), b.context.data(), b.start.data(), b.sample.data()},
                          &logits));
  CHECK(logits[1] == 1008.5f && logits[kVocab] == 2110.0f);
}

Sizes Placed() {
  Sizes sizes;
  for (const Range& range : ranges) {
    CHECK(range.untouched && range.nodes == MaskOf({0, 1}));
    sizes.push_back(range.bytes);
  }
  return sizes;
}

// Pool, arena and copied weights, each before it is used; the weights once, however many parts they come in.
void TestDevice() {
  FakeMachine machine({"", ""});
  const llmc::NodeSystem system = SystemOf(Split(&machine));
  auto device = MakeDevice(llmc::WeightMode::kCopied, 2, system);
  CHECK(Placed() == Sizes({kPoolBytes, kWeightBytes, kArenaBytes}));
  CHECK_EQ(device->memory_spread().bytes, kPoolBytes + kWeightBytes + kArenaBytes);
  CHECK_EQ(device->memory_spread().num_nodes, 2u);
  Replay(device.get());

  ranges.clear();
  device = MakeDevice(llmc::WeightMode::kAuto, 2, system);
  CHECK(Placed() == Sizes({kPoolBytes, kArenaBytes}));
  while (device->copied_weight_bytes() < kWeightBytes) {
    CHECK_OK(device->BeforeStep());
    Replay(device.get());
  }
  CHECK(Placed() == Sizes({kPoolBytes, kArenaBytes, kWeightBytes}));
  CHECK_OK(device->AddGraphs(OpenArtifact()));
  CHECK(Placed() == Sizes({kPoolBytes, kArenaBytes, kWeightBytes}));  // the arena is large enough for them
  CHECK_EQ(device->memory_spread().bytes, kPoolBytes + kWeightBytes + kArenaBytes);
  Replay(device.get());

  ranges.clear();
  CHECK_EQ(MakeDevice(llmc::WeightMode::kMapped, 2, system)->memory_spread().bytes, kPoolBytes + kArenaBytes);
  // A thread alone has near by what it touches.
  ranges.clear();
  CHECK_EQ(MakeDevice(llmc::WeightMode::kCopied, 1, system)->memory_spread().num_nodes, 1u);
  CHECK(ranges.empty());
}

// The copy that is read is the range that was placed.
void TestWeights() {
  FakeMachine machine({"", ""});
  llmc::NodeSpread spread(llmc::PlanCpus().cpus, SystemOf(Split(&machine)));
  std::unique_ptr<llmc::Team> team;
  CHECK_OK(llmc::Team::Create({}, &team));
  llmc::WeightMemory weights(OpenArtifact(), {llmc::WeightMode::kCopied, 0, 3 * kMiB}, 0);
  while (!weights.settled()) CHECK_OK(weights.Move(team.get(), &spread));
  CHECK_EQ(weights.spread_bytes(), kWeightBytes);
  if (CHECK_EQ(ranges.size(), 1u)) CHECK(weights.address(0) == ranges[0].data + 64);
}

// Refused, a device computes the same, and its engine tells why.
void TestRefusedDevice() {
  FakeMachine machine({"", ""});
  const llmc::NodeSystem system = SystemOf(Split(&machine));
  refusal = EPERM;
  auto device = MakeDevice(llmc::WeightMode::kCopied, 2, system);
  CHECK_EQ(ranges.size(), 3u);
  Replay(device.get());
  std::unique_ptr<llmc::Engine> engine;
  CHECK_OK(llmc::Engine::Create(std::move(device), {}, &engine));
  CHECK_EQ(llmc_test::Stat(*engine, "spread_bytes"), 0u);
  CHECK_EQ(llmc_test::Stat(*engine, "memory_nodes"), 2u);
  CHECK_EQ(llmc_test::Stat(*engine, "spread_errno"), uint64_t{EPERM});
  CHECK_EQ(llmc_test::Stat(*engine, "copied_weight_bytes"), kWeightBytes);

  refusal = 0;
  CHECK_OK(llmc::Engine::Create(MakeDevice(llmc::WeightMode::kCopied, 2, system), {}, &engine));
  CHECK_EQ(llmc_test::Stat(*engine, "spread_bytes"), kPoolBytes + kWeightBytes + kArenaBytes);
  CHECK_EQ(llmc_test::Stat(*engine, "spread_errno"), 0u);
  // Over a device that knows no nodes, and on a machine of one.
  FakeMachine one({"0-1023"});
  CHECK_OK(llmc::Engine::Create(MakeDevice(llmc::WeightMode::kCopied, 2, SystemOf(one)), {}, &engine));
  CHECK(ranges.empty());
  CHECK_EQ(llmc_test::Stat(*engine, "spread_bytes"), 0u);
  CHECK_EQ(llmc_test::Stat(*engine, "memory_nodes"), 1u);
}

// The kernel takes from a policy the nodes that it lacks, so a device can have one here.
void TestRealDevice() {
  FakeMachine machine({"", ""});
  llmc::NodeSystem system = SystemOf(Split(&machine));
  system.interleave = llmc::Interleave;
  auto device = MakeDevice(llmc::WeightMode::kCopied, 2, system);
  const llmc::MemorySpread spread = device->memory_spread();
  CHECK_EQ(spread.bytes, spread.error == 0 ? kPoolBytes + kWeightBytes + kArenaBytes : 0);
  for (int i = 0; i < 3; ++i) Replay(device.get());
}

// Of the page at `address`.
int PolicyAt(const void* address, NodeMask* nodes) {
  int mode = -1;
  *nodes = {};
  CHECK(::syscall(SYS_get_mempolicy, &mode, nodes->data(), llmc::kMaxNodes + 1, address, MPOL_F_ADDR) == 0);
  return mode;
}

void TestThisMachine() {
  const Numbers nodes = MemoryNodes(llmc::PlanCpus().cpus, "");
  const llmc::Pages pages = Allocate(4 * kMiB + 4096 + 7), other = Allocate(4 * kMiB);
  const int error = llmc::Interleave(pages.data(), pages.size(), MaskOf(nodes.empty() ? Numbers{0} : nodes));
  if (error != 0) {
    std::printf("mbind: %s\n", std::strerror(error));
    CHECK(error == EPERM || error == ENOSYS);
  } else {
    NodeMask found;
    for (const uint64_t at : {uint64_t{0}, 2 * kMiB, 4 * kMiB, pages.size() - 1}) {
      CHECK_EQ(PolicyAt(pages.data() + at, &found), MPOL_INTERLEAVE);
      CHECK(nodes.empty() || found == MaskOf(nodes));
    }
    NodeMask none;
    if (!llmc::HasMemoryPolicy()) CHECK_EQ(PolicyAt(other.data(), &none), MPOL_DEFAULT);
    // As numactl does it, on a thread that ends with it.
    std::thread([&found] {
      CHECK(::syscall(SYS_set_mempolicy, MPOL_BIND, found.data(), llmc::kMaxNodes + 1) == 0);
      CHECK(llmc::HasMemoryPolicy());
      CHECK(::syscall(SYS_set_mempolicy, MPOL_DEFAULT, nullptr, 0) == 0);
      CHECK(!llmc::HasMemoryPolicy());
    }).join();
  }
  std::memset(pages.data(), 1, pages.size());
  CHECK_EQ(pages.data()[pages.size() - 1], 1);
}

}  // namespace

int main() {
  TestNodes();
  TestMalformed();
  TestSpread();
  TestNothingToDo();
  TestRefusal();
  Tables tables = MakeArtifact(kBiasBytes);
  Put(&tables.file, tables.offset[5] + 40, kArenaBytes);
  FixCrc(&tables.file);
  Write("graphs.bin", tables.file);
  TestDevice();
  TestWeights();
  TestRefusedDevice();
  TestRealDevice();
  TestThisMachine();
  RemoveArtifact();
  return Finish("memory_nodes_test");
}
