/* llmc.h: the C ABI of the llmc runtime.
 *
 * Every function returns a status code and takes a caller-owned llmc_error (may be NULL). Every struct starts
 * with struct_size and only grows at the end: callers and libraries of different ages understand each other. What a
 * caller fills has an _init function. It takes sizeof the struct as the caller was compiled, sets struct_size and the
 * defaults, and writes nothing behind them. Ids are uint64_t and never reused.
 * No exception, abort or stdio crosses this boundary. Unless stated otherwise a function may be called from any
 * thread, but calls on one object must not overlap; on failure outputs are unchanged. */
#ifndef LLMC_LLMC_H_
#define LLMC_LLMC_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define LLMC_API __attribute__((visibility("default")))
#else
#define LLMC_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Threads of a device of kind "cpu". 0 of them is "every CPU this process may use": one thread for each physical core with a
 * CPU in the caller's affinity mask. The CPU quota of its cgroups (v1 and v2, the tightest on the path, rounded up) is the
 * most. Pinning puts thread i on the i-th of those CPUs. Distinct cores come before their SMT siblings, and CPUs of one
 * memory node before those of the next. Pinning has no effect where it would do harm: with more threads than CPUs in the
 * mask, or under a quota smaller than the mask. A thread whose CPU other programs keep busy gives its place up and takes it
 * back when that ends. While it is kept waiting all the same, an engine works on fewer threads. It tries all again after a
 * while, and later each time that this was in vain. No result depends on it.
 *
 * Memory nodes (NUMA). The CPUs of a team of several threads may belong to more than one. Then the pages of the KV pool, of
 * the arena and of copied weights are spread over those nodes. A memory policy of the creating thread (numactl) prevents
 * that. A system that refuses (in containers mbind may need CAP_SYS_NICE) is no error: the statistic spread_errno tells. */

#define LLMC_ABI_VERSION 3u

typedef int32_t llmc_status;
enum {
  LLMC_OK = 0,
  LLMC_ERR_INVALID_ARGUMENT = 1,
  LLMC_ERR_NOT_FOUND = 2,
  LLMC_ERR_IO = 3,
  LLMC_ERR_CORRUPT = 4,
  LLMC_ERR_VERSION = 5,
  LLMC_ERR_UNSUPPORTED_TARGET = 6,
  LLMC_ERR_OUT_OF_MEMORY = 7,
  LLMC_ERR_OUT_OF_RANGE = 8,
  LLMC_ERR_QUEUE_FULL = 9,
  LLMC_ERR_BUCKET_MISS = 10,
  LLMC_ERR_INTERNAL = 11,
  LLMC_ERR_EMPTY_MASK = 12,
  LLMC_ERR_NOT_FINITE = 13 /* a logit of the model is NaN or infinite */
};

typedef struct llmc_error {
  uint32_t struct_size;
  int32_t code;
  char message[1016]; /* one sentence, NUL-terminated, with the offending value and what to do */
} llmc_error;
LLMC_API void llmc_error_init(llmc_error *error, uint32_t struct_size);

/* Version of the library, "MAJOR.MINOR.PATCH"; static storage. */
LLMC_API const char *llmc_version(void);
LLMC_API uint32_t llmc_abi_version(void);

/* The highest ISA level (FORMAT.md) whose kernels this process runs: what CPU and system support, or the limit. 0 when
 * not even the lowest. */
LLMC_API uint32_t llmc_machine_get_isa_level(void);
/* Takes the machine for one of at most `level`, from now on and in the whole process. Artifacts of a higher level are
 * refused (LLMC_ERR_UNSUPPORTED_TARGET) when an engine or replayer is created, and the library's own loops keep to it.
 * For tests of what an older CPU does. Cannot fail; what was created before stays usable; any thread may call it. */
LLMC_API void llmc_machine_limit_isa_level(uint32_t level);

/* ---- artifact: opening validates everything ------------------------------------------------------------ */
typedef struct llmc_artifact llmc_artifact;

typedef struct llmc_artifact_info {
  uint32_t struct_size;
  uint32_t num_graphs, num_kernels, num_commands, num_weights;
  int32_t num_layers, num_kv_heads, head_dim, block_size, vocab_size, max_model_len, max_num_seqs;
  uint32_t target_level;    /* that a device must have to run it, as its kind counts them (FORMAT.md) */
  uint64_t weight_bytes;    /* bytes of weights.safetensors */
  uint64_t code_bytes;      /* bytes of its code files */
  uint64_t max_arena_bytes; /* largest arena over all graphs */
  uint64_t kv_block_bytes;  /* K and V of one block over all layers */
  char target_kind[256];    /* of the device that loads its code, NUL-terminated as the next */
  char target_name[256];    /* what it was compiled for */
  int32_t vector_width;     /* floats of the vector that a prompt gives in place of tokens; 0: the model writes text */
  int32_t whole_prompts;    /* 1: a step must hold all tokens of a prompt */
  uint32_t num_adapter_linears; /* linear layers that adapters may be added to */
  uint32_t adapter_slots;       /* adapters that are loaded at once; 0: none can be */
  uint32_t adapter_rank;        /* the largest of one */
  uint32_t num_ranks;           /* processes that run it together; kv_block_bytes is of each */
  uint64_t adapter_bytes;       /* of one adapter over all layers, of the largest rank */
  uint64_t rank_weight_bytes;   /* of weights.safetensors what one rank reads */
} llmc_artifact_info;

#define LLMC_MAX_ADAPTER_PARTS 8

/* A linear layer that adapters may be added to. Its outputs are those of its parts, one behind the other: layers of
 * their own to adapters, as q, k and v are. */
typedef struct llmc_adapter_linear {
  uint32_t struct_size;
  uint32_t columns; /* its inputs */
  uint32_t num_parts;
  uint32_t rows[LLMC_MAX_ADAPTER_PARTS]; /* outputs of each part */
  char name[256];                        /* of its weight, NUL-terminated */
} llmc_adapter_linear;

typedef struct llmc_graph_info {
  uint32_t struct_size;
  uint32_t phase; /* 0 prefill, 1 decode, 2 mixed */
  uint32_t batch, seq, max_tokens, max_seqs, max_samples, max_blocks_per_seq, num_commands;
  uint64_t arena_bytes;
  uint32_t max_blocks; /* KV blocks of all sequences together, of a bucket whose seq is a total of contexts; else 0 */
  uint32_t reserved;
} llmc_graph_info;

