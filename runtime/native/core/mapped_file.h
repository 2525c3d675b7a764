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
  // Gives up the mapping's pages of [begin, end), as far as they are whole; the page cache keeps them, and reading them
  // maps them anew.
  void Drop(uint64_t begin, uint64_t end) const;
  // Copies [offset, offset + bytes) from the file. Unlike the mapping, what the disk cannot deliver or what was cut off
  // since is an error here and no signal. Any thread.
  Status Read(uint64_t offset, uint64_t bytes, unsigned char* out) const;

  // A path that opens this very file, also when another has taken its place; as long as this object lives.
  std::string PathToOpen() const;

  const unsigned char* data() const { return data_; }
  uint64_t size() const { return size_; }

 private:
  std::string path_;
  int fd_ = -1;
  unsigned char* data_ = nullptr;
  uint64_t size_ = 0;
};

// Zeroed private pages. Regions of at least 2 MiB are 2 MiB aligned and ask for huge pages.
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

// Takes the pages of [from, to) from the system, now; what lies there stays.
void TouchPages(char* from, const char* to);

}  // namespace llmc
