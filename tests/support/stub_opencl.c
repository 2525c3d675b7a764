/* An OpenCL library without a device: kernels compute nothing, all else is kept in memory of the host. What STUB_OPENCL
 * says, as in "BuildProgram=-11 platforms=0", goes wrong: a function returns a code, or a fact has another value. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int32_t i32;
typedef uint32_t u32;
typedef uint64_t u64;
#define EXPORT __attribute__((visibility("default")))

/* The number behind NAME= in STUB_OPENCL. */
static long long fact(const char *name, long long otherwise) {
  const char *text = getenv("STUB_OPENCL");
  const size_t length = strlen(name);
  for (const char *at = text; at && *at; at = strchr(at, ' ') ? strchr(at, ' ') + 1 : NULL) {
    if (!strncmp(at, name, length) && at[length] == '=') return atoll(at + length + 1);
  }
  return otherwise;
}
static i32 code(const char *name) { return (i32)fact(name, 0); }
static i32 give(const void *value, size_t bytes, size_t room, void *to, size_t *size) {
  if (size) *size = bytes;
  if (to && room >= bytes) memcpy(to, value, bytes);
  return to && room < bytes ? -30 : 0;
}
static i32 text(const char *value, size_t room, void *to, size_t *size) {
  return give(value, strlen(value) + 1, room, to, size);
}

static char one;
struct memory { size_t bytes; char data[]; };

EXPORT i32 clGetPlatformIDs(u32 n, void **ids, u32 *count) {
  if (count) *count = (u32)fact("platforms", 1);
  if (n) ids[0] = &one;
  return code("GetPlatformIDs");
}
EXPORT i32 clGetPlatformInfo(void *p, u32 what, size_t room, void *to, size_t *size) { return text("stub", room, to, size); }
EXPORT i32 clGetDeviceIDs(void *p, u64 type, u32 n, void **ids, u32 *count) {
  if (count) *count = (u32)fact("devices", 1);
  if (n) ids[0] = &one;
  return fact("devices", 1) ? 0 : -1;
}
EXPORT i32 clGetDeviceInfo(void *d, u32 what, size_t room, void *to, size_t *size) {
  const u64 memory = (u64)fact("memory", 1ll << 34), buffer = (u64)fact("buffer", 1ll << 33), local = 1 << 15;
  const u64 type = 4, doubles = (u64)fact("doubles", 63), singles = 1 << 7;
  const size_t items = (size_t)fact("items", 1024);
  const u32 available = (u32)fact("available", 1), units = 1;
  switch (what) {
    case 0x1000: return give(&type, 8, room, to, size);
    case 0x1002: return give(&units, 4, room, to, size);
    case 0x1004: return give(&items, sizeof(items), room, to, size);
    case 0x1010: return give(&buffer, 8, room, to, size);
    case 0x101B: return give(&singles, 8, room, to, size);
    case 0x101F: return give(&memory, 8, room, to, size);
    case 0x1023: return give(&local, 8, room, to, size);
    case 0x1027: return give(&available, 4, room, to, size);
    case 0x1030: return text("", room, to, size);
    case 0x1032: return give(&doubles, 8, room, to, size);
  }
  return text("stub", room, to, size);
}
EXPORT void *clCreateContext(const intptr_t *p, u32 n, void *const *d, void *f, void *a, i32 *e) {
  *e = code("CreateContext");
  return &one;
}
EXPORT i32 clReleaseContext(void *c) { return 0; }
EXPORT void *clCreateCommandQueue(void *c, void *d, u64 p, i32 *e) {
  *e = code("CreateCommandQueue");
  return &one;
}
EXPORT i32 clReleaseCommandQueue(void *q) { return 0; }
EXPORT void *clCreateBuffer(void *c, u64 flags, size_t bytes, void *host, i32 *e) {
  *e = code("CreateBuffer");
  if (*e) return NULL;
  struct memory *m = calloc(1, sizeof(*m) + bytes);
  m->bytes = bytes;
  return m;
}
EXPORT i32 clReleaseMemObject(void *m) {
  free(m);
  return 0;
}
EXPORT void *clCreateProgramWithSource(void *c, u32 n, const char **s, const size_t *l, i32 *e) {
  *e = code("CreateProgramWithSource");
  return &one;
}
EXPORT void *clCreateProgramWithBinary(void *c, u32 n, void *const *d, const size_t *l, const unsigned char **b, i32 *s, i32 *e) {
  *s = *e = code("CreateProgramWithBinary");
  return &one;
}
EXPORT i32 clBuildProgram(void *p, u32 n, void *const *d, const char *o, void *f, void *a) { return code("BuildProgram"); }
EXPORT i32 clGetProgramInfo(void *p, u32 what, size_t room, void *to, size_t *size) {
  const size_t bytes = 6;
  if (what == 0x1165) return give(&bytes, sizeof(bytes), room, to, size);
  memcpy(*(unsigned char **)to, "binary", bytes);
  return 0;
}
EXPORT i32 clGetProgramBuildInfo(void *p, void *d, u32 what, size_t room, void *to, size_t *size) {
  return text("line 1: no such word", room, to, size);
}
EXPORT i32 clReleaseProgram(void *p) { return 0; }
EXPORT i32 clRetainProgram(void *p) { return 0; }
EXPORT void *clCreateKernel(void *p, const char *name, i32 *e) {
  *e = code("CreateKernel");
  return &one;
}
EXPORT i32 clReleaseKernel(void *k) { return 0; }
EXPORT i32 clSetKernelArg(void *k, u32 i, size_t n, const void *v) { return code("SetKernelArg"); }
EXPORT i32 clGetKernelWorkGroupInfo(void *k, void *d, u32 w, size_t n, void *v, size_t *s) { return 0; }
EXPORT i32 clEnqueueNDRangeKernel(void *q, void *k, u32 n, const size_t *o, const size_t *g, const size_t *l, u32 w, void *const *e, void **out) {
  return code("EnqueueNDRangeKernel");
}
EXPORT i32 clEnqueueWriteBuffer(void *q, struct memory *m, u32 b, size_t at, size_t n, const void *from, u32 w, void *const *e, void **out) {
  if (at + n > m->bytes) return -30;
  memcpy(m->data + at, from, n);
  return code("EnqueueWriteBuffer");
}
EXPORT i32 clEnqueueReadBuffer(void *q, struct memory *m, u32 b, size_t at, size_t n, void *to, u32 w, void *const *e, void **out) {
  if (at + n > m->bytes) return -30;
  memcpy(to, m->data + at, n);
  if (out) *out = &one;
  return code("EnqueueReadBuffer");
}
EXPORT i32 clEnqueueCopyBuffer(void *q, struct memory *a, struct memory *b, size_t from, size_t to, size_t n, u32 w, void *const *e, void **out) {
  memcpy(b->data + to, a->data + from, n);
  return code("EnqueueCopyBuffer");
}
EXPORT i32 clEnqueueFillBuffer(void *q, struct memory *m, const void *p, size_t n, size_t at, size_t bytes, u32 w, void *const *e, void **out) {
  memset(m->data + at, *(const char *)p, bytes);
  return code("EnqueueFillBuffer");
}
EXPORT i32 clWaitForEvents(u32 n, void *const *e) { return code("WaitForEvents"); }
EXPORT i32 clReleaseEvent(void *e) { return 0; }
EXPORT i32 clFlush(void *q) { return code("Flush"); }
EXPORT i32 clFinish(void *q) { return code("Finish"); }
EXPORT void *clGetExtensionFunctionAddressForPlatform(void *p, const char *name) { return NULL; }
