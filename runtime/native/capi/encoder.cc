// llmc_encoder_* of llmc.h.
#include "engine/encoder.h"

#include <memory>

#include "artifact/artifact.h"
#include "capi/c_device.h"
#include "core/c_struct.h"
#include "core/error.h"
#include "core/made_here.h"

struct llmc_encoder {
  std::unique_ptr<llmc::Encoder> encoder;
  llmc::MadeHere made;
};

namespace {

using llmc::NullArgument;
using llmc::Status;

Status CheckEncoder(const llmc_encoder* encoder) {
  return encoder == nullptr ? NullArgument("encoder") : encoder->made.Check("encoder");
}

}  // namespace

extern "C" {

llmc_status llmc_encoder_create(const llmc_device* device, llmc_artifact* artifact, llmc_encoder** out,
                                llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    if (device == nullptr) return NullArgument("device");
    if (artifact == nullptr) return NullArgument("artifact");
    if (out == nullptr) return NullArgument("out");
    const auto make = [&](uint32_t num_blocks, std::unique_ptr<llmc::Device>* made) {
      return device->device->Load(artifact->artifact, {num_blocks, 0, /*timed=*/false}, made);
    };
    auto encoder = std::make_unique<llmc_encoder>();
    LLMC_RETURN_IF_ERROR(llmc::Encoder::Create(artifact->artifact->shape(), make, &encoder->encoder));
    *out = encoder.release();
    return Status::Ok();
  });
}

void llmc_encoder_destroy(llmc_encoder* encoder) {
  if (encoder != nullptr && encoder->made.here()) delete encoder;
}

llmc_status llmc_encoder_get_limits(const llmc_encoder* encoder, uint32_t* max_patches, uint32_t* max_rows,
                                    llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    LLMC_RETURN_IF_ERROR(CheckEncoder(encoder));
    if (max_patches == nullptr || max_rows == nullptr) return NullArgument("max_patches or max_rows");
    *max_patches = encoder->encoder->max_patches();
    *max_rows = encoder->encoder->max_rows();
    return Status::Ok();
  });
}

llmc_status llmc_encoder_encode(llmc_encoder* encoder, const llmc_patches* patches, float* rows, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    LLMC_RETURN_IF_ERROR(CheckEncoder(encoder));
    llmc_patches p{};
    LLMC_RETURN_IF_ERROR(llmc::ReadStruct(patches, "patches", &p));
    if (p.patches == nullptr) return NullArgument("patches->patches");
    if (p.places == nullptr) return NullArgument("patches->places");
    if (p.first == nullptr) return NullArgument("patches->first");
    if (rows == nullptr) return NullArgument("rows");
    return encoder->encoder->Encode(p, rows);
  });
}

}  // extern "C"
