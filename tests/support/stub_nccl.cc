// NCCL without a GPU, beside stub_cuda.cc: arguments, order and lifetime are checked, and what ranks gather passes
// through memory that their processes share. As with the library, calls return before they have ended, and a rank waits
// in its stream for the others. What STUB_NCCL says, as in "version=22005 AllGather@3=1", has another value or fails.
// "other_version" is that of processes other than "leader".
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "stub_orders.h"

#define API extern "C" __attribute__((visibility("default"))) int

namespace {

enum Code { kOk = 0, kInvalidArgument = 4, kInvalidUsage = 5, kInProgress = 7 };
constexpr size_t kSlotBytes = 1 << 20, kMostRanks = 8;

struct Id {
  char path[128];
};
struct Config {
  size_t size;
  unsigned magic, version;
  int blocking;
};
struct Member {
  std::atomic<uint32_t> entered, given;
  uint64_t counts[2];
  char slots[2][kSlotBytes];
};
struct Comm {
  Member* members = nullptr;
  int ranks = 0, rank = 0;
  bool aborted = false;
  uint32_t done = 0;
  std::vector<std::unique_ptr<struct Call>> calls;  // graphs may repeat each
};
struct Call {
  Comm* comm;
  const void* from;
  char* to;
  size_t count;
  bool begun = false;
};

struct World {
  std::vector<std::string> paths;  // of ids, for the end
  std::recursive_mutex mutex;
  std::map<std::string, int> calls;
  std::set<Comm*> alive;
  std::string wrong;
  uint64_t gathered = 0;
  bool failed = false;  // then graphs may outlive their communicator
};
World& world() {
  static World* one = new World;
  return *one;
}

bool Said(const std::string& name, long long* value, long long* from = nullptr) {
  return Ordered("STUB_NCCL", name, value, from);
}
int Wrong(const std::string& what) {
  world().wrong += what + "\n";
  std::fprintf(stderr, "stub_nccl: %s\n", what.c_str());
  return kInvalidArgument;
}
#define BEGIN(name)                                                \
  const std::lock_guard<std::recursive_mutex> lock(world().mutex); \
  if (const int code = Begin(name)) return code;
int Begin(const char* name) {
  const int call = ++world().calls[name];
  long long code = 0, from = 1;
  if (!Said(name, &code, &from) || call < from) return 0;
  world().failed |= code != 0;
  return static_cast<int>(code);
}

// A function of the driver's stub.
template <class Function>
Function OfDriver(const char* name) {
  const char* path = std::getenv("LLMC_CUDA_LIBRARY");
  void* library = path ? dlopen(path, RTLD_NOW | RTLD_NOLOAD) : nullptr;
  return library ? reinterpret_cast<Function>(dlsym(library, name)) : nullptr;
}

bool AllEntered(const Comm& comm) {
  for (int r = 0; r < comm.ranks; ++r) {
    if (!comm.members[r].entered) return false;
  }
  return true;
}

// What a stream does for a call: false as long as another rank is missed. A slot is used again two calls later: by then
// every rank has given the call in between, and so has read this one.
bool Gather(void* given) {
  auto& call = *static_cast<Call*>(given);
  Comm& comm = *call.comm;
  if (comm.aborted) return true;
  const uint32_t number = comm.done + 1, turn = number & 1;
  const size_t bytes = call.count * sizeof(float);
  if (!call.begun) {
    Member& own = comm.members[comm.rank];
    own.counts[turn] = call.count;
    std::memcpy(own.slots[turn], call.from, bytes);
    own.given.store(number, std::memory_order_release);
    call.begun = true;
  }
  for (int r = 0; r < comm.ranks; ++r) {
    if (comm.members[r].given.load(std::memory_order_acquire) < number) return false;
  }
  for (int r = 0; r < comm.ranks; ++r) {
    if (comm.members[r].counts[turn] != call.count) Wrong("ranks gather different counts");
    std::memcpy(call.to + r * bytes, comm.members[r].slots[turn], bytes);
  }
  ++comm.done;
  ++world().gathered;
  call.begun = false;
  return true;
}

}  // namespace

