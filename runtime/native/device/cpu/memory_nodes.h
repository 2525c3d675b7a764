// Spreads memory that every thread of a team reads over the memory nodes (NUMA) of the team's CPUs, a page each in turn.
// Any thread may take over a task, so no page has an owner; spread, all threads together have the bandwidth of all nodes,
// and none has less than another.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "core/mapped_file.h"

namespace llmc {

constexpr int kMaxNodes = 1024;  // no Linux has more
using NodeMask = std::array<unsigned long, kMaxNodes / (8 * sizeof(unsigned long))>;

// Nodes of some CPUs that this process may take memory from, ascending; files of /proc and /sys are read below `root`.
// Nodes without CPUs are not among them; empty where the system does not tell. Throws std::bad_alloc.
std::vector<int> MemoryNodes(const std::vector<int>& cpus, const std::string& root);

// Whether the calling thread was given a policy of its own, as by numactl.
bool HasMemoryPolicy();
// The policy of [data, data + bytes), of which no page has been touched. 0, or the errno of a refusal.
int Interleave(void* data, uint64_t bytes, const NodeMask& nodes);

// What the machine says and does; tests have machines of their own.
struct NodeSystem {
  std::string root;
  bool (*has_policy)() = HasMemoryPolicy;
  int (*interleave)(void* data, uint64_t bytes, const NodeMask& nodes) = Interleave;
};

// How the memory of a device lies.
struct MemorySpread {
  uint64_t bytes = 0;  // address space whose pages are spread
  uint32_t num_nodes = 1;  // of the team's CPUs
  int error = 0;  // errno of the last refusal to spread; not an error: pages lie where they are first touched
};

class NodeSpread {
 public:
  NodeSpread() = default;  // leaves every page where it is first touched
  // Of a team on these CPUs. With fewer than two nodes nothing is ever done; a policy from outside is somebody's choice
  // and stays. Throws std::bad_alloc.
  NodeSpread(const std::vector<int>& cpus, const NodeSystem& system);

  uint32_t num_nodes() const { return num_nodes_; }
  int error() const { return error_; }
  // Before anyone touches them. Returns the bytes that are spread: all, or none. Below a huge page there is nothing to.
  uint64_t Place(const Pages& pages);

 private:
  uint32_t num_nodes_ = 1;
  int error_ = 0;
  NodeMask mask_{};
  int (*interleave_)(void*, uint64_t, const NodeMask&) = nullptr;  // null: nothing is to be done
};

}  // namespace llmc
