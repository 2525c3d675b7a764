// Owners of mapped memory: a read-only file and zeroed anonymous pages.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "core/status.h"

namespace llmc {

// A file mapped read-only, and its open descriptor. Empty files map to nothing (data() is null).
class MappedFile {
 public:
  MappedFile() = default;
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  static Status Open(const std::string& path, MappedFile* out);
  // Asks the kernel to read the file ahead; advice only.
  void Prefetch() const;
  // Drops the mapping's whole pages within [begin, end). The page cache keeps them, and reading maps them again.
  void Drop(uint64_t begin, uint64_t end) const;
  // Copies [offset, offset + bytes) from the file. A read error or a truncated file is an error here, whereas in the
  // mapping it is a signal. Any thread.
  Status Read(uint64_t offset, uint64_t bytes, unsigned char* out) const;

  // Whether the system lets this process open the file once more and map it as code. The dynamic loader needs both, and
  // its own words do not always tell which one failed.
  Status CheckLoadable() const;
  // A path that opens this very file, even if another file has replaced it; valid as long as this object.
  std::string PathToOpen() const;

  const unsigned char* data() const { return data_; }
  uint64_t size() const { return size_; }

 private:
  std::string path_;
  int fd_ = -1;
  unsigned char* data_ = nullptr;
  uint64_t size_ = 0;
};

// Zeroed private pages. Regions of at least 2 MiB are aligned to 2 MiB and request huge pages.
class Pages {
 public:
  Pages() = default;
  Pages(Pages&& other) noexcept;
  Pages& operator=(Pages&& other) noexcept;
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  ~Pages();

  // `what` names the memory in the error.
  static Status Allocate(uint64_t bytes, const char* what, Pages* out);

  char* data() const { return data_; }
  uint64_t size() const { return size_; }

 private:
  void* base_ = nullptr;
  uint64_t mapped_ = 0;
  char* data_ = nullptr;
  uint64_t size_ = 0;
};

// Allocates the pages of [from, to) now; their contents stay.
void TouchPages(char* from, const char* to);

}  // namespace llmc
