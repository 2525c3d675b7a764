#include "device/cuda/cu_code.h"

#include <algorithm>
#include <cstring>

namespace llmc {
namespace {

constexpr char kCuMagic[8] = {'L', 'L', 'M', 'C', 'C', 'U', 'D', 'A'};
constexpr uint32_t kCuCodeVersion = 1;
constexpr uint64_t kImageAlignment = 64;
constexpr uint32_t kAwaitsFlag = 1;

struct CuFileHeader {
  char magic[8];
  uint32_t version, num_kernels, num_images, flags;
  uint64_t bytes;
};
struct CuFileImage {
  uint32_t kernel, kind, capability, exact;
  uint64_t offset, bytes;
};
static_assert(sizeof(CuFileHeader) == 32 && sizeof(CuFileImage) == 32, "records have the sizes of FORMAT.md");

// Capabilities of Tegra. Their machine code runs on no other GPU, and they run no other one's.
bool IsEmbedded(uint32_t capability) { return capability == 87 || capability == 101; }

// Architectures that `llmc compile` has targets for.
constexpr uint32_t kNamed[] = {80, 86, 87, 89, 90, 100, 103, 120};

}  // namespace

bool CuImage::RunsOn(uint32_t device) const {
  if (exact || device == capability) return device == capability;
  if (device < capability) return false;
  if (kind == kPtx) return true;
  return device / 10 == capability / 10 && !IsEmbedded(device) && !IsEmbedded(capability);
}

uint32_t CuCode::NamedFor(uint32_t device) {
  uint32_t best = 0;
  for (const uint32_t named : kNamed) {
    if (named == device || (named < device && !IsEmbedded(named))) best = named;
  }
  return best;
}

std::string CuImage::Name() const {
  return (kind == kPtx ? "compute_" : "sm_") + std::to_string(capability) + (exact ? "a" : "");
}

CuCode CuCode::Read(const unsigned char* data, size_t bytes, uint32_t num_kernels, std::string* wrong) {
  CuCode code;
  CuFileHeader header;
  if (bytes < sizeof(header)) return *wrong = "it has no header", code;
  std::memcpy(&header, data, sizeof(header));
  if (std::memcmp(header.magic, kCuMagic, sizeof(kCuMagic)) != 0) return *wrong = "it is not a file of CUDA code", code;
  if (header.version != kCuCodeVersion) {
    return *wrong = "it is of version " + std::to_string(header.version) + " and this runtime reads version " +
                    std::to_string(kCuCodeVersion),
           code;
  }
  if (header.bytes != bytes) return *wrong = "it is not as long as it says", code;
  if (header.num_kernels != num_kernels) {
    return *wrong =
               "it has " + std::to_string(header.num_kernels) + " kernels in place of " + std::to_string(num_kernels),
           code;
  }
  if (header.num_images > (bytes - sizeof(header)) / sizeof(CuFileImage)) return *wrong = "its table is cut off", code;
  code.awaits_ = (header.flags & kAwaitsFlag) != 0;
  const uint64_t begin = sizeof(header) + uint64_t{header.num_images} * sizeof(CuFileImage);
  for (uint32_t i = 0; i < header.num_images; ++i) {
    CuFileImage image;
    std::memcpy(&image, data + sizeof(header) + i * sizeof(image), sizeof(image));
    const bool inside = image.offset >= begin && image.offset % kImageAlignment == 0 && image.offset <= bytes &&
                        image.bytes > 0 && image.bytes <= bytes - image.offset;
    if (!inside || image.kernel >= num_kernels || image.kind > CuImage::kPtx || image.exact > 1) {
      return *wrong = "image " + std::to_string(i) + " is outside of it", code;
    }
    // A driver reads text up to its end.
    if (image.kind == CuImage::kPtx && data[image.offset + image.bytes - 1] != 0) {
      return *wrong = "the text of image " + std::to_string(i) + " has no end", code;
    }
    code.images_.push_back({image.kernel, static_cast<CuImage::Kind>(image.kind), image.capability, image.exact == 1,
                            data + image.offset, image.bytes});
  }
  return code;
}

const CuImage* CuCode::Choose(uint32_t kernel, uint32_t device) const {
  const CuImage* best = nullptr;
  const auto better = [](const CuImage& a, const CuImage& b) {
    if (a.kind != b.kind) return a.kind == CuImage::kCubin;
    return a.capability != b.capability ? a.capability > b.capability : a.exact && !b.exact;
  };
  for (const CuImage& image : images_) {
    if (image.kernel != kernel || !image.RunsOn(device)) continue;
    if (best == nullptr || better(image, *best)) best = &image;
  }
  return best;
}

std::string CuCode::Architectures(uint32_t kernel) const {
  std::vector<std::string> names;
  for (const CuImage& image : images_) {
    if (image.kernel != kernel) continue;
    if (std::find(names.begin(), names.end(), image.Name()) == names.end()) names.push_back(image.Name());
  }
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text.empty() ? "nothing" : text;
}

}  // namespace llmc