API ncclGetVersion(int* version) {
  BEGIN("GetVersion")
  long long leader = 0, said = 22005;
  Said("version", &said);
  if (Said("leader", &leader) && leader != getpid()) Said("other_version", &said);
  *version = static_cast<int>(said);
  return kOk;
}
API ncclGetUniqueId(Id* id) {
  BEGIN("GetUniqueId")
  static int count = 0;
  std::memset(id, 0, sizeof(*id));
  std::snprintf(id->path, sizeof(id->path), "/dev/shm/stub-nccl-%d-%d", getpid(), count++);
  world().paths.push_back(id->path);
  const int file = open(id->path, O_RDWR | O_CREAT | O_EXCL, 0600);
  if (file < 0 || ftruncate(file, sizeof(Member) * kMostRanks) != 0) return 2;
  close(file);
  return kOk;
}
API ncclCommInitRankConfig(Comm** out, int ranks, Id id, int rank, Config* config) {
  BEGIN("CommInitRank")
  if (config->size < sizeof(Config) || config->magic != 0xcafebeef || config->version < 21400) {
    return Wrong("a configuration that was not initialized");
  }
  if (config->blocking != 0) return Wrong("a communicator whose calls wait for other ranks");
  if (ranks < 2 || ranks > static_cast<int>(kMostRanks) || rank < 0 || rank >= ranks) return Wrong("a rank of none");
  const auto context = OfDriver<int (*)()>("stub_cuda_in_context");
  if (!context || !context()) return Wrong("a communicator without a GPU");
  const int file = open(id.path, O_RDWR);
  if (file < 0) return Wrong("an id that no rank has made");
  void* memory = mmap(nullptr, sizeof(Member) * kMostRanks, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  auto comm = std::make_unique<Comm>();
  comm->members = static_cast<Member*>(memory);
  comm->ranks = ranks;
  comm->rank = rank;
  if (comm->members[rank].entered.exchange(1)) return Wrong("a rank joins twice");
  if (AllEntered(*comm)) unlink(id.path);  // the last one that looks for it
  world().alive.insert(comm.get());
  *out = comm.release();
  return kInProgress;
}
API ncclCommGetAsyncError(Comm* comm, int* code) {
  const std::lock_guard<std::recursive_mutex> lock(world().mutex);
  if (!world().alive.count(comm)) return Wrong("ncclCommGetAsyncError of no communicator");
  *code = AllEntered(*comm) ? Begin("AsyncError") : static_cast<int>(kInProgress);
  return kOk;
}
API ncclAllGather(const void* from, void* to, size_t count, int type, Comm* comm, void* stream) {
  BEGIN("AllGather")
  if (!world().alive.count(comm)) return Wrong("ncclAllGather of no communicator");
  if (!AllEntered(*comm)) return Wrong("ncclAllGather before all ranks have joined");
  if (type != 7 || count == 0 || count * sizeof(float) > kSlotBytes) return Wrong("ncclAllGather of no floats");
  using Enqueue = int (*)(void*, const void*, void*, size_t, size_t, const void*, bool (*)(void*), void*);
  const auto enqueue = OfDriver<Enqueue>("stub_cuda_enqueue");
  if (!enqueue) return Wrong("no driver of the tests");
  comm->calls.push_back(std::make_unique<Call>(Call{comm, from, static_cast<char*>(to), count}));
  const size_t bytes = count * sizeof(float);
  return enqueue(stream, from, to, bytes, bytes * static_cast<size_t>(comm->ranks), comm, Gather,
                 comm->calls.back().get())
             ? Wrong("ncclAllGather of other memory than the GPU's, or in no stream")
             : static_cast<int>(kOk);
}
API ncclCommAbort(Comm* comm) {
  std::unique_lock<std::recursive_mutex> lock(world().mutex);
  if (!world().alive.count(comm)) return Wrong("ncclCommAbort of no communicator");
  bool waits = false;
  for (const auto& call : comm->calls) waits |= call->begun;
  const auto used = OfDriver<int (*)(const void*)>("stub_cuda_uses");
  comm->aborted = true;  // its calls may still be in a stream: they do nothing
  if (AllEntered(*comm) && !waits && !world().failed && used && used(comm)) {
    Wrong("a communicator ends before the graphs that use it");
  } else {
    while (used && used(comm)) {  // as the library does: so who destroys the graphs must not wait here
      lock.unlock();
      ::usleep(1000);
      lock.lock();
    }
  }
  world().alive.erase(comm);
  return kOk;
}

// ---- what tests ask --------------------------------------------------------------------------------------------

// A line for each mistake of the program, and for each communicator that it has not given back.
extern "C" __attribute__((visibility("default"))) const char* stub_nccl_report() {
  static std::string text;
  const std::lock_guard<std::recursive_mutex> lock(world().mutex);
  text = world().wrong;
  for (size_t i = 0; i < world().alive.size(); ++i) text += "left: a communicator\n";
  return text.c_str();
}
// Calls that have gathered something, in this process.
extern "C" __attribute__((visibility("default"))) unsigned long long stub_nccl_gathered() {
  const std::lock_guard<std::recursive_mutex> lock(world().mutex);
  return world().gathered;
}
// As if the process began anew, but for what is alive.
extern "C" __attribute__((visibility("default"))) void stub_nccl_recover() {
  const std::lock_guard<std::recursive_mutex> lock(world().mutex);
  world().calls.clear();
  world().wrong.clear();
  world().gathered = 0;
  world().failed = false;
}
__attribute__((destructor)) static void AtEnd() {
  for (const std::string& path : world().paths) unlink(path.c_str());
}