/* Opens an artifact directory: maps files and validates; whatever it was compiled for, any machine can. *out is owned by
 * the caller. Compares the checksums of graphs.bin, of the code and of the header of weights.safetensors, not those of
 * the tensors. The files must not be changed in place while anything made from the artifact is alive; replacing them is
 * harmless. */
LLMC_API llmc_status llmc_artifact_open(const char *path, llmc_artifact **out, llmc_error *error);
/* Reads all of weights.safetensors and compares every tensor with its checksum. LLMC_ERR_CORRUPT names the first
 * damaged tensor, its offset and how many more there are; LLMC_ERR_IO where the disk does not deliver. Costs one pass
 * over the file at the speed of the disk, or of one core when it is cached, and 1 MiB of memory. Changes nothing, and
 * the artifact stays usable whatever the result. Any thread may call it, also while engines made from it run. */
LLMC_API llmc_status llmc_artifact_verify(const llmc_artifact *artifact, llmc_error *error);
/* Releases the artifact; engines and replayers made from it keep their own reference. NULL is allowed. */
LLMC_API void llmc_artifact_close(llmc_artifact *artifact);
LLMC_API llmc_status llmc_artifact_get_info(const llmc_artifact *artifact, llmc_artifact_info *info, llmc_error *error);
LLMC_API llmc_status llmc_artifact_get_graph(const llmc_artifact *artifact, uint32_t index, llmc_graph_info *info,
                                             llmc_error *error);

LLMC_API llmc_status llmc_artifact_get_adapter_linear(const llmc_artifact *artifact, uint32_t index,
                                                      llmc_adapter_linear *info, llmc_error *error);

/* ---- device: what runs an artifact ------------------------------------------------------------------------ */
typedef struct llmc_device llmc_device;

/* An option of a device, or a fact about one; both strings are NUL-terminated. */
typedef struct llmc_key_value {
  const char *key;
  const char *value;
} llmc_key_value;

typedef struct llmc_device_kind {
  uint32_t struct_size, reserved;
  const char *name;    /* as llmc_device_open takes it and artifacts say it (target_kind) */
  const char *summary; /* one line for people; both live as long as the library */
} llmc_device_kind;

/* The kinds of devices that this library has: up to capacity of them; *count is how many there are. kinds[0].struct_size
 * must be set by the caller. */
LLMC_API llmc_status llmc_device_list_kinds(llmc_device_kind *kinds, uint64_t capacity, uint64_t *count,
                                            llmc_error *error);
/* Opens a device of a kind; *out is owned by the caller. options: [num_options], read during the call only; of two with
 * one key the last counts. LLMC_ERR_NOT_FOUND: no such kind. LLMC_ERR_INVALID_ARGUMENT names an option that the kind does
 * not have, or a value that it does not take.
 *
 * Kind "cpu":
 * - `threads`: threads of the team. 0, the default: every CPU this process may use, see above.
 * - `pin`: 1, the default: each team thread keeps to one allowed CPU. 0: it does not.
 * - `idle_spin_us`: microseconds that team threads spin before they sleep, 1000 by default.
 * - `weights`: where weights are read; changes no result. `mapped`: in the mapping of their file, shared by all processes
 *   that serve it. `copied`: in huge pages of this process, filled when the engine or replayer is created. Weights are read
 *   faster there (docs/performance.md), and a file that cannot be read is LLMC_ERR_IO then. `auto`, the default: weights of
 *   at least 64 MiB move there in sixteen parts, one a step, from the 17th step on. So the first token of a process comes as
 *   soon as with `mapped`. A copy needs memory for it, for all of KV pool and arena and 256 MiB besides. Where machine or
 *   control group have less left, the rest stays mapped, and the statistic copied_weight_bytes tells.
 *
 * Kind "opencl":
 * - `library`: the loader of OpenCL drivers, libOpenCL.so.1 by default.
 * - `device`: a number among all OpenCL devices of the machine. Default: the first GPU, or the first device.
 * - `eager`: 0, the default: graphs are recorded once and replayed, where the driver has command buffers. 1: every kernel
 *   is launched by itself. The bits are the same.
 * - `sample`: 1, the default: the device draws tokens, where the artifact has the kernels. 0: the host does. The tokens are
 *   the same.
 * - `offload_mib`: MiB of the weights that stay in the host's memory, where kernels read them; 0 by default.
 * - `cache`: a folder for programs as the driver has built them; none by default.
 *
 * Kind "cuda":
 * - `library`: the driver, libcuda.so.1 by default.
 * - `device`: a number among the GPUs that the process may use, 0 by default.
 * - `eager`: 0, the default: one CUDA graph a bucket. 1: every kernel is launched by itself. The bits are the same.
 * - `graph_mib`: MiB of the GPU's memory that instances of graphs may take; no bound by default. Graphs beyond it are
 *   launched kernel by kernel.
 *
 * After an error that loses a CUDA GPU every step is LLMC_ERR_INTERNAL, and says which it was.
 *
 * An artifact for N ranks is run by N processes, each with a device of its own, which has more options.
 * - Of one host: `room` is the path of a file of memory that all open, such as /proc/self/fd/3 of a memfd that processes
 *   inherit. `rank` is 0, the default, or up to N - 1, and `ranks` is N. Rank 0 opens its device first.
 * - Of any hosts, started by mpirun: `mpi` is that mpirun's library, as dlopen takes it, and `ranks` is N or 0. Opening
 *   returns when all ranks have come. A process opens one such device, and MPI is started by it.
 * Rank 0 makes the engine, or a replayer, one in all; the others call llmc_device_follow. A rank that ends, or fails, ends every step with LLMC_ERR_INTERNAL,
 * which says which one it was (docs/parallel.md). */
LLMC_API llmc_status llmc_device_open(const char *kind, const llmc_key_value *options, uint64_t num_options,
                                      llmc_device **out, llmc_error *error);
/* Of a rank other than 0: does its part of every step of the engine that rank 0 makes, and returns when that is
 * destroyed. Blocks; the device is used up then. An error: this rank or another one failed, or rank 0 is gone. */
