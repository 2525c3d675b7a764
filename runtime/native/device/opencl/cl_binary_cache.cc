#include "device/opencl/cl_binary_cache.h"

#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>

#include "core/crc32.h"
#include "core/mapped_file.h"

namespace llmc {
namespace {

constexpr char kMagic[8] = {'L', 'L', 'M', 'C', 'C', 'L', 'B', '1'};

struct Header {
  char magic[8];
  uint32_t key_bytes, crc32;
  uint64_t binary_bytes;
};
static_assert(sizeof(Header) == 24, "a file of the cache begins with 24 bytes");

uint32_t Sum(const std::string& key, const unsigned char* binary, size_t bytes) {
  return Crc32(binary, bytes, Crc32(key.data(), key.size()));
}

void MakeFolders(const std::string& folder) {
  for (size_t end = folder.find('/', 1); end != std::string::npos; end = folder.find('/', end + 1)) {
    ::mkdir(folder.substr(0, end).c_str(), 0777);
  }
  ::mkdir(folder.c_str(), 0777);
}

}  // namespace

uint64_t HashOf(const char* data, size_t bytes) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (size_t i = 0; i < bytes; ++i) hash = (hash ^ static_cast<unsigned char>(data[i])) * 0x100000001b3u;
  return hash;
}

// The name is a hash of the key. The file holds the whole key: two keys with one name only replace each other.
std::string ClBinaryCache::PathOf(const std::string& key) const {
  char name[32];
  std::snprintf(name, sizeof(name), "/%016llx.clbin", static_cast<unsigned long long>(HashOf(key.data(), key.size())));
  return folder_ + name;
}

std::vector<unsigned char> ClBinaryCache::Read(const std::string& key) const {
  MappedFile file;
  Header header;
  if (folder_.empty() || !MappedFile::Open(PathOf(key), &file).ok() || file.size() < sizeof(header)) return {};
  std::memcpy(&header, file.data(), sizeof(header));
  const unsigned char* binary = file.data() + sizeof(header) + header.key_bytes;
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0 || header.key_bytes != key.size() ||
      file.size() < sizeof(header) + key.size() || file.size() - sizeof(header) - key.size() != header.binary_bytes ||
      std::memcmp(file.data() + sizeof(header), key.data(), key.size()) != 0 ||
      Sum(key, binary, header.binary_bytes) != header.crc32) {
    return {};
  }
  return {binary, binary + header.binary_bytes};
}

void ClBinaryCache::Write(const std::string& key, const std::vector<unsigned char>& binary) const {
  if (folder_.empty() || binary.empty()) return;
  static std::atomic<uint32_t> counter{0};
  MakeFolders(folder_);
  const std::string path = PathOf(key);
  const std::string part = path + "." + std::to_string(::getpid()) + "." + std::to_string(counter.fetch_add(1));
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.key_bytes = static_cast<uint32_t>(key.size());
  header.crc32 = Sum(key, binary.data(), binary.size());
  header.binary_bytes = binary.size();
  std::FILE* file = std::fopen(part.c_str(), "wb");
  if (file == nullptr) return;
  bool whole = std::fwrite(&header, sizeof(header), 1, file) == 1 &&
               std::fwrite(key.data(), 1, key.size(), file) == key.size() &&
               std::fwrite(binary.data(), 1, binary.size(), file) == binary.size();
  whole = std::fclose(file) == 0 && whole;
  if (!whole || std::rename(part.c_str(), path.c_str()) != 0) ::unlink(part.c_str());
}

}  // namespace llmc
