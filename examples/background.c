/* The miss policy "background" for a host in C: background ARTIFACT LLMC  serves three prompts at once, has
 * `LLMC compile ARTIFACT --add BUCKET` compile what their steps lacked, and serves on with that graph. */
#define _POSIX_C_SOURCE 200809L
#include <llmc/llmc.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>

enum { PROMPTS = 3, LENGTH = 20, TOKENS = 30 };
static llmc_error error = {.struct_size = sizeof error};

static void check(int bad, const char *message) {
  if (bad) fprintf(stderr, "background: %s\n", message), exit(1);
}

/* Greedy tokens of prompts that run together. */
static void serve(llmc_engine *engine, int32_t tokens[PROMPTS][TOKENS], llmc_engine_stats *stats) {
  llmc_sampling_params sampling;
  llmc_sampling_params_init(&sampling, sizeof sampling);
  sampling.temperature = 0, sampling.max_tokens = TOKENS, sampling.ignore_eos = 1;
  uint64_t ids[PROMPTS], got, finished = 0;
  for (int i = 0; i < PROMPTS; ++i) {
    int32_t prompt[LENGTH];
    for (int j = 0; j < LENGTH; ++j) prompt[j] = 3 + (i * 7 + j * 5) % 50;
    llmc_request request;
    llmc_request_init(&request, sizeof request);
    request.prompt_token_ids = prompt, request.num_prompt_tokens = LENGTH, request.sampling = &sampling;
    check(llmc_engine_submit(engine, &request, &ids[i], &error), error.message);
  }
  while (finished < PROMPTS) {
    check(llmc_engine_step(engine, NULL, &error), error.message);
    llmc_event events[2 * PROMPTS] = {{.struct_size = sizeof events[0]}}; /* a token and an end each */
    check(llmc_engine_poll(engine, events, 2 * PROMPTS, &got, &error), error.message);
    for (uint64_t e = 0; e < got; ++e) {
      check(events[e].kind == LLMC_EVENT_FAILED, events[e].message);
      finished += events[e].kind == LLMC_EVENT_FINISHED;
      for (int i = 0; i < PROMPTS; ++i)
        if (events[e].kind == LLMC_EVENT_TOKEN && events[e].request_id == ids[i])
          tokens[i][events[e].position - LENGTH] = events[e].token_id;
    }
  }
  check(llmc_engine_get_stats(engine, stats, &error), error.message);
}

int main(int argc, char **argv) {
  if (argc != 3) return fprintf(stderr, "usage: %s ARTIFACT LLMC\n", argv[0]), 2;
  llmc_artifact *artifact, *grown;
  llmc_device *device;
  llmc_engine *engine;
  check(llmc_artifact_open(argv[1], &artifact, &error), error.message);
  check(llmc_device_open("cpu", (llmc_key_value[]){{"threads", "1"}}, 1, &device, &error), error.message);
  check(llmc_engine_create(device, artifact, NULL, &engine, &error), error.message);
  int32_t before[PROMPTS][TOKENS], after[PROMPTS][TOKENS];
  llmc_engine_stats then = {.struct_size = sizeof then}, now = {.struct_size = sizeof now};
  serve(engine, before, &then);
  if (then.num_missed_shapes == 0) return puts("every step had its graph"), 0; /* cheap to ask after every step */

  llmc_bucket_miss miss = {.struct_size = sizeof miss}; /* the first; a busy host takes the one with the most steps */
  uint64_t count;
  check(llmc_engine_get_bucket_misses(engine, &miss, 1, &count, &error), error.message);
  char bucket[64];
  const char *phase = miss.phase == 1 ? "decode" : "prefill";
  snprintf(bucket, sizeof bucket, "%s:%ux%u", phase, miss.wanted_batch, miss.wanted_seq);
  printf("%d steps missed, adding %s\n", (int)then.num_bucket_misses, bucket), fflush(stdout);
  extern char **environ;
  char *command[] = {"nice", "-n", "19", argv[2], "compile", argv[1], "--add", bucket, "--jobs", "1", NULL};
  pid_t child;
  int status = 0;
  check(posix_spawnp(&child, command[0], NULL, NULL, command, environ), "nice cannot be started");
  while (waitpid(child, &status, WNOHANG) == 0) { /* serving goes on */
    serve(engine, after, &then);
    nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
  }
  check(status != 0, "the compiler failed");

  check(llmc_artifact_open(argv[1], &grown, &error), error.message); /* the path is another directory by now */
  llmc_artifact_info old = {.struct_size = sizeof old}, all = {.struct_size = sizeof all};
  check(llmc_artifact_get_info(artifact, &old, &error), error.message);
  check(llmc_artifact_get_info(grown, &all, &error), error.message);
  check(llmc_engine_add_graphs(engine, grown, &error), error.message);
  for (uint32_t graph = old.num_graphs; graph < all.num_graphs; ++graph) { /* first warm, then on */
    check(llmc_engine_warm_graph(engine, graph, NULL, &error), error.message);
    check(llmc_engine_enable_graph(engine, graph, 1, &error), error.message);
  }
  serve(engine, after, &now);
  printf("%u graphs joined, %d steps missed since\n", all.num_graphs - old.num_graphs,
         (int)(now.num_bucket_misses - then.num_bucket_misses));
  check(memcmp(before, after, sizeof before) != 0, "a graph that joins changes no token, but one did");
  for (int i = 0; i < PROMPTS; ++i)
    for (int j = 0; j < TOKENS; ++j) printf("%d%c", after[i][j], j + 1 < TOKENS ? ' ' : '\n');
  llmc_engine_destroy(engine), llmc_device_close(device), llmc_artifact_close(grown), llmc_artifact_close(artifact);
  return 0;
}
