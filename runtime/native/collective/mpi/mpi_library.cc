#include "collective/mpi/mpi_library.h"

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>

#include "core/call_within.h"

namespace llmc {
namespace {

constexpr int kSuccess = 0, kThreadsTakeTurns = 2;  // MPI_SUCCESS, MPI_THREAD_SERIALIZED: the same in both interfaces
constexpr int kMostErrorText = 1024, kMostVersionText = 8192;

Status Unusable(const std::string& what) { return Status::Error(LLMC_ERR_NOT_FOUND, what); }

// Constants of an MPI interface that programs are compiled with: predefined handles and how they are passed.
template <typename Handle>
struct MpiConstants {
  Handle world, byte, errors_return;
  void* no_status;
};

template <typename Handle>
struct MpiFunctions {
  int (*init)(int*, char***, int, int*);
  int (*finalize)();
  int (*rank)(Handle, int*);
  int (*size)(Handle, int*);
  int (*dup)(Handle, Handle*);
  int (*split)(Handle, int, int, Handle*);
  int (*set_errhandler)(Handle, Handle);
  int (*error_string)(int, char*, int*);
  int (*ibcast)(void*, int, Handle, int, Handle, Handle*);
  int (*iallgather)(const void*, int, Handle, void*, int, Handle, Handle, Handle*);
  int (*iallgatherv)(const void*, int, Handle, void*, const int*, const int*, Handle, Handle, Handle*);
  int (*ialltoallv)(const void*, const int*, const int*, Handle, void*, const int*, const int*, Handle, Handle,
                    Handle*);
  int (*ibarrier)(Handle, Handle*);
  int (*isend)(const void*, int, Handle, int, int, Handle, Handle*);
  int (*irecv)(void*, int, Handle, int, int, Handle, Handle*);
  int (*test)(Handle*, int*, void*);
};

// Returns the first name that is missing, or nullptr.
template <typename Handle>
const char* FindMpi(void* library, MpiFunctions<Handle>* out) {
  const char* missing = nullptr;
  const auto find = [&](auto* function, const char* name) {
    *function = reinterpret_cast<std::remove_reference_t<decltype(*function)>>(::dlsym(library, name));
    if (*function == nullptr && missing == nullptr) missing = name;
  };
  find(&out->init, "MPI_Init_thread"), find(&out->finalize, "MPI_Finalize");
  find(&out->rank, "MPI_Comm_rank"), find(&out->size, "MPI_Comm_size"), find(&out->dup, "MPI_Comm_dup");
  find(&out->set_errhandler, "MPI_Comm_set_errhandler"), find(&out->error_string, "MPI_Error_string");
  find(&out->ibcast, "MPI_Ibcast"), find(&out->iallgather, "MPI_Iallgather");
  find(&out->iallgatherv, "MPI_Iallgatherv"), find(&out->ialltoallv, "MPI_Ialltoallv");
  find(&out->ibarrier, "MPI_Ibarrier"), find(&out->test, "MPI_Test");
  find(&out->split, "MPI_Comm_split"), find(&out->isend, "MPI_Isend"), find(&out->irecv, "MPI_Irecv");
  return missing;
}

template <typename Handle>
class MpiOf final : public MpiLibrary {
 public:
  MpiOf(const MpiFunctions<Handle>& functions, const MpiConstants<Handle>& constants)
      : call_(functions), constant_(constants) {}

  Status Begin() {
    static_assert(sizeof(Handle) <= sizeof(MpiRequest::handle), "a request holds a handle");
    int provided = 0, rank = 0, size = 0;
    LLMC_RETURN_IF_ERROR(Checked(call_.init(nullptr, nullptr, kThreadsTakeTurns, &provided)));
    if (provided < kThreadsTakeTurns) {
      return Unusable(
          "This MPI lets one thread alone call it, and llmc has several; build it with --enable-threads, or use "
          "another one.");
    }
    LLMC_RETURN_IF_ERROR(Checked(call_.set_errhandler(constant_.world, constant_.errors_return)));
    LLMC_RETURN_IF_ERROR(Checked(call_.rank(constant_.world, &rank)));
    LLMC_RETURN_IF_ERROR(Checked(call_.size(constant_.world, &size)));
    for (Handle& channel : channels_) {
      LLMC_RETURN_IF_ERROR(Checked(call_.dup(constant_.world, &channel)));
      LLMC_RETURN_IF_ERROR(Checked(call_.set_errhandler(channel, constant_.errors_return)));
    }
    rank_ = static_cast<uint32_t>(rank);
    num_ranks_ = static_cast<uint32_t>(size);
    divided_ = num_ranks_;
    return Status::Ok();
  }

