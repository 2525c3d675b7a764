/* The OpenCL library of this machine, whose devices cannot enqueue a command buffer that runs. */
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

typedef int32_t (*device_info)(void *, uint32_t, size_t, void *, size_t *);

__attribute__((visibility("default"))) int32_t clGetDeviceInfo(void *device, uint32_t what, size_t room, void *to, size_t *size) {
  const device_info ask = (device_info)dlsym(dlopen("libOpenCL.so.1", RTLD_NOW), "clGetDeviceInfo");
  const int32_t code = ask(device, what, room, to, size);
  const uint32_t capabilities = 0x12A9;
  const uint64_t simultaneous_use = 1 << 2;
  if (what == capabilities && code == 0 && to) *(uint64_t *)to &= ~simultaneous_use;
  return code;
}
