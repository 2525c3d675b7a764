/* Greedy generation through the C ABI: embed ARTIFACT MAX_TOKENS TOKEN_ID...  prints the generated token ids. */
#include <llmc/llmc.h>
#include <stdio.h>
#include <stdlib.h>

static int fail(const llmc_error *error) {
  fprintf(stderr, "embed: %s\n", error->message);
  return 1;
}

int main(int argc, char **argv) {
  if (argc < 4) {
    fprintf(stderr, "usage: %s ARTIFACT MAX_TOKENS TOKEN_ID...\n", argv[0]);
    return 2;
  }
  llmc_error error;
  llmc_error_init(&error, sizeof error);

  llmc_artifact *artifact = NULL;
  if (llmc_artifact_open(argv[1], &artifact, &error) != LLMC_OK) return fail(&error);
  llmc_engine_options options;
  llmc_engine_options_init(&options, sizeof options);
  llmc_engine *engine = NULL;
  if (llmc_engine_create(artifact, &options, &engine, &error) != LLMC_OK) return fail(&error);

  size_t count = (size_t)(argc - 3);
  int32_t *prompt = malloc(count * sizeof *prompt);
  if (prompt == NULL) return 1;
  for (size_t i = 0; i < count; ++i) prompt[i] = (int32_t)strtol(argv[3 + i], NULL, 10);
  llmc_sampling_params sampling;
  llmc_sampling_params_init(&sampling, sizeof sampling);
  sampling.temperature = 0.0f;
  sampling.max_tokens = (uint32_t)strtoul(argv[2], NULL, 10);
  llmc_request request;
  llmc_request_init(&request, sizeof request);
  request.prompt_token_ids = prompt;
  request.num_prompt_tokens = count;
  request.sampling = &sampling;
  uint64_t id = 0;
  if (llmc_engine_submit(engine, &request, &id, &error) != LLMC_OK) return fail(&error);
  free(prompt);

  for (int finished = 0; !finished;) {
    uint32_t progressed = 0;
    if (llmc_engine_step(engine, &progressed, &error) != LLMC_OK) return fail(&error);
    llmc_event events[8];
    uint64_t got = 0;
    events[0].struct_size = sizeof events[0];
    if (llmc_engine_poll(engine, events, 8, &got, &error) != LLMC_OK) return fail(&error);
    for (uint64_t i = 0; i < got; ++i) {
      if (events[i].kind == LLMC_EVENT_TOKEN) printf("%d ", events[i].token_id);
      if (events[i].kind == LLMC_EVENT_FINISHED) finished = 1;
      if (events[i].kind == LLMC_EVENT_FAILED) {
        fprintf(stderr, "embed: %s\n", events[i].message);
        return 1;
      }
    }
    fflush(stdout);
  }
  printf("\n");
  llmc_engine_destroy(engine);
  llmc_artifact_close(artifact);
  return 0;
}