LLMC_API llmc_status llmc_device_follow(const llmc_device *device, llmc_artifact *artifact, llmc_error *error);
/* An error once one of the ranks of a device for several has failed: which one, and why. Any thread. */
LLMC_API llmc_status llmc_device_check(const llmc_device *device, llmc_error *error);
/* Says to all ranks of a room that one has ended, and why, in UTF-8: who started it knows first. The first report
 * stays. Any process. */
LLMC_API llmc_status llmc_room_report(const char *room, uint32_t rank, const char *why, llmc_error *error);
/* Engines and replayers that were made on it go on without it. NULL is allowed. */
LLMC_API void llmc_device_close(llmc_device *device);
/* What the device is and can do: up to capacity facts; *count is how many there are. The strings live as long as the
 * device. */
LLMC_API llmc_status llmc_device_get_facts(const llmc_device *device, llmc_key_value *facts, uint64_t capacity,
                                           uint64_t *count, llmc_error *error);

/* ---- replayer: one graph at a time, for tools, tests and benchmarks -------------------------------------- */
typedef struct llmc_replayer llmc_replayer;

typedef struct llmc_replayer_options {
  uint32_t struct_size;
  uint32_t num_blocks; /* KV blocks besides the dummy block 0; 0: enough for one sequence of max_model_len */
} llmc_replayer_options;
LLMC_API void llmc_replayer_options_init(llmc_replayer_options *options, uint32_t struct_size);

/* One step's inputs; arrays are owned by the caller and read during the call only. */
typedef struct llmc_batch {
  uint32_t struct_size;
  uint32_t num_tokens, num_seqs, num_samples, block_table_stride;
  const int32_t *input_ids;    /* [num_tokens] */
  const int32_t *positions;    /* [num_tokens] */
  const int32_t *slot_mapping; /* [num_tokens] */
  const int32_t *block_tables; /* [num_seqs][block_table_stride] */
  const int32_t *context_lens; /* [num_seqs] tokens in the cache after this step */
  const int32_t *query_start;  /* [num_seqs + 1] */
  const int32_t *sample_index; /* [num_samples] rows among the packed tokens */
} llmc_batch;
LLMC_API void llmc_batch_init(llmc_batch *batch, uint32_t struct_size);

typedef struct llmc_replay_stats {
  uint32_t struct_size;
  uint32_t num_threads;
  uint64_t num_replays;
  uint64_t total_ns;     /* wall time inside replay; what is in no field below is overhead */
  uint64_t kernel_ns;    /* thread 0: time inside kernels */
  uint64_t family_ns[8]; /* the same by kernel family */
  uint64_t barrier_ns;   /* thread 0: time waiting for the other threads */
} llmc_replay_stats;

/* On all that the device has, whatever other programs do. Keeps a reference to the artifact.
 * LLMC_ERR_UNSUPPORTED_TARGET: the artifact is for other devices, or for a higher level of this kind. */
LLMC_API llmc_status llmc_replayer_create(const llmc_device *device, llmc_artifact *artifact,
                                          const llmc_replayer_options *options, llmc_replayer **out, llmc_error *error);
LLMC_API void llmc_replayer_destroy(llmc_replayer *replayer);
/* Replays graph `graph`; writes num_samples × vocab_size floats to logits (capacity in floats), or vectors
 * of vector_width. Validates the batch
 * against the graph first; on failure nothing ran. */
LLMC_API llmc_status llmc_replayer_run(llmc_replayer *replayer, uint32_t graph, const llmc_batch *batch, float *logits,
                                       uint64_t capacity, llmc_error *error);
/* A step one command at a time, for tools that look at what each writes. `begin` takes in the inputs of a batch, as run
 * does. `run_command` computes command 0, 1, … of the graph, each to its end. `read_operand` copies the first `bytes` of an
 * operand that is no pool of the KV cache. Once all commands ran the KV cache is as after run.
 * LLMC_ERR_INVALID_ARGUMENT: no step was begun, or the device runs whole graphs only. LLMC_ERR_OUT_OF_RANGE: there is no
 * such command or operand, or it has fewer bytes. */
LLMC_API llmc_status llmc_replayer_begin(llmc_replayer *replayer, uint32_t graph, const llmc_batch *batch,
                                         llmc_error *error);
LLMC_API llmc_status llmc_replayer_run_command(llmc_replayer *replayer, uint32_t command, llmc_error *error);
LLMC_API llmc_status llmc_replayer_read_operand(llmc_replayer *replayer, uint32_t command, uint32_t operand, void *out,
                                                uint64_t bytes, llmc_error *error);
/* While on, every thread notes when it ran every command; costs three clock reads a command. */
LLMC_API llmc_status llmc_replayer_set_profiling(llmc_replayer *replayer, uint32_t on, llmc_error *error);
LLMC_API llmc_status llmc_replayer_get_stats(const llmc_replayer *replayer, llmc_replay_stats *stats,
                                             llmc_error *error);
/* The last replay on one thread of the team, in nanoseconds since the replay began. Command i ran from start_ns[i] to
 * end_ns[i]; then the thread waited at a barrier until leave_ns[i]. Arrays of `capacity` commands. LLMC_ERR_NOT_FOUND
 * when that replay was not profiled. */
LLMC_API llmc_status llmc_replayer_get_command_times(const llmc_replayer *replayer, uint32_t thread, uint64_t *start_ns,
                                                     uint64_t *end_ns, uint64_t *leave_ns, uint64_t capacity,
                                                     uint64_t *count, llmc_error *error);

/* ---- probe: the limits of this machine, measured ---------------------------------------------------------- */
typedef struct llmc_probe llmc_probe;

enum { LLMC_LIMIT_READ = 0, LLMC_LIMIT_F32 = 1, LLMC_LIMIT_BF16 = 2, LLMC_LIMIT_INT8 = 3 };

