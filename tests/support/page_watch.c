/* A cache of a few pages over a region of memory: no other page of it can be read, so every fetch of one is seen.
 *
 * A read of another page faults. The handler counts the page, makes it readable, and shuts the page that was fetched
 * longest ago. Prefetches do not fault, so they are no reads. For one thread at a time. */
#define _GNU_SOURCE
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

enum { kPageBytes = 4096, kMost = 256 };
static const size_t kNone = SIZE_MAX;

static unsigned char* region;
static size_t num_pages, capacity, turn;
static uint32_t* fetches;
static size_t held[kMost];
static struct sigaction before;

static void protect(size_t page, int access) { mprotect(region + page * kPageBytes, kPageBytes, access); }

static int is_held(size_t page) {
  for (size_t i = 0; i < capacity; ++i) {
    if (held[i] == page) return 1;
  }
  return 0;
}

static void fetch(int number, siginfo_t* info, void* context) {
  (void)number, (void)context;
  size_t page = ((uintptr_t)info->si_addr - (uintptr_t)region) / kPageBytes;
  if (page >= num_pages || is_held(page)) {
    sigaction(SIGSEGV, &before, NULL); /* not a read of the region: the instruction faults again, for others */
    return;
  }
  if (held[turn] != kNone) protect(held[turn], PROT_NONE);
  protect(page, PROT_READ);
  held[turn] = page;
  turn = (turn + 1) % capacity;
  ++fetches[page];
}

/* Empties the cache. */
void forget_pages(void) {
  for (size_t i = 0; i < capacity; ++i) held[i] = kNone;
  mprotect(region, num_pages * kPageBytes, PROT_NONE);
}

/* counts: fetches by page, to be added to. most: pages in the cache, at most 256. Returns 0, or -1 on failure. */
int watch_pages(unsigned char* first, size_t pages, uint32_t* counts, size_t most) {
  struct sigaction action = {.sa_sigaction = fetch, .sa_flags = SA_SIGINFO};
  if (most == 0 || most > kMost) return -1;
  region = first, num_pages = pages, fetches = counts, capacity = most, turn = 0;
  forget_pages();
  return sigaction(SIGSEGV, &action, &before);
}

/* Ends what watch_pages began; the region can be read and written again. */
void unwatch_pages(void) {
  sigaction(SIGSEGV, &before, NULL);
  mprotect(region, num_pages * kPageBytes, PROT_READ | PROT_WRITE);
}
