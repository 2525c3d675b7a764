#include "core/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace llmc {
namespace {

constexpr uint64_t kHugePage = 2u << 20;

bool TooManyOpen(int error) { return error == EMFILE || error == ENFILE; }

Status CannotOpen(const std::string& path, int error) {
  const bool missing = error == ENOENT || error == ENOTDIR;
  return Status::Error(missing ? LLMC_ERR_NOT_FOUND : LLMC_ERR_IO,
                       "cannot open '" + path + "': " + std::strerror(error) +
                           (TooManyOpen(error) ? "; raise the limit of open files (ulimit -n)"
                                               : "; check the path and the permissions"));
}

}  // namespace

MappedFile::MappedFile(MappedFile&& other) noexcept { *this = std::move(other); }

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(fd_, other.fd_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_) ::munmap(data_, size_);
  if (fd_ >= 0) ::close(fd_);
}

Status MappedFile::Open(const std::string& path, MappedFile* out) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // O_NONBLOCK: opening a FIFO must not block
  if (fd < 0) return CannotOpen(path, errno);
  MappedFile file;
  file.path_ = path;
  file.fd_ = fd;
  struct stat info;
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    return Status::Error(LLMC_ERR_IO, "'" + path + "' is not a regular file; compile the artifact again");
  }
  file.size_ = static_cast<uint64_t>(info.st_size);
  if (file.size_ > 0) {
    void* data = ::mmap(nullptr, file.size_, PROT_READ, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED) {
      const int error = errno;
      return Status::Error(error == ENOMEM ? LLMC_ERR_OUT_OF_MEMORY : LLMC_ERR_IO,
                           "cannot map '" + path + "' (" + std::to_string(file.size_) +
                               " bytes): " + std::strerror(error) + "; check the file system and memory limits");
    }
    file.data_ = static_cast<unsigned char*>(data);
  }
  *out = std::move(file);
  return Status::Ok();
}

Status MappedFile::Read(uint64_t offset, uint64_t bytes, unsigned char* out) const {
  while (bytes > 0) {
    const ssize_t count = ::pread(fd_, out, bytes, static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      return Status::Error(LLMC_ERR_IO, "cannot read '" + path_ + "' at byte " + std::to_string(offset) + ": " +
                                            (count < 0 ? std::strerror(errno) : "the file ends before it") +
                                            "; check the disk and compile the artifact again");
    }
    offset += static_cast<uint64_t>(count);
    bytes -= static_cast<uint64_t>(count);
    out += count;
  }
  return Status::Ok();
}

Status MappedFile::CheckLoadable() const {
  const int fd = ::open(PathToOpen().c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return CannotOpen(path_, errno);
  void* code = ::mmap(nullptr, size_, PROT_READ | PROT_EXEC, MAP_PRIVATE, fd, 0);
  const int error = code == MAP_FAILED ? errno : 0;
  if (error == 0) ::munmap(code, size_);
  ::close(fd);
  if (error == 0) return Status::Ok();
  const std::string what = "cannot map '" + path_ + "' as code: " + std::strerror(error);
  if (error == ENOMEM) return Status::Error(LLMC_ERR_OUT_OF_MEMORY, what + "; free memory, or raise the limit of it");
  return Status::Error(LLMC_ERR_IO, what + "; move the artifact to a file system that is not mounted noexec");
}

// The file's own path where it still names the file: debuggers and profilers know it by that.
std::string MappedFile::PathToOpen() const {
  struct stat there, here;
  const bool same = ::stat(path_.c_str(), &there) == 0 && ::fstat(fd_, &here) == 0 && there.st_dev == here.st_dev &&
                    there.st_ino == here.st_ino;
  return same ? path_ : "/proc/self/fd/" + std::to_string(fd_);
}

void MappedFile::Prefetch() const {
  if (data_) ::madvise(data_, size_, MADV_WILLNEED);
}

void MappedFile::Drop(uint64_t begin, uint64_t end) const {
  const uint64_t page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  begin = (begin + page - 1) / page * page;
  if (end != size_) end = end / page * page;
  if (begin < end) ::madvise(data_ + begin, end - begin, MADV_DONTNEED);
}

Pages::Pages(Pages&& other) noexcept { *this = std::move(other); }

Pages& Pages::operator=(Pages&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(mapped_, other.mapped_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

Pages::~Pages() {
  if (base_) ::munmap(base_, mapped_);
}

Status Pages::Allocate(uint64_t bytes, const char* what, Pages* out) {
  Pages pages;
  pages.size_ = bytes ? bytes : 1;
  const bool huge = pages.size_ >= kHugePage;
  pages.mapped_ = pages.size_;
  const bool overflow = huge && __builtin_add_overflow(pages.size_, kHugePage, &pages.mapped_);
  void* base = overflow ? MAP_FAILED
                        : ::mmap(nullptr, pages.mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) {
    pages.mapped_ = 0;
    return Status::Error(LLMC_ERR_OUT_OF_MEMORY, std::string("cannot allocate ") + std::to_string(bytes) +
                                                     " bytes for the " + what +
                                                     "; free memory, or lower kv_bytes or num_blocks");
  }
  pages.base_ = base;
  const uint64_t past = reinterpret_cast<uintptr_t>(base) % kHugePage;  // distance behind a boundary of huge pages
  pages.data_ = static_cast<char*>(base) + (huge && past != 0 ? kHugePage - past : 0);
  if (huge) ::madvise(pages.data_, pages.size_ / kHugePage * kHugePage, MADV_HUGEPAGE);
  *out = std::move(pages);
  return Status::Ok();
}

void TouchPages(char* from, const char* to) {
  constexpr uint64_t kPageBytes = 4096;
  for (; from < to; from += kPageBytes) {
    volatile char* byte = from;
    *byte = *byte;
  }
}

}  // namespace llmc