typedef struct llmc_probe_options {
  uint32_t struct_size;
  uint32_t num_threads; /* 0: every CPU this process may use (see above) */
  uint32_t pin_threads; /* 1: pin each thread to one allowed CPU (default) */
  uint32_t reserved;
  uint64_t read_bytes; /* memory that LLMC_LIMIT_READ reads, default 512 MiB; far more than the caches */
} llmc_probe_options;
LLMC_API void llmc_probe_options_init(llmc_probe_options *options, uint32_t struct_size);
LLMC_API llmc_status llmc_probe_create(const llmc_probe_options *options, llmc_probe **out, llmc_error *error);
LLMC_API void llmc_probe_destroy(llmc_probe *probe);
/* Keeps all threads busy for about `seconds` (at most 60). *rate: bytes a second read from memory (LLMC_LIMIT_READ), or
 * operations a second, a multiply-add being two. LLMC_ERR_UNSUPPORTED_TARGET when the CPU lacks the instructions. */
LLMC_API llmc_status llmc_probe_measure(llmc_probe *probe, uint32_t limit, double seconds, double *rate,
                                        llmc_error *error);

/* ---- engine: continuous batching ------------------------------------------------------------------------- */
typedef struct llmc_engine llmc_engine;

/* What runs a step that no graph of its phase holds. LARGER: a graph of another phase, or its parts where none holds it.
 * SPLIT: graphs of its phase, in parts. ERROR: none; the requests that do not fit fail, last come first. What a step
 * lacked can be compiled meanwhile, and join: llmc_engine_get_bucket_misses, llmc_engine_add_graphs. */
enum { LLMC_MISS_LARGER = 0, LLMC_MISS_ERROR = 1, LLMC_MISS_SPLIT = 2 };

typedef struct llmc_engine_options {
  uint32_t struct_size;
  uint32_t num_blocks; /* 0: from kv_bytes, or else enough for max_num_seqs sequences of max_model_len, at most 1 GiB */
  uint32_t max_num_seqs;        /* of a step; as many again may wait for masks with their KV; 0: the artifact's */
  uint32_t max_waiting;         /* bound on waiting requests; 0: 65536 */
  uint32_t max_tokens_per_step; /* of a step with prefill; 0: the largest prefill or mixed graph */
  uint32_t prefix_cache;        /* 1 on (default), 0 off */
  uint32_t miss_policy;
  uint32_t swap_always; /* 1: blocks go to the swap space also where computing them again takes less; 0: default */
  uint64_t kv_bytes;    /* bytes for the KV pool; 0: see num_blocks */
  /* Steps with somebody waiting behind a higher priority; 0: 512. After them the one that has been there longest
   * counts as the highest priority until it ends. There is one such request at a time. */
  uint32_t priority_patience;
  uint32_t reserved2;
  /* Most guesses of a sequence's next tokens that a decode step checks; 0: none (default). Guesses come from prompt and
   * output: what followed the last tokens where they stood before; or from `draft`. How many go along is decided step by
   * step. No result depends on it: several TOKEN events of a continuation may come of one step. */
  uint32_t speculate_tokens;
  uint32_t speculate_always; /* 1: all guesses that a graph holds go along, whether they pay or not: for tests */
  /* A smaller model with the same tokens that guesses; NULL: none. It is loaded on the engine's device, with a KV pool
   * of its own for as many tokens as the engine's. The engine keeps a reference. */
  const llmc_artifact *draft;
  uint64_t swap_bytes; /* of the host's memory, for KV blocks of preempted sequences; 0: they are computed again */
} llmc_engine_options;
#define LLMC_MAX_SPECULATE_TOKENS 64
LLMC_API void llmc_engine_options_init(llmc_engine_options *options, uint32_t struct_size);

typedef struct llmc_logit_bias {
  int32_t token_id;
  float bias;
} llmc_logit_bias;

/* When a beam search ends, once there are beam_width finished beams. OFF: when no running beam of the present length would be
 * better than the worst of them. ON: at once. NEVER: when none could become better, be it as long as max_tokens. */
enum { LLMC_EARLY_STOPPING_OFF = 0, LLMC_EARLY_STOPPING_ON = 1, LLMC_EARLY_STOPPING_NEVER = 2 };
#define LLMC_MAX_BEAMS 64

typedef struct llmc_sampling_params {
  uint32_t struct_size;
  uint32_t n;                                                    /* independent continuations, 1 … 64; default 1 */
  uint32_t max_tokens;                                           /* default 16; clipped by max_model_len */
  uint32_t min_tokens;                                           /* eos and stop ids are masked before this many */
  float temperature;                                             /* 0: greedy; default 1 */
  float top_p, min_p;                                            /* defaults 1 and 0 */
  int32_t top_k;                                                 /* 0 or -1: off */
  float repetition_penalty, presence_penalty, frequency_penalty; /* 1, 0, 0 */
  uint32_t ignore_eos;
  uint64_t seed;        /* stream = f(seed, continuation index, position): independent of the batch */
  uint32_t has_seed;    /* 0: the engine draws one */
  int32_t num_logprobs; /* -1 none, 0 only the chosen token, up to 20 alternatives */
  const int32_t *stop_token_ids;
  uint64_t num_stop_token_ids;
  const llmc_logit_bias *logit_bias;
  uint64_t num_logit_bias;
  /* Draw so many continuations, and tell the n with the highest sum of logprobs, likeliest first; 0: n (default). */
  uint32_t best_of;
  /* Beam search: in each step the beam_width likeliest continuations of all beams go on; 0: none (default). The score
   * of what ends is the sum of its logprobs, divided by its tokens to the power of length_penalty. n of the best are
   * told, best first. Beams share the KV blocks of what they have in common. temperature, filters and seed have no
   * effect; penalties and logit_bias are refused. With either, events come when all has been decided, and guided is
   * refused. */
  uint32_t beam_width;
  float length_penalty; /* default 1 */
  uint32_t early_stopping;
} llmc_sampling_params;
LLMC_API void llmc_sampling_params_init(llmc_sampling_params *params, uint32_t struct_size);