  uint32_t rank() const override { return rank_; }
  uint32_t num_ranks() const override { return num_ranks_; }

  Status Broadcast(MpiChannel channel, void* data, int bytes, MpiRequest* out) override {
    return Start(out,
                 [&](Handle* request) { return call_.ibcast(data, bytes, constant_.byte, 0, Of(channel), request); });
  }
  Status AllGather(MpiChannel channel, const void* from, int bytes, void* to, MpiRequest* out) override {
    return Start(out, [&](Handle* request) {
      return call_.iallgather(from, bytes, constant_.byte, to, bytes, constant_.byte, Of(channel), request);
    });
  }
  Status AllGatherParts(MpiChannel channel, const void* from, void* to, const int* bytes, const int* offsets,
                        MpiRequest* out) override {
    return Start(out, [&](Handle* request) {
      return call_.iallgatherv(from, bytes[rank_ % divided_], constant_.byte, to, bytes, offsets, constant_.byte,
                               Of(channel), request);
    });
  }
  Status AllToAll(MpiChannel channel, const void* from, const int* bytes, const int* offsets, void* to,
                  const int* own_bytes, const int* own_offsets, MpiRequest* out) override {
    return Start(out, [&](Handle* request) {
      return call_.ialltoallv(from, bytes, offsets, constant_.byte, to, own_bytes, own_offsets, constant_.byte,
                              Of(channel), request);
    });
  }
  Status Barrier(MpiChannel channel, MpiRequest* out) override {
    return Start(out, [&](Handle* request) { return call_.ibarrier(Of(channel), request); });
  }
  Status Divide(uint32_t size) override {
    for (const MpiChannel channel : {MpiChannel::kSums, MpiChannel::kOtherSums}) {
      Handle& sums = channels_[static_cast<uint32_t>(channel)];
      const auto stage = static_cast<int>(rank_ / size), place = static_cast<int>(rank_);
      LLMC_RETURN_IF_ERROR(Locked([&] { return call_.split(constant_.world, stage, place, &sums); }));
      LLMC_RETURN_IF_ERROR(Locked([&] { return call_.set_errhandler(sums, constant_.errors_return); }));
    }
    divided_ = size;
    return Status::Ok();
  }
  Status Send(MpiTag tag, const void* data, int bytes, uint32_t to, MpiRequest* out) override {
    return Start(out, [&](Handle* request) {
      return call_.isend(data, bytes, constant_.byte, static_cast<int>(to), static_cast<int>(tag),
                         Of(MpiChannel::kSteps), request);
    });
  }
  Status Receive(MpiTag tag, void* data, int bytes, uint32_t from, MpiRequest* out) override {
    return Start(out, [&](Handle* request) {
      return call_.irecv(data, bytes, constant_.byte, static_cast<int>(from), static_cast<int>(tag),
                         Of(MpiChannel::kSteps), request);
    });
  }
  Status Test(MpiRequest* request, bool* done) override {
    Handle handle;
    std::memcpy(static_cast<void*>(&handle), &request->handle, sizeof(handle));
    int flag = 0;
    const Status status = Locked([&] { return call_.test(&handle, &flag, constant_.no_status); });
    std::memcpy(&request->handle, static_cast<const void*>(&handle), sizeof(handle));
    *done = flag != 0;
    return status;
  }
  void Finish(uint64_t most_ns) override {
    static_cast<void>(
        Locked([&] { return CallWithin(std::chrono::nanoseconds(most_ns), call_.finalize).value_or(kSuccess); }));
  }

 private:
  Handle Of(MpiChannel channel) const { return channels_[static_cast<uint32_t>(channel)]; }

