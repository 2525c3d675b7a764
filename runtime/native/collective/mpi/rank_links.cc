#include "collective/mpi/rank_links.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "core/clock.h"
#include "core/error.h"

namespace llmc {
namespace {

constexpr int kTickMs = 250;
constexpr uint32_t kSilentTicks = 16;  // 4 s: TCP has retransmitted lost packets by then
constexpr int kConnectMs = 1500, kHelloMs = 3000;
constexpr uint64_t kJoinNs = 60'000'000'000;
constexpr uint64_t kNsPerMs = 1'000'000;
static_assert(kSilentTicks * kTickMs == 4000, "the sentence about a silent host says 4 s");
static_assert((kSilentTicks + 1) * kTickMs < 5000, "a lost rank is reported within 5 s: docs/parallel.md says so");

Status NoLink(const std::string& what, int error) {
  return Status::Error(LLMC_ERR_IO, "The ranks cannot be linked by TCP: " + what +
                                        (error != 0 ? std::string(": ") + std::strerror(error) : std::string()) + ".");
}

void FillToken(char* out, std::size_t capacity) {
  static const char* const kDigits = "0123456789abcdef";
  unsigned char bytes[16] = {};
  static_cast<void>(::getrandom(bytes, sizeof(bytes), 0));
  std::string text;
  for (const unsigned char byte : bytes) text += {kDigits[byte >> 4], kDigits[byte & 15]};
  CopyText(text.data(), text.size(), capacity, out);
}

std::string HostName() {
  char name[256] = {};
  if (::gethostname(name, sizeof(name) - 1) != 0) return "unknown";
  return name;
}

// Addresses of all interfaces that are up, those reachable from other hosts first.
std::string Addresses() {
  std::string routed, local;
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return {};
  for (const ifaddrs* one = all; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr || (one->ifa_flags & IFF_UP) == 0) continue;
    char text[INET6_ADDRSTRLEN] = {};
    if (one->ifa_addr->sa_family == AF_INET) {
      ::inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(one->ifa_addr)->sin_addr, text, sizeof(text));
    } else if (one->ifa_addr->sa_family == AF_INET6) {
      const in6_addr& address = reinterpret_cast<const sockaddr_in6*>(one->ifa_addr)->sin6_addr;
      if (IN6_IS_ADDR_LINKLOCAL(&address)) continue;  // needs an interface to be of use
      ::inet_ntop(AF_INET6, &address, text, sizeof(text));
    } else {
      continue;
    }
    ((one->ifa_flags & IFF_LOOPBACK) != 0 ? local : routed) += std::string(text) + " ";
  }
  ::freeifaddrs(all);
  return routed + local;
}

struct HostAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;
};

bool ParseAddress(const std::string& text, uint16_t port, HostAddress* out) {
  auto* v4 = reinterpret_cast<sockaddr_in*>(&out->storage);
  auto* v6 = reinterpret_cast<sockaddr_in6*>(&out->storage);
  if (::inet_pton(AF_INET, text.c_str(), &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    v4->sin_port = htons(port);
    out->length = sizeof(*v4);
    return true;
  }
  if (::inet_pton(AF_INET6, text.c_str(), &v6->sin6_addr) != 1) return false;
  v6->sin6_family = AF_INET6;
  v6->sin6_port = htons(port);
  out->length = sizeof(*v6);
  return true;
}

bool Await(int fd, short events, int ms) {
  pollfd one = {fd, events, 0};
  return ::poll(&one, 1, ms) == 1;
}

// Returns a connected, non-blocking socket, or -1 and errno.
int Connect(const HostAddress& to) {
  const int fd = ::socket(to.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return -1;
  int error = 0;
  socklen_t size = sizeof(error);
  if (::connect(fd, reinterpret_cast<const sockaddr*>(&to.storage), to.length) == 0) return fd;
  if (errno == EINPROGRESS && !Await(fd, POLLOUT, kConnectMs)) {
    error = ETIMEDOUT;
  } else if (errno != EINPROGRESS || ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0) {
    error = errno;
  }
  if (error == 0) return fd;
  ::close(fd);
  errno = error;
  return -1;
}

void SendAtOnce(int fd) {
  const int on = 1;
  static_cast<void>(::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)));
}

}  // namespace

enum class RankLinks::Kind : uint32_t { kNone, kHello, kBeat, kFailed, kLeft };

// Message of a link, in either direction.
struct RankLinks::Frame {
  Kind kind;
  uint32_t rank;  // kHello: the rank that joins; kFailed: the rank that failed
  int32_t pid;
  char token[33];
  char text[256];  // kHello: its host; kFailed: the reason
};

struct RankLinks::Link {
  int fd = -1;
  uint32_t rank = 0;
  int32_t pid = 0;
  std::string host;
  bool left = false;
  uint32_t silent = 0;  // ticks since the last frame
  std::size_t have = 0;  // bytes received of the next frame
  char coming[sizeof(Frame)] = {};