typedef struct llmc_request {
  uint32_t struct_size;
  int32_t priority; /* lower runs first, and takes the place of what runs with a higher value; default 0 */
  const int32_t *prompt_token_ids;
  uint64_t num_prompt_tokens;
  const llmc_sampling_params *sampling; /* owned by the caller, read during submit only; NULL: the defaults */
  uint32_t guided;                      /* 1: every token needs a mask (llmc_engine_set_token_mask) */
  int32_t num_prompt_logprobs;          /* -1 none (default), 0 only the prompt's tokens, up to 20 alternatives */
  uint64_t deadline_ns;                 /* on the clock of llmc_event.time_ns: then it ends by TIMEOUT; 0: never */
  float *vector;                        /* of a model that gives vectors, see below; NULL for any other */
  uint64_t vector_capacity;             /* in floats, vector_width at least */
  uint64_t adapter;                     /* as llmc_engine_load_adapter gave it; 0: none (default) */
  uint64_t num_output_tokens;           /* so many at the end of prompt_token_ids are output already, see below; 0 */
  uint32_t output_index;                /* which continuation of the undivided request this one is; default 0 */
  uint32_t reserved;
} llmc_request;
/* A request goes on where another engine left off. prompt_token_ids are the prompt and what was drawn of one
 * continuation. Of these num_output_tokens, below max_tokens, count as output. output_index is the continuation's
 * index there, and n is 1. With the same seed and artifact what follows has the bits that the undivided request would
 * have had. */
LLMC_API void llmc_request_init(llmc_request *request, uint32_t struct_size);

enum {
  LLMC_EVENT_TOKEN = 0,
  LLMC_EVENT_FINISHED = 1,
  LLMC_EVENT_FAILED = 2,
  LLMC_EVENT_PROMPT_LOGPROBS = 3, /* of the prompt's token at `position`; all of them before the first TOKEN */
  LLMC_EVENT_NEEDS_MASK = 4       /* the token after num_output_tokens tokens waits for its mask */
};
enum {
  LLMC_FINISH_NONE = 0,
  LLMC_FINISH_STOP = 1,
  LLMC_FINISH_LENGTH = 2,
  LLMC_FINISH_CANCELLED = 3,
  LLMC_FINISH_ERROR = 4,
  LLMC_FINISH_TIMEOUT = 5
};
#define LLMC_MAX_TOP_LOGPROBS 20

typedef struct llmc_event {
  uint32_t struct_size;
  uint32_t kind;
  uint64_t request_id;
  uint32_t output_index; /* which of n */
  int32_t token_id;      /* TOKEN: the token; FINISHED by eos or a stop id: that token; else -1 */
  uint32_t finish_reason;
  uint32_t num_prompt_tokens, num_cached_tokens;
  uint32_t num_output_tokens; /* sampled so far; an eos or stop id that ends it counts, too */
  int32_t error_code;
  float logprob;
  uint32_t num_top;
  int32_t top_token_ids[LLMC_MAX_TOP_LOGPROBS];
  float top_logprobs[LLMC_MAX_TOP_LOGPROBS];
  uint64_t time_ns;  /* monotonic clock */
  uint32_t position; /* with a token_id: of the token, counted from the prompt's first */
  uint32_t rank;     /* with logprob: 1 for the likeliest; equal ones by id, lowest first; else 0 */
  uint64_t arrival_ns, first_scheduled_ns, first_token_ns; /* FINISHED, FAILED: of the request; 0: never */
  char message[256]; /* FAILED: why and what to do, one sentence, NUL-terminated; else empty */
} llmc_event;

typedef struct llmc_engine_stats {
  uint32_t struct_size;
  uint32_t num_running, num_waiting, num_blocks, num_free_blocks, num_cached_blocks;
  uint32_t max_request_tokens; /* prompt and output: max_model_len, or less where the KV pool holds less */
  uint64_t num_steps, num_prefill_steps, num_decode_steps, num_preemptions, num_finished, num_bucket_misses;
  uint64_t prompt_tokens, cached_tokens, output_tokens;
  uint64_t scheduled_tokens, padded_tokens; /* valid tokens replayed; padding of the buckets they ran in */
  uint64_t step_ns, replay_ns, sample_ns;   /* wall time */
  uint64_t schedule_ns, prepare_ns; /* wall time before the replay: what to run; its inputs, and moving weights */
  uint64_t kernel_ns, barrier_ns;   /* of replay_ns on thread 0: in kernels; waiting for other threads */
  uint64_t decode_step_ns, decode_kernel_ns, decode_barrier_ns; /* the same of decode steps; the rest is overhead */
  uint64_t prefix_query_tokens, prefix_hit_tokens; /* prompt tokens looked up in the prefix cache, and found */
  uint64_t num_mixed_steps;                        /* of num_prefill_steps, those that carried decodes, too */
  uint64_t num_missed_shapes; /* what llmc_engine_get_bucket_misses lists: one more when a new shape misses */
  /* Of num_preemptions, those for waiting requests of a higher priority; requests that came to count as the highest. */
  uint64_t num_evictions, num_promotions;
  uint64_t num_speculative_steps;                   /* of num_decode_steps, those that checked guesses */
  uint64_t drafted_tokens, accepted_tokens;         /* guesses that were checked, and those that were right */
  uint64_t num_draft_blocks, num_free_draft_blocks; /* of the draft's KV pool; 0 without one */
  uint64_t draft_ns;                                /* of step_ns: the draft makes guesses, and reads texts for them */
} llmc_engine_stats;

/* What an engine's device counts, by names of its own. */
typedef struct llmc_device_stat {
  uint32_t struct_size, reserved;
  const char *name; /* lives as long as the library */
  uint64_t value;
} llmc_device_stat;

typedef struct llmc_graph_stats {
  uint32_t struct_size, reserved;
  uint64_t replays, tokens, padded_tokens; /* valid tokens carried, and padding beside them */
  uint64_t replay_ns;                      /* wall time */
} llmc_graph_stats;

/* A step that no graph of its phase held. */
typedef struct llmc_bucket_miss {
  uint32_t struct_size;
  uint32_t phase; /* 0 prefill, 1 decode; a step that no mixed graph holds is split, no miss */
  uint32_t num_seqs, num_tokens;
  uint32_t num_blocks, reserved; /* of the longest sequence */
  uint64_t count;
  int32_t graph; /* that ran it; -1: it was split, or failed */
  uint32_t reserved2;
  /* The bucket to add for it, `llmc compile ARTIFACT --add PHASE:BATCHxSEQ`: the missed batch, and the least length
   * that holds the step among those of the phase's graphs. Where none does, it is the step's own length
   * (docs/c-abi.md). */
  uint32_t wanted_batch, wanted_seq;
} llmc_bucket_miss;
#define LLMC_MAX_BUCKET_MISSES 1024

