#include "device/cpu/memory_nodes.h"

#include <errno.h>
#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <map>

#include "core/cgroup.h"
#include "device/cpu/cpu_topology.h"

namespace llmc {
namespace {

constexpr uint64_t kHugePage = 2u << 20;

// Value of the line of /proc/self/status that starts with `name`; empty if there is none.
std::string StatusLine(const std::string& text, const std::string& name) {
  const std::size_t at = ("\n" + text).find("\n" + name);
  if (at == std::string::npos) return "";
  const std::size_t begin = text.find_first_not_of(" \t", at + name.size());
  return begin == std::string::npos ? "" : text.substr(begin, text.find('\n', begin) - begin);
}

bool Has(const std::vector<int>& list, int value) { return std::find(list.begin(), list.end(), value) != list.end(); }

}  // namespace

std::vector<int> MemoryNodes(const std::vector<int>& cpus, const std::string& root) {
  // Kernels without cpusets or without has_memory limit nothing there.
  const std::vector<int> allowed = ParseCpuList(StatusLine(ReadText(root + "/proc/self/status"), "Mems_allowed_list:"));
  const std::vector<int> filled = ParseCpuList(ReadText(root + "/sys/devices/system/node/has_memory"));
  std::vector<int> nodes;
  for (const auto& [node, of_node] : NodeCpus(root)) {
    const bool used = std::any_of(cpus.begin(), cpus.end(), [&list = of_node](int cpu) { return Has(list, cpu); });
    if (used && node < kMaxNodes && (allowed.empty() || Has(allowed, node)) && (filled.empty() || Has(filled, node))) {
      nodes.push_back(node);
    }
  }
  return nodes;
}

bool HasMemoryPolicy() {
  int mode = MPOL_DEFAULT;
  return ::syscall(SYS_get_mempolicy, &mode, nullptr, 0, nullptr, 0) == 0 && mode != MPOL_DEFAULT;
}

int Interleave(void* data, uint64_t bytes, const NodeMask& nodes) {
  // maxnode + 1: the kernel reads one bit less than it is told.
  return ::syscall(SYS_mbind, data, bytes, MPOL_INTERLEAVE, nodes.data(), kMaxNodes + 1, 0) == 0 ? 0 : errno;
}

NodeSpread::NodeSpread(const std::vector<int>& cpus, const NodeSystem& system) {
  const std::vector<int> nodes = MemoryNodes(cpus, system.root);
  if (nodes.size() < 2) return;
  num_nodes_ = static_cast<uint32_t>(nodes.size());
  if (system.has_policy()) return;
  constexpr int kBits = 8 * sizeof(unsigned long);
  for (const int node : nodes) mask_[static_cast<std::size_t>(node / kBits)] |= 1ul << (node % kBits);
  interleave_ = system.interleave;
}

uint64_t NodeSpread::Place(const Pages& pages) {
  if (interleave_ == nullptr || pages.size() < kHugePage) return 0;
  const int error = interleave_(pages.data(), pages.size(), mask_);
  if (error != 0) error_ = error;
  return error == 0 ? pages.size() : 0;
}

}  // namespace llmc
