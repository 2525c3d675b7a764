// RankLinks: connections from rank 0 to each other rank, separate from the data transport. They detect failures: a
// closed connection means a dead process, silence a dead host or network.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/status.h"

namespace llmc {

// Address of rank 0 and secrets that prove membership. Plain bytes, sent as they are.
struct RankInvitation {
  char token[33];  // secret of the joining rank
  char answer[33];  // secret of rank 0
  uint16_t port;
  char host[256];
  char addresses[1024];  // addresses of all its interfaces as text, each followed by a space
};

class RankLinks {
 public:
  // Rank 0: listens on all interfaces until AwaitOthers has returned.
  static Status Listen(uint32_t num_ranks, RankInvitation* invitation, std::unique_ptr<RankLinks>* out);
  Status AwaitOthers();
  // Any other rank.
  static Status Join(const RankInvitation& invitation, uint32_t rank, uint32_t num_ranks,
                     std::unique_ptr<RankLinks>* out);
  ~RankLinks();
  RankLinks(const RankLinks&) = delete;
  RankLinks& operator=(const RankLinks&) = delete;

  // Tells all ranks; the first failure is kept. Any thread, also for the methods below.
  void Fail(uint32_t rank, const std::string& why);
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  Status status() const;
  // From now on a closed link is no failure, neither here nor at its other end.
  void Leave();

 private:
  enum class Kind : uint32_t;
  struct Frame;
  struct Link;
  explicit RankLinks(uint32_t num_ranks);
  void Start();
  void Watch();
  void Read(Link* link);
  void Heard(Link* link, const Frame& frame);
  void Tick();
  void SendAll(const Frame& frame, const Link* but = nullptr);
  void Note(uint32_t rank, const std::string& why, const Link* told_by);

  const uint32_t num_ranks_;
  int listener_ = -1;
  std::string token_, answer_;
  std::vector<Link> links_;  // on rank 0: to each other rank; elsewhere: to rank 0
  std::atomic<bool> failed_{false}, leaving_{false}, stop_{false};
  mutable std::mutex mutex_;  // guards what is written, here and to the links
  Status failure_;
  std::thread thread_;
};

}  // namespace llmc
