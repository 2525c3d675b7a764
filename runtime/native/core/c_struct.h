// Structs that cross the C boundary. struct_size is the size that the caller knows, which may be less or more than this
// library's. Fields unknown to the caller keep their defaults; fields known only to the caller are zero.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "core/status.h"

namespace llmc {

inline Status NullArgument(const char* name) {
  return Status::Error(LLMC_ERR_INVALID_ARGUMENT, std::string(name) + " is NULL; pass a valid pointer.");
}

// Every struct has a field after its struct_size.
template <class T>
Status CheckStruct(const T* value, const char* name) {
  if (value == nullptr) return NullArgument(name);
  if (value->struct_size >= 2 * sizeof(uint32_t)) return Status::Ok();
  return Status::Error(LLMC_ERR_INVALID_ARGUMENT, "struct_size of " + std::string(name) + " is " +
                                                      std::to_string(value->struct_size) +
                                                      "; set it to the size of the struct.");
}

// Writes exactly the caller's struct_size bytes. Padding is copied too, which a copy by value need not do.
template <class T>
void WriteStruct(const T& value, uint32_t struct_size, T* out) {
  static_assert(offsetof(T, struct_size) == 0);
  std::memcpy(static_cast<void*>(out), &value, std::min<size_t>(struct_size, sizeof(T)));
  std::memcpy(static_cast<void*>(out), &struct_size, std::min<size_t>(struct_size, sizeof(struct_size)));
}

// For the _init functions: does nothing if struct_size is too small for any version.
template <class T>
void InitStruct(const T& defaults, uint32_t struct_size, T* out) {
  if (out == nullptr || struct_size < 2 * sizeof(uint32_t)) return;
  std::memset(static_cast<void*>(out), 0, struct_size);
  WriteStruct(defaults, struct_size, out);
}

// *to contains the defaults.
template <class T>
Status ReadStruct(const T* from, const char* name, T* to) {
  LLMC_RETURN_IF_ERROR(CheckStruct(from, name));
  std::memcpy(static_cast<void*>(to), from, std::min<size_t>(from->struct_size, sizeof(T)));
  to->struct_size = sizeof(T);
  return Status::Ok();
}

// All elements of an array have the struct_size of the first one.
template <class Values, class T>
void WriteArray(const Values& values, uint64_t count, T* out) {
  const uint32_t stride = count != 0 ? out[0].struct_size : 0;
  for (uint64_t i = 0; i < count; ++i) {
    WriteStruct(values[i], stride, reinterpret_cast<T*>(reinterpret_cast<char*>(out) + i * stride));
  }
}

}  // namespace llmc
