// Spreads memory that all threads of a team read over the memory nodes (NUMA) of the team's CPUs, page by page. Any
// thread may take any task, so no page has an owner. Spread pages give all threads together the bandwidth of all nodes,
// and each the same share.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "core/mapped_file.h"

namespace llmc {

constexpr int kMaxNodes = 1024;  // no Linux has more
using NodeMask = std::array<unsigned long, kMaxNodes / (8 * sizeof(unsigned long))>;

// Nodes of the given CPUs from which this process may allocate, ascending; files of /proc and /sys are read below
// `root`. Memory-only nodes are excluded; empty if the system does not tell. Throws std::bad_alloc.
std::vector<int> MemoryNodes(const std::vector<int>& cpus, const std::string& root);

// Whether the calling thread has a memory policy set from outside, as by numactl.
bool HasMemoryPolicy();
// Sets the policy of [data, data + bytes), whose pages must be untouched. 0, or the errno of a refusal.
int Interleave(void* data, uint64_t bytes, const NodeMask& nodes);

// Interface to the machine; tests provide their own.
struct NodeSystem {
  std::string root;
  bool (*has_policy)() = HasMemoryPolicy;
  int (*interleave)(void* data, uint64_t bytes, const NodeMask& nodes) = Interleave;
};

// Placement of a device's memory.
struct MemorySpread {
  uint64_t bytes = 0;  // address space whose pages are spread
  uint32_t num_nodes = 1;  // of the team's CPUs
  int error = 0;  // errno of the last refusal to spread. Not an error: pages then stay where they are first touched
};

class NodeSpread {
 public:
  NodeSpread() = default;  // leaves every page where it is first touched
  // For a team on these CPUs. Does nothing with fewer than two nodes. A policy set from outside is somebody's choice
  // and stays. Throws std::bad_alloc.
  NodeSpread(const std::vector<int>& cpus, const NodeSystem& system);

  uint32_t num_nodes() const { return num_nodes_; }
  int error() const { return error_; }
  // Call before any page is touched. Returns the bytes spread: all or none. Regions below a huge page are not spread.
  uint64_t Place(const Pages& pages);

 private:
  uint32_t num_nodes_ = 1;
  int error_ = 0;
  NodeMask mask_{};
  int (*interleave_)(void*, uint64_t, const NodeMask&) = nullptr;  // null: nothing to do
};

}  // namespace llmc
