// llmc_device_* of llmc.h.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "artifact/artifact.h"
#include "capi/c_device.h"
#include "collective/room.h"
#include "core/c_struct.h"
#include "core/error.h"
#include "device/ranks/open_ranks.h"

namespace {

using llmc::NullArgument;
using llmc::Status;

}  // namespace

extern "C" {

llmc_status llmc_device_list_kinds(llmc_device_kind* kinds, uint64_t capacity, uint64_t* count, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    if (count == nullptr) return NullArgument("count");
    if (capacity > 0) LLMC_RETURN_IF_ERROR(llmc::CheckStruct(kinds, "kinds[0]"));
    std::vector<llmc_device_kind> all;
    for (const llmc::DeviceKind* kind : llmc::DeviceKinds()) all.push_back({0, 0, kind->name, kind->summary});
    llmc::WriteArray(all, std::min<uint64_t>(capacity, all.size()), kinds);
    *count = all.size();
    return Status::Ok();
  });
}

llmc_status llmc_device_open(const char* kind, const llmc_key_value* options, uint64_t num_options, llmc_device** out,
                             llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    if (kind == nullptr) return NullArgument("kind");
    if (out == nullptr) return NullArgument("out");
    if (options == nullptr && num_options > 0) return NullArgument("options");
    llmc::DeviceOptions given;
    for (uint64_t i = 0; i < num_options; ++i) {
      if (options[i].key == nullptr || options[i].value == nullptr) {
        return NullArgument(("key or value of options[" + std::to_string(i) + "]").c_str());
      }
      given.emplace_back(options[i].key, options[i].value);
    }
    auto handle = std::make_unique<llmc_device>();
    LLMC_RETURN_IF_ERROR(llmc::OpenDeviceOf(kind, given, &handle->device));
    handle->facts = handle->device->Facts();
    *out = handle.release();
    return Status::Ok();
  });
}

void llmc_device_close(llmc_device* device) { delete device; }

llmc_status llmc_device_check(const llmc_device* device, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    if (device == nullptr) return NullArgument("device");
    const auto* ranks = dynamic_cast<const llmc::OpenRanks*>(device->device.get());
    return ranks != nullptr ? ranks->status() : Status::Ok();
  });
}

llmc_status llmc_device_follow(const llmc_device* device, llmc_artifact* artifact, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    if (device == nullptr) return NullArgument("device");
    if (artifact == nullptr) return NullArgument("artifact");
    const auto* ranks = dynamic_cast<const llmc::OpenRanks*>(device->device.get());
    if (ranks == nullptr) {
      return Status::Error(LLMC_ERR_INVALID_ARGUMENT, "The device is not a rank's: open it with the option room.");
    }
    return ranks->Follow(artifact->artifact);
  });
}

llmc_status llmc_room_report(const char* room, uint32_t rank, const char* why, llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    if (room == nullptr) return NullArgument("room");
    if (why == nullptr) return NullArgument("why");
    return llmc::Room::Report(room, rank, why);
  });
}

llmc_status llmc_device_get_facts(const llmc_device* device, llmc_key_value* facts, uint64_t capacity, uint64_t* count,
                                  llmc_error* error) {
  return llmc::Guard(error, [&]() -> Status {
    if (device == nullptr) return NullArgument("device");
    if (count == nullptr) return NullArgument("count");
    if (facts == nullptr && capacity > 0) return NullArgument("facts");
    for (uint64_t i = 0; i < std::min<uint64_t>(capacity, device->facts.size()); ++i) {
      facts[i] = {device->facts[i].first.c_str(), device->facts[i].second.c_str()};
    }
    *count = device->facts.size();
    return Status::Ok();
  });
}

}  // extern "C"