  // Receives a whole frame within ms.
  bool Take(Frame* out, int ms) {
    for (const uint64_t end = MonotonicNs() + static_cast<uint64_t>(ms) * kNsPerMs; have < sizeof(Frame);) {
      const uint64_t now = MonotonicNs();
      if (now >= end || !Await(fd, POLLIN, static_cast<int>((end - now) / kNsPerMs) + 1)) return false;
      const ssize_t got = ::recv(fd, coming + have, sizeof(Frame) - have, MSG_DONTWAIT);
      if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) return false;
      if (got > 0) have += static_cast<std::size_t>(got);
    }
    std::memcpy(out, coming, sizeof(Frame));
    have = 0;
    return true;
  }
  // A frame that does not fit the socket's buffer is dropped: the link has been silent for long and is lost.
  bool Put(const Frame& frame) const {
    return ::send(fd, &frame, sizeof(frame), MSG_NOSIGNAL | MSG_DONTWAIT) == static_cast<ssize_t>(sizeof(frame));
  }
};

RankLinks::RankLinks(uint32_t num_ranks) : num_ranks_(num_ranks) {}

Status RankLinks::Listen(uint32_t num_ranks, RankInvitation* invitation, std::unique_ptr<RankLinks>* out) {
  std::unique_ptr<RankLinks> links(new RankLinks(num_ranks));
  *invitation = {};
  FillToken(invitation->token, sizeof(invitation->token));
  FillToken(invitation->answer, sizeof(invitation->answer));
  links->token_ = invitation->token;
  links->answer_ = invitation->answer;
  const std::string host = HostName(), addresses = Addresses();
  CopyText(host.data(), host.size(), sizeof(invitation->host), invitation->host);
  CopyText(addresses.data(), addresses.size(), sizeof(invitation->addresses), invitation->addresses);
  // A socket for IPv6 and IPv4, if the system has IPv6.
  sockaddr_storage at{};
  socklen_t length = sizeof(sockaddr_in6);
  links->listener_ = ::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (links->listener_ >= 0) {
    const int off = 0;
    static_cast<void>(::setsockopt(links->listener_, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off)));
    at.ss_family = AF_INET6;
  } else {
    links->listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (links->listener_ < 0) return NoLink("no socket", errno);
    at.ss_family = AF_INET;
    length = sizeof(sockaddr_in);
  }
  if (::bind(links->listener_, reinterpret_cast<const sockaddr*>(&at), length) != 0 ||
      ::listen(links->listener_, static_cast<int>(num_ranks)) != 0 ||
      ::getsockname(links->listener_, reinterpret_cast<sockaddr*>(&at), &length) != 0) {
    return NoLink("rank 0 cannot listen", errno);
  }
  invitation->port = ntohs(at.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6*>(&at)->sin6_port
                                                    : reinterpret_cast<const sockaddr_in*>(&at)->sin_port);
  *out = std::move(links);
  return Status::Ok();
}

Status RankLinks::AwaitOthers() {
  std::vector<bool> here(num_ranks_);
  Frame answer{};
  answer.kind = Kind::kHello;
  CopyText(answer_.data(), answer_.size(), sizeof(answer.token), answer.token);
  for (const uint64_t end = MonotonicNs() + kJoinNs; links_.size() + 1 < num_ranks_;) {
    if (MonotonicNs() > end) {
      for (uint32_t r = 1; r < num_ranks_; ++r) {
        if (!here[r]) {
          return NoLink("rank " + std::to_string(r) + " of " + std::to_string(num_ranks_) +
                            " has not come within 60 s; may its host open connections to rank 0's?",
                        0);
        }
      }
    }
    if (!Await(listener_, POLLIN, kTickMs)) continue;
    Link link;
    link.fd = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (link.fd < 0) continue;
    Frame hello{};
    // Strangers that find the port get no answer.
    if (!link.Take(&hello, kHelloMs) || hello.kind != Kind::kHello || hello.rank == 0 || hello.rank >= num_ranks_ ||
        here[hello.rank] || std::memcmp(hello.token, token_.c_str(), token_.size() + 1) != 0) {
      ::close(link.fd);
      continue;
    }
    SendAtOnce(link.fd);
    link.rank = hello.rank;
    link.pid = hello.pid;
    hello.text[sizeof(hello.text) - 1] = '\0';
    link.host = hello.text;
    if (!link.Put(answer)) {
      ::close(link.fd);
      continue;
    }
    here[link.rank] = true;
    links_.push_back(std::move(link));
  }
  ::close(std::exchange(listener_, -1));
  Start();
  return Status::Ok();
}