/* Steps that were alike, and ran in one graph. Times are of their replays. */
typedef struct llmc_step_shape {
  uint32_t struct_size;
  uint32_t phase; /* what the steps carried: 0 prefills, 1 decodes, 2 both; their graph may be of another phase */
  uint32_t graph;
  uint32_t num_seqs, num_tokens, num_samples;
  uint32_t num_blocks, reserved; /* of the longest sequence */
  uint64_t count, replay_ns;     /* sum */
  double replay_ns_squared;      /* sum of squares */
} llmc_step_shape;
#define LLMC_MAX_STEP_SHAPES 4096

/* What a step did with a continuation. Either it computed tokens [start, start + count) of the prompt, or of what is
 * computed again after a preemption. Or it took its KV blocks away. Decodes leave no mark: they are TOKEN events. */
enum { LLMC_MARK_PREFILL = 1, LLMC_MARK_PREEMPTED = 2 };
typedef struct llmc_request_mark {
  uint32_t struct_size;
  uint32_t kind; /* LLMC_MARK_ */
  uint64_t request_id;
  uint32_t output_index;
  uint32_t graph;            /* of PREFILL */
  uint32_t start, count;     /* of PREFILL */
  uint64_t begin_ns, end_ns; /* monotonic clock, of the step without its draws; equal when PREEMPTED */
} llmc_request_mark;
#define LLMC_MAX_REQUEST_MARKS 4096

/* Sequences of a priority that gave their place up to waiting ones of a higher priority. */
typedef struct llmc_eviction_count {
  uint32_t struct_size;
  int32_t priority;
  uint64_t count;
} llmc_eviction_count;
#define LLMC_MAX_EVICTED_PRIORITIES 64

enum { LLMC_READY_EVENTS = 1, LLMC_READY_WORK = 2 };

/* All allocation happens here, but for what a device moves between steps. The engine keeps a reference to the artifact,
 * and none to the device. LLMC_ERR_UNSUPPORTED_TARGET as of llmc_replayer_create. */
LLMC_API llmc_status llmc_engine_create(const llmc_device *device, llmc_artifact *artifact,
                                        const llmc_engine_options *options, llmc_engine **out, llmc_error *error);
LLMC_API void llmc_engine_destroy(llmc_engine *engine);
/* submit, cancel, set_token_mask, wait, poll and the get_ functions: from any thread, also while another is in step.
 * Where the model gives vectors (vector_width of llmc_artifact_info) no token is drawn, and a prompt may fill the whole of
 * max_model_len. request->vector is memory of the caller. The engine fills it before the FINISHED event, with the reason
 * STOP, of a prompt that ran. It must live until the request's last event was polled, or the engine destroyed. */
LLMC_API llmc_status llmc_engine_submit(llmc_engine *engine, const llmc_request *request, uint64_t *id,
                                        llmc_error *error);
/* Takes effect at the start of the next step: no token follows the one of a step in flight. */
LLMC_API llmc_status llmc_engine_cancel(llmc_engine *engine, uint64_t id, llmc_error *error);
/* What a LoRA adapter adds to a part of a linear layer: scale · b a x. */
typedef struct llmc_adapter_matrix {
  uint32_t struct_size;
  uint32_t linear, part; /* which, as llmc_artifact_get_adapter_linear counts */
  uint32_t rank;         /* 1 … adapter_rank of llmc_artifact_info */
  float scale;
  uint32_t reserved;
  const float *a; /* [rank][columns] */
  const float *b; /* [rows of the part][rank] */
} llmc_adapter_matrix;

/* Loads an adapter into a free slot; *id names it in requests, and is never used again. What it says nothing of stays as
 * the model has it. Copies what it is given, as numbers of the artifact's activations. matrices[0].struct_size must be
 * set by the caller. From any thread; no step waits for it. LLMC_ERR_QUEUE_FULL: every slot is taken.
 * LLMC_ERR_INVALID_ARGUMENT: a matrix does not fit the artifact, or it takes no adapters. On failure nothing has
 * changed. */
LLMC_API llmc_status llmc_engine_load_adapter(llmc_engine *engine, const llmc_adapter_matrix *matrices, uint64_t count,
                                              uint64_t *id, llmc_error *error);
/* No new request may use the adapter. Those that do go on with it; its slot is free when the last one has ended. From any
 * thread, at once. LLMC_ERR_NOT_FOUND: it is not loaded. */
LLMC_API llmc_status llmc_engine_unload_adapter(llmc_engine *engine, uint64_t id, llmc_error *error);
/* The tokens that continuation `output_index` of a guided request may take next. Bit t % 32 of words[t / 32] allows
 * token t; tokens past the last word are not allowed. Each mask serves one token: set the first one of each of the n
 * continuations after submit, the next one after each TOKEN event. A NEEDS_MASK event asks for each; the first masks
 * of a request far back in the queue are asked for when its turn comes near. Until a mask is there the continuation
 * waits. It leaves its seat in the step to others, and only its prompt but for the last token goes on. Setting it
 * again before a step uses it replaces it. LLMC_ERR_NOT_FOUND: the request or continuation has ended.
 * LLMC_ERR_INVALID_ARGUMENT: a step in flight uses a mask already, or the request is not guided. A mask without a
 * token fails the request with LLMC_ERR_EMPTY_MASK. min_tokens yields where the mask leaves only eos and stop ids. */
LLMC_API llmc_status llmc_engine_set_token_mask(llmc_engine *engine, uint64_t id, uint32_t output_index,
                                                const uint32_t *words, uint64_t num_words, llmc_error *error);
/* The same with masks for tokens behind guesses, so that a step may check these, too. The array is
 * words[num_guesses + 1][num_words]: a mask for the next token, then one behind each of guesses, which lead on from one
 * another. A guess that its mask forbids is wrong. Masks behind wrong guesses are forgotten: set new ones after the last
 * TOKEN event of the step, which a NEEDS_MASK event asks for. Guesses change no token; the engine checks as many of them
 * as pay. num_guesses: at most LLMC_MAX_SPECULATE_TOKENS. guesses may be NULL without any. */
LLMC_API llmc_status llmc_engine_set_token_masks(llmc_engine *engine, uint64_t id, uint32_t output_index,
                                                 const uint32_t *words, uint64_t num_words, const int32_t *guesses,
                                                 uint64_t num_guesses, llmc_error *error);
