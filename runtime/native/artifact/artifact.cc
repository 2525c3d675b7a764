#include "artifact/artifact.h"

#include <sys/stat.h>

#include <cstddef>
#include <cstring>
#include <string>
#include <utility>

#include "artifact/check_text.h"
#include "core/crc32.h"

namespace llmc {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "graphs.bin is little endian");

struct Header {
  char magic[8];
  uint32_t version, header_bytes;
  uint64_t file_bytes;
  uint32_t num_sections, crc32;
  uint64_t weights_bytes;
  uint32_t weights_header_crc32, reserved[5];
};
struct Section {
  uint32_t kind, record_bytes;
  uint64_t offset, count;
};
static_assert(sizeof(Header) == 64 && sizeof(Section) == 24, "sizes of FORMAT.md");

constexpr uint32_t kVersion = 13;
constexpr uint32_t kFirstVersion = 5;
constexpr uint32_t kVersionOfStateBlocks = 11;
constexpr uint32_t kNumKinds = 14;
constexpr uint32_t kAdapterKind = 10, kCollectiveKind = 11, kStageKind = 12, kKvLayerKind = 13;
constexpr uint32_t kStateLayerKind = 14;
constexpr uint32_t kMaxSections = 1024;
constexpr struct {
  const char* name;
  uint32_t record_bytes;
  uint32_t first_version = kFirstVersion;  // first format version with such a section
} kSections[kNumKinds + 1] = {
    {"", 0},
    {"strings", 1},
    {"model", sizeof(ModelRecord)},
    {"kernels", sizeof(KernelRecord)},
    {"weights", sizeof(WeightRecord)},
    {"graphs", sizeof(GraphRecord)},
    {"commands", sizeof(CommandRecord)},
    {"operands", sizeof(OperandRecord)},
    {"targets", sizeof(TargetRecord)},
    {"codes", sizeof(CodeRecord)},
    {"adapters", sizeof(AdapterRecord), 6},
    {"collectives", sizeof(CollectiveRecord), 7},
    {"stages", sizeof(StageRecord), 9},
    {"kv_layers", sizeof(KvLayerRecord), 10},
    {"state_layers", sizeof(StateLayerRecord), 12},
};

// CRC-32 of the whole file except the field itself.
uint32_t TablesCrc32(const MappedFile& file) {
  constexpr uint64_t kBefore = offsetof(Header, crc32), kAfter = kBefore + sizeof(uint32_t);
  return Crc32(file.data() + kAfter, file.size() - kAfter, Crc32(file.data(), kBefore));
}

template <class T>
std::vector<T> ReadSection(const unsigned char* data, const Section& section) {
  std::vector<T> records(section.count);
  if (section.count) std::memcpy(records.data(), data + section.offset, section.count * sizeof(T));
  return records;
}

}  // namespace

uint64_t InputTouchedBytes(const GraphRecord& graph, uint32_t index) {
  uint64_t elements = 0;
  switch (index) {
    case kInputIds:
    case kPositions:
    case kSlotMapping:
    case kTokenSeq: elements = graph.max_tokens; break;
    case kBlockTables:
      elements = graph.max_blocks != 0 ? graph.max_blocks : uint64_t{graph.max_seqs} * graph.max_blocks_per_seq;
      break;
    case kContextLens: elements = graph.max_seqs; break;
    case kQueryStart: elements = uint64_t{graph.max_seqs} + 1; break;
    case kSampleIndex: elements = graph.max_samples; break;
    case kAdapterTiles: elements = 1 + uint64_t{kTileRecord} * graph.max_tokens; break;
    case kStateSlots: elements = uint64_t{kStateFields} * graph.max_seqs; break;
    case kRopePositions: elements = uint64_t{kRopeAxes} * graph.max_tokens; break;
    default: break;
  }
  return elements * sizeof(int32_t);
}

uint64_t InputBytes(const GraphRecord& graph, uint32_t index) {
  return RoundUp(InputTouchedBytes(graph, index), kAlignment);
}

