#include "collective/room.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <new>
#include <utility>

#include "collective/process.h"
#include "core/clock.h"
#include "core/error.h"
#include "core/pause.h"

namespace llmc {
namespace {

constexpr uint64_t kMagic = 0x33304d4f4f524c4c;  // "LLROOM03"
constexpr uint64_t kSlotsOfRank = 4;  // two each for parts and sums: only used ones take memory
constexpr uint64_t kOutboxUnit = 64u << 10;  // outboxes begin at multiples of it, which is one of the page size
constexpr uint64_t kLookNs = 200'000'000;  // interval at which a sleeping rank checks that the others are alive
constexpr uint64_t kReportNs = 300'000'000;  // time for the launcher of a rank to report why it ended
static_assert(kLookNs + kReportNs < 5'000'000'000, "a lost rank is reported within 5 s: docs/parallel.md says so");
constexpr uint64_t kYieldNs = 20'000;  // after spinning for so long, the CPU is yielded
constexpr int kFirstPolls = 64, kPollsPerClock = 8;
enum FailureState : uint32_t { kNone = 0, kWriting = 1, kWritten = 2 };

Status WrongRoom(const std::string& what) { return Status::Error(LLMC_ERR_INVALID_ARGUMENT, what); }

Status SystemError(const std::string& path, const char* what, int error) {
  return Status::Error(LLMC_ERR_IO, "The ranks' shared memory " + path + " " + what + ": " + std::strerror(error) +
                                        "; is there enough shared memory, and was it passed on?");
}

}  // namespace

struct Room::Header {
  std::atomic<uint64_t> magic;  // written last
  uint32_t num_ranks;
  std::atomic<uint32_t> failure;
  uint32_t failed_rank;
  char why[512];
  SharedFlag said;
};

struct Room::Mapping {
  char* data = nullptr;
  uint64_t bytes = 0;
  int fd = -1;
  std::mutex mutex;  // guards the members below until MakeOutboxes has returned to every rank of this process
  char* outboxes = nullptr;
  uint64_t outbox_bytes = 0, outboxes_bytes = 0;  // of one rank, of all
  ~Mapping() {
    if (data != nullptr) ::munmap(data, bytes);
    if (outboxes != nullptr) ::munmap(outboxes, outboxes_bytes);
    if (fd >= 0) ::close(fd);
  }
  static uint64_t BytesFor(uint64_t num_ranks) {
    return sizeof(Header) + num_ranks * sizeof(RoomMember) + kChannelBytes + num_ranks * kSlotsOfRank * kSlotBytes;
  }
  // bytes: 0 for the size of the file.
  static Status Map(const std::string& path, uint64_t bytes, std::shared_ptr<Mapping>* out) {
    const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) return SystemError(path, "does not open", errno);
    struct stat found{};
    auto mapping = std::make_shared<Mapping>();
    mapping->fd = fd;
    int error = ::fstat(fd, &found) != 0 ? errno : 0;
    const bool grows = bytes > static_cast<uint64_t>(found.st_size);
    if (error == 0 && grows && ::ftruncate(fd, static_cast<off_t>(bytes)) != 0) error = errno;
    if (bytes == 0) bytes = static_cast<uint64_t>(found.st_size);
    if (error == 0 && bytes >= BytesFor(1)) {
      void* at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
      if (at == MAP_FAILED) {
        error = errno;
      } else {
        mapping->data = static_cast<char*>(at);
        mapping->bytes = bytes;
      }
    }
    if (error != 0) return SystemError(path, "cannot be used", error);
    if (mapping->data == nullptr)
      return WrongRoom("The file " + path + " is not the memory of ranks: rank 0 opens it first.");
    *out = std::move(mapping);
    return Status::Ok();
  }
  Status Check(const std::string& path) const {
    const auto* header = reinterpret_cast<const Header*>(data);
    if (header->magic.load(std::memory_order_acquire) == kMagic && header->num_ranks <= kMostRanks &&
        bytes >= BytesFor(header->num_ranks)) {
      return Status::Ok();
    }
    return WrongRoom("The file " + path + " is not the memory of ranks: rank 0 opens it first.");
  }
};

Room::Room(std::shared_ptr<Mapping> mapping, uint32_t rank, uint32_t num_ranks)
    : mapping_(std::move(mapping)), rank_(rank), num_ranks_(num_ranks) {}

Status Room::Open(const std::string& path, uint32_t rank, uint32_t num_ranks, std::shared_ptr<Room>* out) {
  std::shared_ptr<Mapping> mapping;
  if (rank == 0) {
    if (num_ranks < 1 || num_ranks > kMostRanks) {
      return WrongRoom("The number of ranks is " + std::to_string(num_ranks) + "; use 1 to " +
                       std::to_string(kMostRanks) + ".");
    }
    LLMC_RETURN_IF_ERROR(Mapping::Map(path, Mapping::BytesFor(num_ranks), &mapping));
    auto* header = reinterpret_cast<Header*>(mapping->data);
    if (header->magic.load(std::memory_order_acquire) != 0) {
      return WrongRoom("The memory of ranks " + path + " has a rank 0 already; give each group of ranks its own.");
    }
    new (header) Header{};
    for (uint32_t r = 0; r < num_ranks; ++r) {
      new (mapping->data + sizeof(Header) + r * sizeof(RoomMember)) RoomMember{};
    }
    header->num_ranks = num_ranks;
    header->magic.store(kMagic, std::memory_order_release);
  } else {
    LLMC_RETURN_IF_ERROR(Mapping::Map(path, 0, &mapping));
    LLMC_RETURN_IF_ERROR(mapping->Check(path));
    const uint32_t said = reinterpret_cast<const Header*>(mapping->data)->num_ranks;
    if (rank >= said || (num_ranks != 0 && num_ranks != said)) {
      return WrongRoom("Rank " + std::to_string(rank) + " of " + std::to_string(num_ranks == 0 ? said : num_ranks) +
                       " does not belong into memory of " + std::to_string(said) + " ranks.");
    }
    num_ranks = said;
  }
  std::shared_ptr<Room> room(new Room(std::move(mapping), rank, num_ranks));
  LLMC_RETURN_IF_ERROR(room->Enter());
  *out = std::move(room);
  return Status::Ok();
}

Status Room::Join(const std::shared_ptr<Room>& other, uint32_t rank, std::shared_ptr<Room>* out) {
  if (rank >= other->num_ranks_) return WrongRoom("There is no rank " + std::to_string(rank) + " in this room.");
  std::shared_ptr<Room> room(new Room(other->mapping_, rank, other->num_ranks_));
  LLMC_RETURN_IF_ERROR(room->Enter());
  *out = std::move(room);
  return Status::Ok();
}

Status Room::Report(const std::string& path, uint32_t rank, const std::string& why) {
  std::shared_ptr<Mapping> mapping;
  LLMC_RETURN_IF_ERROR(Mapping::Map(path, 0, &mapping));
  LLMC_RETURN_IF_ERROR(mapping->Check(path));
  const uint32_t num_ranks = reinterpret_cast<const Header*>(mapping->data)->num_ranks;
  if (rank >= num_ranks) return WrongRoom("There is no rank " + std::to_string(rank) + " in this room.");
  // A visitor is not a member, so its destructor must not leave.
  Room visitor(std::move(mapping), num_ranks, num_ranks);
  visitor.Fail(rank, why);
  return Status::Ok();
}

Room::~Room() {
  if (rank_ < num_ranks_) own().left.store(1, std::memory_order_release);
}

Status Room::Enter() {
  uint32_t none = 0;
  if (!own().entered.compare_exchange_strong(none, 1)) {
    const uint32_t rank = std::exchange(rank_, num_ranks_);  // the other process leaves as this rank
    return WrongRoom("Rank " + std::to_string(rank) + " is there already; give each process a rank of its own.");
  }
  const auto pid = static_cast<int32_t>(::getpid());
  own().process_start.store(StartOfProcess(pid), std::memory_order_relaxed);
  own().pid.store(pid, std::memory_order_release);
  return Status::Ok();
}

Room::Header& Room::header() const { return *reinterpret_cast<Header*>(mapping_->data); }
SharedFlag& Room::said() const { return header().said; }
RoomMember& Room::member(uint32_t rank) const {
  return reinterpret_cast<RoomMember*>(mapping_->data + sizeof(Header))[rank];
}
char* Room::channel() const { return mapping_->data + sizeof(Header) + num_ranks_ * sizeof(RoomMember); }
char* Room::slot(uint32_t rank, uint32_t turn) const {
  return channel() + kChannelBytes + (kSlotsOfRank * rank + turn) * kSlotBytes;
}
char* Room::sums(uint32_t rank, uint32_t turn) const { return slot(rank, 2 + turn); }
char* Room::outbox(uint32_t rank) const { return mapping_->outboxes + rank * mapping_->outbox_bytes; }

// Whichever rank comes first makes the file longer. Ranks of one process share the mapping.
Status Room::MakeOutboxes(uint64_t bytes) {
  Mapping& all = *mapping_;
  std::lock_guard<std::mutex> lock(all.mutex);
  if (all.outboxes != nullptr) return Status::Ok();
  const auto whole = [](uint64_t of) { return (of + kOutboxUnit - 1) / kOutboxUnit * kOutboxUnit; };
  const uint64_t each = whole(bytes), total = each * num_ranks_, begin = whole(Mapping::BytesFor(num_ranks_));
  struct stat found{};
  int error = ::fstat(all.fd, &found) != 0 ? errno : 0;
  const bool longer = static_cast<uint64_t>(found.st_size) < begin + total;
  if (error == 0 && longer && ::ftruncate(all.fd, static_cast<off_t>(begin + total)) != 0) error = errno;
  void* at = MAP_FAILED;
  if (error == 0) {
    at = ::mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_SHARED, all.fd, static_cast<off_t>(begin));
    if (at == MAP_FAILED) error = errno;
  }
  if (error != 0) {
    return Status::Error(LLMC_ERR_OUT_OF_MEMORY, "the ranks' shared memory does not grow by " + std::to_string(total) +
                                                     " bytes for what they pass on: " + std::strerror(error));
  }
  all.outboxes = static_cast<char*>(at);
  all.outbox_bytes = each;
  all.outboxes_bytes = total;
  return Status::Ok();
}

