// Code files of devices of kind cuda: the right image is chosen, and what is damaged is said.
#include "device/cuda/cu_code.h"

#include <cstring>
#include <string>
#include <vector>

#include "support/check.h"

using llmc::CuCode;
using llmc::CuImage;

namespace {

using File = std::vector<unsigned char>;

void Put32(File* file, size_t at, uint32_t value) { std::memcpy(file->data() + at, &value, 4); }
void Put64(File* file, size_t at, uint64_t value) { std::memcpy(file->data() + at, &value, 8); }

// Images of one kernel, each of 64 bytes that end with a NUL.
File Make(const std::vector<CuImage>& images) {
  const size_t begin = (32 + 32 * images.size() + 63) / 64 * 64;
  File file(begin + 64 * images.size());
  std::memcpy(file.data(), "LLMCCUDA", 8);
  Put32(&file, 8, 1), Put32(&file, 12, 1), Put32(&file, 16, static_cast<uint32_t>(images.size()));
  Put64(&file, 24, file.size());
  for (size_t i = 0; i < images.size(); ++i) {
    const size_t at = 32 + 32 * i;
    Put32(&file, at, images[i].kernel), Put32(&file, at + 4, images[i].kind);
    Put32(&file, at + 8, images[i].capability), Put32(&file, at + 12, images[i].exact ? 1 : 0);
    Put64(&file, at + 16, begin + 64 * i), Put64(&file, at + 24, 64);
  }
  return file;
}

const std::vector<CuImage> kImages = {{0, CuImage::kCubin, 80, false, nullptr, 0},
                                      {0, CuImage::kCubin, 86, false, nullptr, 0},
                                      {0, CuImage::kCubin, 90, true, nullptr, 0},
                                      {0, CuImage::kPtx, 80, false, nullptr, 0}};

std::string Wrong(const File& file, uint32_t num_kernels = 1) {
  std::string wrong;
  CuCode::Read(file.data(), file.size(), num_kernels, &wrong);
  return wrong;
}

void TestChoice() {
  const File file = Make(kImages);
  std::string wrong;
  const CuCode code = CuCode::Read(file.data(), file.size(), 1, &wrong);
  CHECK_EQ(wrong, "");
  const auto chosen = [&](uint32_t capability) {
    const CuImage* image = code.Choose(0, capability);
    return image == nullptr ? std::string("none") : image->Name();
  };
  CHECK_EQ(chosen(75), "none");
  CHECK_EQ(chosen(80), "sm_80");
  CHECK_EQ(chosen(86), "sm_86");
  CHECK_EQ(chosen(89), "sm_86");
  CHECK_EQ(chosen(90), "sm_90a");
  CHECK_EQ(chosen(100), "compute_80");
  CHECK_EQ(chosen(120), "compute_80");
  CHECK(code.Choose(1, 80) == nullptr);
  CHECK_EQ(code.Architectures(0), "sm_80, sm_86, sm_90a, compute_80");
  CHECK_EQ(code.Architectures(1), "nothing");
}

void TestTegra() {
  const auto runs = [](CuImage::Kind kind, uint32_t capability, uint32_t device) {
    return CuImage{0, kind, capability, false, nullptr, 0}.RunsOn(device);
  };
  CHECK(!runs(CuImage::kCubin, 80, 87));
  CHECK(!runs(CuImage::kCubin, 87, 89));
  CHECK(!runs(CuImage::kCubin, 100, 101));
  CHECK(runs(CuImage::kCubin, 87, 87));
  CHECK(runs(CuImage::kPtx, 80, 87));
  CHECK(runs(CuImage::kPtx, 87, 89));
  CHECK(runs(CuImage::kCubin, 120, 121));
}

void TestNames() {
  CHECK_EQ(CuCode::NamedFor(75), 0u);
  CHECK_EQ(CuCode::NamedFor(80), 80u);
  CHECK_EQ(CuCode::NamedFor(87), 87u);
  CHECK_EQ(CuCode::NamedFor(88), 86u);  // not Tegra's
  CHECK_EQ(CuCode::NamedFor(110), 103u);
  CHECK_EQ(CuCode::NamedFor(121), 120u);
}

void TestWaiting() {
  File file = Make(kImages);
  for (const uint32_t flags : {0u, 1u, 2u, 3u}) {
    Put32(&file, 20, flags);
    std::string wrong;
    const CuCode code = CuCode::Read(file.data(), file.size(), 1, &wrong);
    CHECK_EQ(wrong, "");
    CHECK(code.Awaits(*code.Choose(0, 90)) == ((flags & 1) != 0));
    CHECK(!code.Awaits(*code.Choose(0, 89)));
    CHECK(!code.Awaits(*code.Choose(0, 100)));  // PTX for 80
  }
}

void TestDamage() {
  const File good = Make(kImages);
  CHECK_EQ(Wrong(File(good.begin(), good.begin() + 31)), "it has no header");
  CHECK_EQ(Wrong(File(good.begin(), good.end() - 1)), "it is not as long as it says");
  CHECK_EQ(Wrong(good, 2), "it has 1 kernels in place of 2");
  const auto with = [&](size_t at, uint32_t value) {
    File file = good;
    Put32(&file, at, value);
    return Wrong(file);
  };
  CHECK_EQ(with(0, 0), "it is not a file of CUDA code");
  CHECK_EQ(with(8, 2), "it is of version 2 and this runtime reads version 1");
  CHECK_EQ(with(16, 1000), "its table is cut off");
  const std::string outside = "image 0 is outside of it";
  CHECK_EQ(with(32, 1), outside);               // kernel
  CHECK_EQ(with(36, 2), outside);               // kind
  CHECK_EQ(with(44, 2), outside);               // exact
  CHECK_EQ(with(48, 1), outside);               // offset: in the middle of a line
  CHECK_EQ(with(48, 64), outside);              // in the table
  CHECK_EQ(with(52, 1), outside);               // behind the end
  CHECK_EQ(with(56, 0), outside);               // bytes
  CHECK_EQ(with(60, 0xffffffff), outside);      // so many that a sum would begin anew
  File endless = good;
  endless.back() = 'x';
  CHECK_EQ(Wrong(endless), "the text of image 3 has no end");
  // No byte of header and table makes it read beyond the file.
  for (size_t at = 0; at < 32 + 32 * kImages.size(); ++at) {
    for (const unsigned char value : {0, 1, 127, 255}) {
      File file = good;
      file[at] = value;
      std::string wrong;
      const CuCode code = CuCode::Read(file.data(), file.size(), 1, &wrong);
      for (const uint32_t capability : {0u, 80u, 90u, 4000000000u}) {
        const CuImage* image = wrong.empty() ? code.Choose(0, capability) : nullptr;
        CHECK(image == nullptr ||
              (image->data >= file.data() && image->data + image->bytes <= file.data() + file.size()));
      }
    }
  }
}

}  // namespace

int main() {
  TestChoice();
  TestTegra();
  TestNames();
  TestWaiting();
  TestDamage();
  return llmc_test::Finish("cu_code_test");
}