Status RankLinks::Join(const RankInvitation& invitation, uint32_t rank, uint32_t num_ranks,
                       std::unique_ptr<RankLinks>* out) {
  std::unique_ptr<RankLinks> links(new RankLinks(num_ranks));
  const std::string host = HostName(), all = invitation.addresses;
  Frame hello{};
  hello.kind = Kind::kHello;
  hello.rank = rank;
  hello.pid = ::getpid();
  std::memcpy(hello.token, invitation.token, sizeof(hello.token));
  CopyText(host.data(), host.size(), sizeof(hello.text), hello.text);
  int error = 0;
  for (std::size_t at = 0, end; (end = all.find(' ', at)) != std::string::npos; at = end + 1) {
    HostAddress address;
    if (!ParseAddress(all.substr(at, end - at), invitation.port, &address)) continue;
    Link link;
    link.fd = Connect(address);
    if (link.fd < 0) {
      error = errno;
      continue;
    }
    SendAtOnce(link.fd);
    Frame answer{};
    // Another host may have the same address: the answer tells.
    if (!link.Put(hello) || !link.Take(&answer, kHelloMs) ||
        std::memcmp(answer.token, invitation.answer, sizeof(answer.token)) != 0) {
      ::close(link.fd);
      continue;
    }
    link.host = invitation.host;
    links->links_.push_back(std::move(link));
    links->Start();
    *out = std::move(links);
    return Status::Ok();
  }
  return NoLink("rank " + std::to_string(rank) + " on " + host + " cannot reach rank 0 on " + invitation.host +
                    ", port " + std::to_string(invitation.port) + " of " + all + "(is a firewall between them?)",
                error);
}

RankLinks::~RankLinks() {
  stop_.store(true);
  if (thread_.joinable()) thread_.join();
  for (const Link& link : links_) {
    if (link.fd >= 0) ::close(link.fd);
  }
  if (listener_ >= 0) ::close(listener_);
}

void RankLinks::Start() {
  thread_ = std::thread([this] { Watch(); });
}

void RankLinks::Fail(uint32_t rank, const std::string& why) { Note(rank, why, nullptr); }

// Stores and sends a failure. told_by: the link that knows already.
void RankLinks::Note(uint32_t rank, const std::string& why, const Link* told_by) {
  Frame frame{};
  frame.kind = Kind::kFailed;
  frame.rank = rank;
  CopyText(why.data(), why.size(), sizeof(frame.text), frame.text);
  std::lock_guard<std::mutex> lock(mutex_);
  if (failed()) return;
  failure_ = Status::Error(LLMC_ERR_INTERNAL, "Rank " + std::to_string(rank) + " of " + std::to_string(num_ranks_) +
                                                  " has failed: " + frame.text + "; start anew.");
  failed_.store(true, std::memory_order_release);
  SendAll(frame, told_by);
}

Status RankLinks::status() const {
  if (!failed()) return Status::Ok();
  std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

void RankLinks::Leave() {
  Frame frame{};
  frame.kind = Kind::kLeft;
  std::lock_guard<std::mutex> lock(mutex_);
  leaving_.store(true);
  SendAll(frame);
}

void RankLinks::SendAll(const Frame& frame, const Link* but) {
  for (const Link& link : links_) {
    if (&link != but && link.fd >= 0) static_cast<void>(link.Put(frame));
  }
}

// Counts its own ticks: a pause of the whole machine is no silence of a rank.
void RankLinks::Watch() {
  std::vector<pollfd> polled(links_.size());
  uint64_t next = MonotonicNs() + kTickMs * kNsPerMs;
  while (!stop_.load()) {
    for (std::size_t i = 0; i < links_.size(); ++i) polled[i] = {links_[i].fd, POLLIN, 0};  // -1 is left out
    const uint64_t now = MonotonicNs();
    const int ms = now < next ? static_cast<int>((next - now) / kNsPerMs) + 1 : 0;
    if (::poll(polled.data(), polled.size(), ms) > 0) {
      for (std::size_t i = 0; i < links_.size(); ++i) {
        if (polled[i].revents != 0) Read(&links_[i]);
      }
    }
    if (MonotonicNs() < next) continue;
    next = MonotonicNs() + kTickMs * kNsPerMs;
    Tick();
  }
}

void RankLinks::Read(Link* link) {
  const ssize_t got = ::recv(link->fd, link->coming + link->have, sizeof(Frame) - link->have, MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got <= 0) {
    const int error = got < 0 ? errno : 0;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ::close(std::exchange(link->fd, -1));
    }
    if (link->left || leaving_.load()) return;
    const std::string process =
        link->pid != 0 ? "its process " + std::to_string(link->pid) : std::string("its process");
    const std::string how = error == 0 || error == ECONNRESET ? " has ended" : std::string(": ") + std::strerror(error);
    return Fail(link->rank, process + " on " + link->host + how);
  }
  link->have += static_cast<std::size_t>(got);
  if (link->have < sizeof(Frame)) return;
  Frame frame;
  std::memcpy(&frame, link->coming, sizeof(frame));
  link->have = 0;
  Heard(link, frame);
}

void RankLinks::Heard(Link* link, const Frame& frame) {
  link->silent = 0;
  if (frame.kind == Kind::kLeft) link->left = true;
  if (frame.kind != Kind::kFailed) return;
  const std::string why(frame.text, ::strnlen(frame.text, sizeof(frame.text)));
  Note(frame.rank, why, link);
}

void RankLinks::Tick() {
  Frame beat{};
  beat.kind = Kind::kBeat;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    SendAll(beat);
  }
  for (Link& link : links_) {
    if (link.fd < 0 || link.left || leaving_.load() || ++link.silent < kSilentTicks) continue;
    Fail(link.rank, "nothing was heard of " + link.host + " for 4 s: the host, or the network to it, is down");
  }
}

}  // namespace llmc