bool Room::Await(SharedFlag* flag, uint32_t target, uint64_t spin_ns) const {
  if (flag->Reached(target)) return true;
  for (int i = 0; i < kFirstPolls; ++i) {
    Pause();
    if (flag->Reached(target)) return true;
  }
  const uint64_t start = MonotonicNs();
  for (uint64_t spent = 0; spent < spin_ns; spent = MonotonicNs() - start) {
    for (int i = 0; i < kPollsPerClock; ++i) {
      Pause();
      if (flag->Reached(target)) return true;
    }
    if (spent > kYieldNs) ::sched_yield();
  }
  uint64_t looked = MonotonicNs();
  for (uint32_t seen; static_cast<int32_t>((seen = flag->value()) - target) < 0;) {
    if (failed()) return false;
    flag->Sleep(seen, kLookNs);
    if (MonotonicNs() - looked < kLookNs / 2) continue;
    MissMembers();
    looked = MonotonicNs();
  }
  return true;
}

// Fails the room if a member's process is gone. The launcher of a rank knows better why it ended and may report first.
void Room::MissMembers() const {
  for (uint32_t r = 0; r < num_ranks_; ++r) {
    const RoomMember& one = member(r);
    const int32_t pid = one.pid.load(std::memory_order_acquire);
    if (pid == 0 || one.left.load(std::memory_order_acquire) != 0) continue;
    if (StartOfProcess(pid) == one.process_start.load(std::memory_order_relaxed)) continue;
    if (one.left.load(std::memory_order_acquire) != 0) continue;
    const timespec grace = {0, static_cast<long>(kReportNs)};
    ::nanosleep(&grace, nullptr);
    Fail(r, "its process " + std::to_string(pid) + " is gone");
    return;
  }
}

void Room::Fail(uint32_t rank, const std::string& why) const {
  uint32_t none = kNone;
  if (!header().failure.compare_exchange_strong(none, kWriting)) return;
  header().failed_rank = rank;
  CopyText(why.data(), why.size(), sizeof(header().why), header().why);
  header().failure.store(kWritten, std::memory_order_release);
}

bool Room::failed() const { return header().failure.load(std::memory_order_acquire) == kWritten; }

Status Room::status() const {
  if (!failed()) return Status::Ok();
  return Status::Error(LLMC_ERR_INTERNAL, "Rank " + std::to_string(header().failed_rank) + " of " +
                                              std::to_string(num_ranks_) + " has failed: " + header().why +
                                              "; start anew.");
}

}  // namespace llmc