Status Artifact::Corrupt(const std::string& file, const std::string& what) const {
  return Status::Error(LLMC_ERR_CORRUPT,
                       "'" + directory_ + "/" + file + "' is damaged: " + what + "; compile the artifact again");
}

Status Artifact::Open(const std::string& directory, std::shared_ptr<const Artifact>* out) {
  struct stat info;
  if (::stat(directory.c_str(), &info) != 0) {
    return Status::Error(LLMC_ERR_NOT_FOUND, "there is no artifact at '" + directory + "'; check the path");
  }
  if (!S_ISDIR(info.st_mode)) {
    return Status::Error(LLMC_ERR_INVALID_ARGUMENT,
                         "'" + directory + "' is not a directory; pass the directory that the compiler wrote");
  }
  auto artifact = std::make_shared<Artifact>();
  artifact->directory_ = directory;
  {
    MappedFile tables;
    Status status = MappedFile::Open(directory + "/graphs.bin", &tables);
    if (status.code == LLMC_ERR_NOT_FOUND) {
      return Status::Error(LLMC_ERR_NOT_FOUND, "'" + directory +
                                                   "' is not an artifact: it has no graphs.bin; pass the directory "
                                                   "that the compiler wrote, or compile again");
    }
    LLMC_RETURN_IF_ERROR(status);
    LLMC_RETURN_IF_ERROR(artifact->ReadTables(tables));
  }
  LLMC_RETURN_IF_ERROR(artifact->CheckTarget());
  LLMC_RETURN_IF_ERROR(artifact->CheckModel());
  LLMC_RETURN_IF_ERROR(artifact->CheckStages());
  LLMC_RETURN_IF_ERROR(artifact->CheckStateLayers());
  LLMC_RETURN_IF_ERROR(artifact->CheckKvLayers());
  LLMC_RETURN_IF_ERROR(artifact->CheckCode());
  LLMC_RETURN_IF_ERROR(artifact->CheckKernels());
  LLMC_RETURN_IF_ERROR(MappedFile::Open(directory + "/weights.safetensors", &artifact->weight_file_));
  LLMC_RETURN_IF_ERROR(artifact->CheckWeights());
  LLMC_RETURN_IF_ERROR(artifact->CheckAdapters());
  LLMC_RETURN_IF_ERROR(artifact->CheckRanks());
  LLMC_RETURN_IF_ERROR(artifact->CheckGraphs());
  artifact->shape_.kv_dtype = artifact->model_.kv_dtype;
  artifact->shape_.kv_identity = artifact->KvIdentity();
  // A stage may be all that a host has memory for.
  if (artifact->num_stages() == 1) artifact->weight_file_.Prefetch();
  *out = std::move(artifact);
  return Status::Ok();
}

