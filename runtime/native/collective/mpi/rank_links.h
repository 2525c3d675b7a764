// RankLinks: a connection of rank 0 to each other rank, beside what carries their results. It tells who has failed: its end
// that of a process, silence that of a host or of the network between.
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

// Where rank 0 listens, and what shows that who comes is a rank of it. Plain bytes, to be sent as they are.
struct RankInvitation {
  char token[33];  // of who comes
  char answer[33];  // of rank 0
  uint16_t port;
  char host[256];
  char addresses[1024];  // of all its interfaces, in text, each ended by a space
};

class RankLinks {
 public:
  // Of rank 0: listens on all interfaces, until AwaitOthers has returned.
  static Status Listen(uint32_t num_ranks, RankInvitation* invitation, std::unique_ptr<RankLinks>* out);
  Status AwaitOthers();
  // Of another rank.
  static Status Join(const RankInvitation& invitation, uint32_t rank, uint32_t num_ranks,
                     std::unique_ptr<RankLinks>* out);
  ~RankLinks();
  RankLinks(const RankLinks&) = delete;
  RankLinks& operator=(const RankLinks&) = delete;

  // Tells all ranks; the first failure stays. Any thread, as are those below.
  void Fail(uint32_t rank, const std::string& why);
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  Status status() const;
  // From now on the end of a link is no failure, neither here nor where it leads.
  void Leave();

 private:
  enum class Kind : uint32_t;
  struct Frame;
  struct Link;
  RankLinks(uint32_t rank, uint32_t num_ranks);
  void Start();
  void Watch();
  void Read(Link* link);
  void Heard(Link* link, const Frame& frame);
  void Tick();
  void SendAll(const Frame& frame, const Link* but = nullptr);
  void Note(uint32_t rank, const std::string& why, const Link* told_by);

  const uint32_t rank_, num_ranks_;
  int listener_ = -1;
  std::string token_, answer_;
  std::vector<Link> links_;  // of rank 0 to each other; of another to rank 0
  std::atomic<bool> failed_{false}, leaving_{false}, stop_{false};
  mutable std::mutex mutex_;  // of what is written, here and to the links
  Status failure_;
  std::thread thread_;
};

}  // namespace llmc
