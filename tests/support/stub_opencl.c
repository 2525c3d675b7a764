/* An OpenCL library without a device: kernels compute nothing, all else is kept in memory of the host. Copies wait, in
 * order, until somebody waits for them. What STUB_OPENCL says, as in "BuildProgram=-11 platforms=0", goes wrong: a
 * function returns a code, or a fact has another value. "NAME@3=-5" lets only the third call fail. */
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
/* As code, for a function whose calls are counted while the variable says something. */
static i32 counted(const char *name, u32 *calls) {
  if (!getenv("STUB_OPENCL")) return *calls = 0;
  char numbered[64];
  snprintf(numbered, sizeof(numbered), "%s@%u", name, ++*calls);
  return code(name) ? code(name) : code(numbered);
}
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

/* Copies that were enqueued, in order. A pattern stands for the source of a fill. */
static struct { void *to; const void *from; char pattern; size_t bytes; } *waiting;
static size_t num_waiting, room;
static i32 enqueue(i32 fails, void *to, const void *from, char pattern, size_t bytes) {
  if (fails) return fails;
  if (num_waiting == room) waiting = realloc(waiting, (room = 2 * room + 64) * sizeof(*waiting));
  waiting[num_waiting].to = to, waiting[num_waiting].from = from;
  waiting[num_waiting].pattern = pattern, waiting[num_waiting++].bytes = bytes;
  return 0;
}
static i32 finish(i32 fails) {
  for (size_t i = 0; i < num_waiting; ++i) {
    if (waiting[i].from) memcpy(waiting[i].to, waiting[i].from, waiting[i].bytes);
    else memset(waiting[i].to, waiting[i].pattern, waiting[i].bytes);
  }
  num_waiting = 0;
  return fails;
}
EXPORT u64 stub_opencl_waiting(void) { return num_waiting; }

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
  const u64 type = 4, doubles = 63, singles = 1 << 7;
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
  finish(0);
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
  static u32 calls;
  if (at + n > m->bytes) return -30;
  const i32 done = enqueue(counted("EnqueueWriteBuffer", &calls), m->data + at, from, 0, n);
  return b ? finish(done) : done;
}
EXPORT i32 clEnqueueReadBuffer(void *q, struct memory *m, u32 b, size_t at, size_t n, void *to, u32 w, void *const *e, void **out) {
  static u32 calls;
  if (at + n > m->bytes) return -30;
  if (out) *out = &one;
  const i32 done = enqueue(counted("EnqueueReadBuffer", &calls), to, m->data + at, 0, n);
  return b ? finish(done) : done;
}
EXPORT i32 clEnqueueCopyBuffer(void *q, struct memory *a, struct memory *b, size_t from, size_t to, size_t n, u32 w, void *const *e, void **out) {
  return enqueue(code("EnqueueCopyBuffer"), b->data + to, a->data + from, 0, n);
}
EXPORT i32 clEnqueueFillBuffer(void *q, struct memory *m, const void *p, size_t n, size_t at, size_t bytes, u32 w, void *const *e, void **out) {
  return enqueue(code("EnqueueFillBuffer"), m->data + at, NULL, *(const char *)p, bytes);
}
EXPORT i32 clEnqueueMarkerWithWaitList(void *q, u32 w, void *const *e, void **out) {
  *out = &one;
  return code("EnqueueMarkerWithWaitList");
}
EXPORT i32 clWaitForEvents(u32 n, void *const *e) { return finish(code("WaitForEvents")); }
EXPORT i32 clReleaseEvent(void *e) { return 0; }
EXPORT i32 clFlush(void *q) {
  static u32 calls;
  return counted("Flush", &calls);
}
EXPORT i32 clFinish(void *q) { return finish(code("Finish")); }
EXPORT void *clGetExtensionFunctionAddressForPlatform(void *p, const char *name) { return NULL; }