/* Guesses of the tokens that may follow the text of a guided continuation, after its NEEDS_MASK event. They are those
 * that prompt and output repeat, as many as are worth a mask each; none without speculate_tokens. *count of them are
 * copied. LLMC_ERR_NOT_FOUND: the request or continuation is not guided, or has ended. */
LLMC_API llmc_status llmc_engine_get_guesses(llmc_engine *engine, uint64_t id, uint32_t output_index, int32_t *tokens,
                                             uint64_t capacity, uint64_t *count, llmc_error *error);
/* One iteration: schedule, prepare, replay, sample, postprocess. *progressed (may be NULL) = 0 when there was nothing
 * to do. On an error the device failed or memory ran out. Then every request fails, with one event each (if there is
 * no memory for the events, in a later step). The engine is as after its creation. */
LLMC_API llmc_status llmc_engine_step(llmc_engine *engine, uint32_t *progressed, llmc_error *error);
/* Moves up to capacity events, oldest first. events[0].struct_size must be set by the caller. */
LLMC_API llmc_status llmc_engine_poll(llmc_engine *engine, llmc_event *events, uint64_t capacity, uint64_t *count,
                                      llmc_error *error);
/* Blocks until there are events to poll or work for step, or for timeout_ns (UINT64_MAX: without limit). *ready:
 * LLMC_READY_ bits, 0 after the timeout. submit, cancel, set_token_mask and a passing deadline wake it. */
LLMC_API llmc_status llmc_engine_wait(llmc_engine *engine, uint64_t timeout_ns, uint32_t *ready, llmc_error *error);
/* Replays a full bucket of made-up tokens, which read any KV blocks and write to the dummy block only. It reads the
 * weights and faults in the pages. *ns (may be NULL): wall time of the replay. Waits for a step in flight; not counted
 * in the statistics. */
LLMC_API llmc_status llmc_engine_warm_graph(llmc_engine *engine, uint32_t graph, uint64_t *ns, llmc_error *error);
/* A load for llmc_engine_warm_load; 0: as much as the bucket holds. */
typedef struct llmc_warm_load {
  uint32_t struct_size;
  uint32_t num_seqs;
  uint32_t tokens_each; /* new tokens of each sequence */
  uint32_t context;     /* tokens that each has in the cache afterwards */
} llmc_warm_load;
/* The same with a load of one's own. LLMC_ERR_OUT_OF_RANGE when the graph does not hold it; then nothing ran. */
LLMC_API llmc_status llmc_engine_warm_load(llmc_engine *engine, uint32_t graph, const llmc_warm_load *load,
                                           uint64_t *ns, llmc_error *error);
/* Calls every kernel of a graph for no row at all. In microseconds a graph is as warm as another one with the same
 * kernels that was replayed before. *ns (may be NULL): wall time. Otherwise as llmc_engine_warm_graph. */
LLMC_API llmc_status llmc_engine_walk_graph(llmc_engine *engine, uint32_t graph, uint64_t *ns, llmc_error *error);
/* Replays each graph of the draft with one made-up token, which reads and writes the dummy block only. So the first
 * guesses find code and weights in memory. Waits for a step in flight. *ns (may be NULL) is the wall time of all graphs.
 * LLMC_ERR_INVALID_ARGUMENT: the engine has no draft. */
LLMC_API llmc_status llmc_engine_warm_draft(llmc_engine *engine, uint64_t *ns, llmc_error *error);
/* Whether requests may run in a graph; all are on at first. With a graph off, larger ones serve what it would, and what
 * no other holds is a bucket miss. Changes no result. From any thread; waits for a step in flight. */
LLMC_API llmc_status llmc_engine_enable_graph(llmc_engine *engine, uint32_t graph, uint32_t on, llmc_error *error);
/* Gives back what memory a graph that is off alone takes; when it is on again, its first step makes it anew. Changes no
 * result. From any thread; waits for a step in flight. LLMC_ERR_INVALID_ARGUMENT: the graph is on. */
LLMC_API llmc_status llmc_engine_release_graph(llmc_engine *engine, uint32_t graph, llmc_error *error);
/* Takes over the graphs that `artifact` has behind those of the engine's own: it must be that one with buckets added (llmc
 * compile --add). The engine goes on with its weights, KV cache and requests, keeps a reference to `artifact`, and results
 * do not change. The new graphs are off, and numbered on. From any thread; what takes long of it goes on beside steps. On
 * failure nothing has changed. */
LLMC_API llmc_status llmc_engine_add_graphs(llmc_engine *engine, const llmc_artifact *artifact, llmc_error *error);
LLMC_API llmc_status llmc_engine_get_stats(const llmc_engine *engine, llmc_engine_stats *stats, llmc_error *error);
/* What its device counts, always the same names in the same order: up to capacity of them; *count is how many there are.
 * stats[0].struct_size must be set by the caller. */
LLMC_API llmc_status llmc_engine_get_device_stats(const llmc_engine *engine, llmc_device_stat *stats, uint64_t capacity,
                                                  uint64_t *count, llmc_error *error);
/* One entry a graph. stats[0].struct_size must be set by the caller; LLMC_ERR_OUT_OF_RANGE below num_graphs entries. */
LLMC_API llmc_status llmc_engine_get_graph_stats(const llmc_engine *engine, llmc_graph_stats *stats, uint64_t capacity,
                                                 uint64_t *count, llmc_error *error);
/* The shapes that missed, in order of appearance: up to capacity of the first LLMC_MAX_BUCKET_MISSES; later shapes count
 * in num_bucket_misses only. misses[0].struct_size must be set by the caller. Statistics and list are those of the last
 * step that ended; num_missed_shapes of llmc_engine_stats tells cheaply whether the list has grown. */
LLMC_API llmc_status llmc_engine_get_bucket_misses(const llmc_engine *engine, llmc_bucket_miss *misses,
                                                   uint64_t capacity, uint64_t *count, llmc_error *error);
/* What steps carried since the last call, or nothing the first time: from then on they are counted. Up to
 * LLMC_MAX_STEP_SHAPES shapes, in order of appearance; *lost (may be NULL): steps of further shapes. shapes[0].struct_size
 * must be set by the caller; LLMC_ERR_OUT_OF_RANGE below LLMC_MAX_STEP_SHAPES entries. */