Status Artifact::ReadTables(const MappedFile& file) {
  const unsigned char* data = file.data();
  Header header;
  if (file.size() < sizeof(header)) return Corrupt("graphs.bin", "it has only " + Str(file.size()) + " bytes");
  std::memcpy(&header, data, sizeof(header));
  if (std::memcmp(header.magic, "LLMCGRPH", 8) != 0) return Corrupt("graphs.bin", "it does not start with LLMCGRPH");
  if (header.version < kFirstVersion || header.version > kVersion) {
    return Status::Error(LLMC_ERR_VERSION, "the artifact '" + directory_ + "' has format version " +
                                               Str(header.version) + " and this runtime reads versions " +
                                               Str(kFirstVersion) + " to " + Str(kVersion) +
                                               "; compile it again with this version of llmc");
  }
  if (header.version == kVersionOfStateBlocks) {
    return Status::Error(LLMC_ERR_VERSION, "the artifact '" + directory_ +
                                               "' has format version 11, of an older llmc that kept the states of "
                                               "layers in KV blocks; compile it again with this version of llmc");
  }
  if (header.header_bytes != sizeof(header)) {
    return Corrupt("graphs.bin", "its header claims " + Str(header.header_bytes) + " bytes, not 64");
  }
  if (header.file_bytes != file.size()) {
    return Corrupt("graphs.bin",
                   "its header claims " + Str(header.file_bytes) + " bytes and the file has " + Str(file.size()));
  }
  const uint32_t crc = TablesCrc32(file);
  if (crc != header.crc32) return Corrupt("graphs.bin", "its CRC-32 is " + Hex(crc) + ", not " + Hex(header.crc32));
  version_ = header.version;
  tables_crc32_ = crc;
  weights_bytes_ = header.weights_bytes;
  weights_header_crc32_ = header.weights_header_crc32;
  if (header.num_sections > kMaxSections ||
      !InRange(sizeof(header), uint64_t{header.num_sections} * sizeof(Section), file.size())) {
    return Corrupt("graphs.bin", "it claims " + Str(header.num_sections) + " sections");
  }
  Section known[kNumKinds + 1] = {};
  for (uint32_t i = 0; i < header.num_sections; ++i) {
    Section section;
    std::memcpy(&section, data + sizeof(header) + i * sizeof(section), sizeof(section));
    uint64_t bytes = 0;
    if (__builtin_mul_overflow(uint64_t{section.record_bytes}, section.count, &bytes) ||
        !InRange(section.offset, bytes, file.size()) || section.offset % 8 != 0) {
      return Corrupt("graphs.bin", "section " + Str(i) + " has " + Str(section.count) + " records of " +
                                       Str(section.record_bytes) + " bytes at offset " + Str(section.offset) +
                                       ", outside the file's " + Str(file.size()) + " bytes or not 8-byte aligned");
    }
    if (section.kind < 1 || section.kind > kNumKinds) continue;
    const std::string name = kSections[section.kind].name;
    if (known[section.kind].kind) return Corrupt("graphs.bin", "it has two sections of " + name);
    if (section.record_bytes != kSections[section.kind].record_bytes) {
      return Corrupt("graphs.bin", "the records of section " + name + " have " + Str(section.record_bytes) +
                                       " bytes, not " + Str(kSections[section.kind].record_bytes));
    }
    if (section.count > UINT32_MAX) {
      return Corrupt("graphs.bin", "section " + name + " has " + Str(section.count) + " records");
    }
    known[section.kind] = section;
  }
  for (uint32_t kind = 1; kind <= kNumKinds; ++kind) {
    if (header.version < kSections[kind].first_version) {
      if (known[kind].kind) {
        return Corrupt("graphs.bin", std::string("it has a section of ") + kSections[kind].name + ", which version " +
                                         Str(header.version) + " has not");
      }
    } else if (!known[kind].kind) {
      return Corrupt("graphs.bin", std::string("it has no section of ") + kSections[kind].name);
    }
  }
  if (known[2].count != 1) return Corrupt("graphs.bin", "it has " + Str(known[2].count) + " model records, not 1");
  if (known[8].count != 1) return Corrupt("graphs.bin", "it has " + Str(known[8].count) + " target records, not 1");
  strings_.assign(reinterpret_cast<const char*>(data + known[1].offset), known[1].count);
  model_ = ReadSection<ModelRecord>(data, known[2])[0];
  kernels_ = ReadSection<KernelRecord>(data, known[3]);
  weights_ = ReadSection<WeightRecord>(data, known[4]);
  graphs_ = ReadSection<GraphRecord>(data, known[5]);
  commands_ = ReadSection<CommandRecord>(data, known[6]);
  operands_ = ReadSection<OperandRecord>(data, known[7]);
  target_record_ = ReadSection<TargetRecord>(data, known[8])[0];
  code_ = ReadSection<CodeRecord>(data, known[9]);
  adapters_ = ReadSection<AdapterRecord>(data, known[kAdapterKind]);
  collectives_ = ReadSection<CollectiveRecord>(data, known[kCollectiveKind]);
  stages_ = ReadSection<StageRecord>(data, known[kStageKind]);
  kv_layers_ = ReadSection<KvLayerRecord>(data, known[kKvLayerKind]);
  state_layers_ = ReadSection<StateLayerRecord>(data, known[kStateLayerKind]);
  return Status::Ok();
}

uint64_t Artifact::code_bytes() const {
  uint64_t bytes = 0;
  for (const CodeRecord& code : code_) bytes += code.bytes;
  return bytes;
}

}  // namespace llmc