  template <typename Body>
  Status Locked(const Body& body) {
    std::lock_guard<std::mutex> lock(mutex_);
    return Checked(body());
  }
  template <typename Body>
  Status Start(MpiRequest* out, const Body& body) {
    Handle request;
    LLMC_RETURN_IF_ERROR(Locked([&] { return body(&request); }));
    std::memcpy(&out->handle, static_cast<const void*>(&request), sizeof(request));
    return Status::Ok();
  }
  Status Checked(int code) const {
    if (code == kSuccess) return Status::Ok();
    std::array<char, kMostErrorText> text{};
    int length = 0;
    const bool known = call_.error_string(code, text.data(), &length) == kSuccess;
    return Status::Error(LLMC_ERR_INTERNAL, "MPI says: " + std::string(known ? text.data() : "unknown error"));
  }

  MpiFunctions<Handle> call_;
  MpiConstants<Handle> constant_;
  std::array<Handle, kNumMpiChannels> channels_{};
  uint32_t rank_ = 0, num_ranks_ = 0;
  uint32_t divided_ = 1;  // ranks of a channel of sums
  std::mutex mutex_;
};

template <typename Handle>
Status StartAs(const std::string& path, void* library, const MpiConstants<Handle>& constants,
               std::unique_ptr<MpiLibrary>* out) {
  MpiFunctions<Handle> functions{};
  if (const char* missing = FindMpi(library, &functions); missing != nullptr) {
    return Unusable("The library " + path + " is not MPI 3.0: it has no " + missing + "; take a newer MPI.");
  }
  auto mpi = std::make_unique<MpiOf<Handle>>(functions, constants);
  LLMC_RETURN_IF_ERROR(mpi->Begin());
  *out = std::move(mpi);
  return Status::Ok();
}

// First line of the library's version text.
std::string VersionOf(void* library) {
  const auto get = reinterpret_cast<int (*)(char*, int*)>(::dlsym(library, "MPI_Get_library_version"));
  if (get == nullptr) return {};
  std::array<char, kMostVersionText + 1> text{};
  int length = 0;
  if (get(text.data(), &length) != kSuccess) return {};
  const std::string all = text.data();
  return all.substr(0, all.find('\n'));
}

}  // namespace

Status MpiLibrary::Start(const std::string& path, std::unique_ptr<MpiLibrary>* out) {
  static std::atomic<bool> started{false};
  // RTLD_GLOBAL: components that Open MPI loads by itself look up its symbols globally.
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    const char* why = ::dlerror();
    return Unusable(std::string("MPI cannot be loaded (") + (why != nullptr ? why : "unknown error") +
                    "); name the library that belongs to this mpirun with LLMC_MPI_LIBRARY.");
  }
  const auto initialized = reinterpret_cast<int (*)(int*)>(::dlsym(library, "MPI_Initialized"));
  int running = 0;
  if (started.exchange(true) || (initialized != nullptr && initialized(&running) == kSuccess && running != 0)) {
    return Status::Error(LLMC_ERR_INVALID_ARGUMENT,
                         "MPI runs in this process already, and starts once; open one engine of several ranks in a "
                         "process, and leave MPI to it.");
  }
  if (void* world = ::dlsym(library, "ompi_mpi_comm_world"); world != nullptr) {
    const MpiConstants<void*> constants = {world, ::dlsym(library, "ompi_mpi_byte"),
                                           ::dlsym(library, "ompi_mpi_errors_return"), nullptr};
    return StartAs(path, library, constants, out);
  }
  const std::string version = VersionOf(library);
  for (const char* known : {"MPICH", "Intel(R) MPI", "MVAPICH", "CRAY MPICH"}) {
    if (version.find(known) == std::string::npos) continue;
    // Values of mpi.h, the same in all libraries with MPICH's interface.
    const MpiConstants<int> constants = {0x44000000, 0x4c00010d, 0x54000001,
                                         reinterpret_cast<void*>(uintptr_t{1})};  // NOLINT(performance-no-int-to-ptr)
    return StartAs(path, library, constants, out);
  }
  return Unusable("The library " + path + " is '" + version +
                  "', whose binary interface llmc does not know; take MPICH, Intel MPI or Open MPI, and name it with "
                  "LLMC_MPI_LIBRARY.");
}

}  // namespace llmc