LLMC_API llmc_status llmc_engine_take_step_shapes(llmc_engine *engine, llmc_step_shape *shapes, uint64_t capacity,
                                                  uint64_t *count, uint64_t *lost, llmc_error *error);
/* What steps did with requests since the last call, oldest first. The first call begins to note it. A list that is full
 * ends that until the next call, so an engine that nobody looks at pays nothing. Where marks may be missing, *complete
 * (may be NULL) is 0. The caller sets struct_size of marks[0]. LLMC_ERR_OUT_OF_RANGE below LLMC_MAX_REQUEST_MARKS
 * entries. */
LLMC_API llmc_status llmc_engine_take_request_marks(llmc_engine *engine, llmc_request_mark *marks, uint64_t capacity,
                                                    uint64_t *count, uint32_t *complete, llmc_error *error);
/* By priority, in order of appearance: up to capacity of the first LLMC_MAX_EVICTED_PRIORITIES; later priorities count in
 * num_evictions only. counts[0].struct_size must be set by the caller. */
LLMC_API llmc_status llmc_engine_get_evictions(const llmc_engine *engine, llmc_eviction_count *counts,
                                               uint64_t capacity, uint64_t *count, llmc_error *error);
/* LLMC_OK when reference counts, block tables, free list and prefix index agree; LLMC_ERR_INTERNAL and why otherwise. */
LLMC_API llmc_status llmc_engine_check_integrity(const llmc_engine *engine, llmc_error *error);

/* ---- simulation: a trace through the engine in virtual time, over a device that computes nothing ----------- */
/* Nanoseconds of a replay, from the token rows it carries and its pairs of a new token and a token that it sees. The rows
 * cost what a curve says: linear between its points, level before the first, on with the last slope behind the last. Each
 * pair adds ns_per_pair. One point and no ns_per_pair: a target that computes padding. */
typedef struct llmc_sim_cost {
  uint32_t struct_size;
  uint32_t num_points;    /* at least 1 */
  const uint32_t *tokens; /* [num_points], ascending */
  const double *ns;       /* [num_points] */
  double ns_per_pair;
} llmc_sim_cost;

/* A graph that need not have been compiled; the fields are those of llmc_graph_info. */
typedef struct llmc_sim_graph {
  uint32_t struct_size;
  uint32_t phase, batch, seq, max_tokens, max_seqs, max_samples, max_blocks_per_seq;
  const llmc_sim_cost *cost;  /* of a replay */
  const llmc_sim_cost *exact; /* of a replay, were the graph made for exactly the load it carries */
  uint32_t max_blocks;
  uint32_t reserved;
} llmc_sim_graph;

typedef struct llmc_sim_model {
  uint32_t struct_size;
  uint32_t num_graphs;
  int32_t block_size, max_model_len, max_num_seqs;
  uint32_t reserved;
  uint64_t kv_block_bytes;      /* with options.kv_bytes: decides the size of the pool */
  const llmc_sim_graph *graphs; /* [num_graphs]; the struct_size of the first holds for all */
  double step_ns, token_ns;     /* time of a step beside its replay, and of each token that it samples */
} llmc_sim_model;

/* Requests in order of arrival. A request whose prompt does not fit max_model_len is an error. */
typedef struct llmc_sim_trace {
  uint32_t struct_size;
  uint32_t prefix_block; /* tokens that a prefix id stands for */
  uint64_t num_requests;
  const uint64_t *arrival_ns;    /* [num_requests], ascending */
  const uint32_t *prompt_tokens; /* [num_requests] */
  const uint32_t *output_tokens; /* [num_requests], at least 1 */
  const uint64_t *prefix_start;  /* [num_requests + 1] into prefix_ids; NULL: no two prompts have a common prefix */
  const int64_t *prefix_ids;     /* of the prompts' leading blocks: equal ids are equal blocks */
  /* Called now and then with the number of requests that have ended; another value than 0 stops. NULL: never. */
  uint32_t (*progress)(void *context, uint64_t num_ended);
  void *context;
} llmc_sim_trace;

/* Replays of one graph with num_seqs sequences, the longest of `length` tokens: new tokens in prefill and mixed steps,
 * tokens of context in decode steps. Contexts are rounded up to blocks here, as a graph holds whole blocks. */
typedef struct llmc_sim_load {
  uint32_t struct_size;
  uint32_t graph, num_seqs, length;
  uint64_t replays;
  uint64_t tokens, contexts; /* sums: valid rows, tokens of context of all sequences */
  double ns, exact_ns;       /* sums of what the replays took, and would take without padding */
  uint64_t longest;          /* sum of the longest sequence of each replay, not rounded */
  /* Of a graph with max_blocks, length is that of all contexts together, each in whole blocks. */
} llmc_sim_load;

/* An engine like any other, but its device computes nothing, and its replays take virtual time. Scheduler, block
 * manager and choice of graphs are the real ones. Nothing of an artifact is needed. Copies what it is given. Of the
 * options it reads those of the KV pool and the scheduler. */
LLMC_API llmc_status llmc_engine_create_simulated(const llmc_sim_model *model, const llmc_engine_options *options,
                                                  llmc_engine **out, llmc_error *error);
/* Runs a trace through a simulated engine that has run none. Blocks; other threads may get_ statistics meanwhile. For
 * each request it tells when its first and its last token came, in virtual nanoseconds. 0 where it never did: the
 * request was refused (max_waiting), failed, or was not reached when progress stopped the run.
 * LLMC_ERR_INVALID_ARGUMENT: the engine is not simulated, or the trace is not sound; then nothing ran. */
LLMC_API llmc_status llmc_engine_simulate(llmc_engine *engine, const llmc_sim_trace *trace, uint64_t *first_token_ns,
                                          uint64_t *last_token_ns, llmc_error *error);
/* The loads of all replays so far, by graph, sequences and length: up to capacity of them; *count is how many there are.
 * loads[0].struct_size must be set by the caller. */
LLMC_API llmc_status llmc_engine_get_simulated_loads(const llmc_engine *engine, llmc_sim_load *loads, uint64_t capacity,
                                                     uint64_t *count, llmc_error *error);

#ifdef __cplusplus
}
#endif
#endif /* LLMC_LLMC_H_ */
