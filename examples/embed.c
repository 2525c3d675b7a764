/* Greedy generation through the C ABI: embed ARTIFACT MAX_TOKENS TOKEN_ID...  prints the generated token ids. */
#include <errno.h>
#include <llmc/llmc.h>
#include <stdio.h>
#include <stdlib.h>

static void fail(const char *message) {
  fprintf(stderr, "embed: %s\n", message);
  exit(1);
}

static long number(const char *text, long least) {
  char *end = NULL;
  errno = 0;
  long value = strtol(text, &end, 10);
  if (end != text && *end == '\0' && errno == 0 && least <= value && value <= INT32_MAX) return value;
  fprintf(stderr, "embed: '%s' is not a whole number from %ld to %d\n", text, least, INT32_MAX);
  exit(2);
}

int main(int argc, char **argv) {
  if (argc < 4) return fprintf(stderr, "usage: %s ARTIFACT MAX_TOKENS TOKEN_ID...\n", argv[0]), 2;
  size_t count = (size_t)(argc - 3);
  int32_t *prompt = malloc(count * sizeof *prompt);
  if (prompt == NULL) fail("out of memory");
  for (size_t i = 0; i < count; ++i) prompt[i] = (int32_t)number(argv[3 + i], 0);
  llmc_sampling_params sampling;
  llmc_sampling_params_init(&sampling, sizeof sampling);
  sampling.temperature = 0.0f;
  sampling.max_tokens = (uint32_t)number(argv[2], 1);
  llmc_error error;
  llmc_error_init(&error, sizeof error);
  llmc_artifact *artifact = NULL;
  if (llmc_artifact_open(argv[1], &artifact, &error) != LLMC_OK) fail(error.message);
  llmc_device *device = NULL;
  if (llmc_device_open("cpu", NULL, 0, &device, &error) != LLMC_OK) fail(error.message);
  llmc_engine *engine = NULL;
  if (llmc_engine_create(device, artifact, NULL, &engine, &error) != LLMC_OK) fail(error.message);
  llmc_request request;
  llmc_request_init(&request, sizeof request);
  request.prompt_token_ids = prompt, request.num_prompt_tokens = count, request.sampling = &sampling;
  uint64_t id = 0;
  if (llmc_engine_submit(engine, &request, &id, &error) != LLMC_OK) fail(error.message);
  for (int finished = 0; !finished; fflush(stdout)) {
    if (llmc_engine_step(engine, NULL, &error) != LLMC_OK) fail(error.message);
    llmc_event events[8] = {{.struct_size = sizeof events[0]}};
    uint64_t got = 0;
    if (llmc_engine_poll(engine, events, 8, &got, &error) != LLMC_OK) fail(error.message);
    for (uint64_t i = 0; i < got; ++i) {
      if (events[i].kind == LLMC_EVENT_TOKEN) printf("%d ", events[i].token_id);
      if (events[i].kind == LLMC_EVENT_FAILED) fail(events[i].message);
      finished |= events[i].kind == LLMC_EVENT_FINISHED;
    }
  }
  if (printf("\n") < 0 || fflush(stdout) != 0 || ferror(stdout)) fail("cannot write the tokens to stdout");
  llmc_engine_destroy(engine);
  llmc_device_close(device);
  llmc_artifact_close(artifact);
  return free(prompt), 0;
}
