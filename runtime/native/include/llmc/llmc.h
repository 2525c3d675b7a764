/* llmc.h: the C ABI of the llmc runtime.
 *
 * - Every function returns a status code and takes an llmc_error of the caller, which may be NULL.
 * - Every struct starts with struct_size and only grows at the end, so callers and libraries of different versions work
 *   together. A struct that the caller fills has an _init function. It takes the caller's sizeof the struct, sets
 *   struct_size and the defaults, and writes nothing beyond that size.
 * - Ids are uint64_t and never reused.
 * - No exception, abort or stdio crosses this boundary.
 * - A process made by fork cannot use the engines, replayers and hand-overs of its parent, since it lacks their threads.
 *   Functions fail there with LLMC_ERR_INVALID_ARGUMENT, and destroying does nothing. It may make objects of its own.
 * - Unless stated otherwise, any thread may call a function, but calls on one object must not overlap. On failure outputs
 *   are unchanged. */
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

/* Threads of a device of kind "cpu".
 *
 * - 0 threads means "every CPU of this process": one thread per physical core with a CPU in the caller's affinity
 *   mask. The CPU quota of the process's cgroups (v1 and v2, the tightest on the path, rounded up) is the limit.
 * - Pinning puts thread i on the i-th of those CPUs. Distinct cores come before their SMT siblings, CPUs of one
 *   memory node before those of the next. Pinning has no effect with more threads than CPUs in the mask, or under a
 *   smaller quota.
 * - A pinned thread whose CPU other programs keep busy leaves that CPU, and returns when they stop. If threads still
 *   have to wait, an engine works on fewer threads for a while. It then tries all threads again, at growing
 *   intervals. No result depends on this.
 *
 * Memory nodes (NUMA). The CPUs of a team of several threads may belong to several nodes. The pages of the KV pool,
 * the arena and copied weights are then spread over those nodes. A memory policy of the creating thread (numactl)
 * prevents that. If the system refuses (in containers mbind may need CAP_SYS_NICE), nothing fails; the statistic
 * spread_errno has the reason. */

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
  LLMC_ERR_NOT_FINITE = 13,    /* a logit of the model is NaN or infinite */
  LLMC_ERR_DEVICE_FAILED = 14, /* a call of the device's driver failed, and the device goes on */
  LLMC_ERR_DEVICE_LOST = 15    /* every later call of the device fails in this process, too */
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

/* The highest ISA level (FORMAT.md) whose kernels this process runs: that of CPU and system, or the limit below. 0:
 * not even the lowest. */
LLMC_API uint32_t llmc_machine_get_isa_level(void);
/* Limits this process to ISA level `level` from now on, to test the behaviour of an older CPU. Creating an engine or
 * replayer for an artifact of a higher level fails (LLMC_ERR_UNSUPPORTED_TARGET), and the library's own loops respect
 * the limit. Existing objects stay usable. Cannot fail; any thread may call it. */
LLMC_API void llmc_machine_limit_isa_level(uint32_t level);

/* ---- artifact: opening validates everything ------------------------------------------------------------ */
typedef struct llmc_artifact llmc_artifact;

typedef struct llmc_artifact_info {
  uint32_t struct_size;
  uint32_t num_graphs, num_kernels, num_commands, num_weights;
  /* num_kv_heads and head_dim: of some layer of the KV cache, if its layers differ */
  int32_t num_layers, num_kv_heads, head_dim, block_size, vocab_size, max_model_len, max_num_seqs;
  uint32_t target_level;        /* minimal level of the device, as its kind counts levels (FORMAT.md) */
  uint64_t weight_bytes;        /* bytes of weights.safetensors */
  uint64_t code_bytes;          /* bytes of its code files */
  uint64_t max_arena_bytes;     /* largest arena over all graphs */
  uint64_t kv_block_bytes;      /* K and V of one block over all layers of a process, the most of any */
  char target_kind[256];        /* kind of the device that loads its code; NUL-terminated, like the next */
  char target_name[256];        /* machine that it was compiled for */
  int32_t vector_width;         /* floats per prompt of a model that returns vectors; 0: the model generates text */
  int32_t whole_prompts;        /* 1: a step must hold all tokens of a prompt */
  uint32_t num_adapter_linears; /* linear layers that take adapters */
  uint32_t adapter_slots;       /* adapters that can be loaded at once; 0: none */
  uint32_t adapter_rank;        /* largest rank of an adapter */
  uint32_t num_ranks;           /* processes that run it together */
  uint64_t adapter_bytes;       /* of one adapter over all layers, at the largest rank */
  uint64_t rank_weight_bytes;   /* bytes of weights.safetensors that one rank reads, the most of any */
  uint64_t max_kv_blocks;       /* KV blocks that its kernels can address, with the dummy block */
  uint64_t state_bytes;         /* states of a sequence over all layers of a process, the most of any; 0: it has none */
  uint64_t max_states;          /* slots of states that its kernels can address, with the dummy slot */
  uint32_t states_width;        /* floats of a row of hidden states that graphs leave or take; 0: none */
  uint32_t states_use;          /* LLMC_STATES_ */
} llmc_artifact_info;
/* Rows of states_width floats beside a graph's inputs. LEFT: graphs write one for each token, for a head that guesses.
 * TAKEN: graphs read one for each token: a head, or an encoder. PLACED: they read those that take the place of tokens
 * (llmc_placed_rows). PLACED_ON_AXES: the same, and rotary positions of tokens have three axes: time, height, width. */
enum { LLMC_STATES_LEFT = 0, LLMC_STATES_TAKEN = 1, LLMC_STATES_PLACED = 2, LLMC_STATES_PLACED_ON_AXES = 3 };

#define LLMC_MAX_ADAPTER_PARTS 8

/* A linear layer that takes adapters. Its outputs are the concatenated outputs of its parts, such as q, k and v.
 * Adapters treat each part as a layer. */
typedef struct llmc_adapter_linear {
  uint32_t struct_size;
  uint32_t columns; /* inputs of the layer */
  uint32_t num_parts;
  uint32_t rows[LLMC_MAX_ADAPTER_PARTS]; /* outputs of each part */
  char name[256];                        /* name of its weight, NUL-terminated */
} llmc_adapter_linear;

typedef struct llmc_graph_info {
  uint32_t struct_size;
  uint32_t phase; /* 0 prefill, 1 decode, 2 mixed */
  uint32_t batch, seq, max_tokens, max_seqs, max_samples, max_blocks_per_seq, num_commands;
  uint64_t arena_bytes;
  uint32_t max_blocks; /* KV blocks of all sequences together, if the bucket's seq is a total of contexts; else 0 */
  uint32_t reserved;
} llmc_graph_info;

/* Opens an artifact directory: maps and validates its files. Any machine can open any artifact. *out is owned by the
 * caller. The call compares the checksums of graphs.bin, of the code and of the header of weights.safetensors, but
 * not those of the tensors. Do not change the files in place while any object made from the artifact is alive;
 * replacing them is harmless. */
LLMC_API llmc_status llmc_artifact_open(const char *path, llmc_artifact **out, llmc_error *error);
/* Reads weights.safetensors and compares every tensor with its checksum. LLMC_ERR_CORRUPT names the first damaged
 * tensor, its offset, and the number of further ones. LLMC_ERR_IO: the disk cannot be read. The cost is one pass over
 * the file, and 1 MiB of memory. The artifact is unchanged and stays usable. Any thread may call it, also while
 * engines run. */
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
  const char *name;    /* for llmc_device_open, and equal to target_kind of artifacts */
  const char *summary; /* one line for people; both live as long as the library */
} llmc_device_kind;

/* Lists the kinds of devices of this library: at most `capacity` of them; *count is their number. The caller sets
 * kinds[0].struct_size. */
LLMC_API llmc_status llmc_device_list_kinds(llmc_device_kind *kinds, uint64_t capacity, uint64_t *count,
                                            llmc_error *error);
/* Opens a device of a kind; *out is owned by the caller. options: [num_options], read during the call only; of two
 * with the same key the last one counts. LLMC_ERR_NOT_FOUND: there is no such kind. LLMC_ERR_INVALID_ARGUMENT names
 * an unknown option or an invalid value.
 *
 * Kind "cpu":
 * - `threads`: threads of the team. Default 0: every CPU of this process, see above.
 * - `pin`: 1, the default: bind each team thread to one allowed CPU. 0: do not.
 * - `idle_spin_us`: microseconds for which idle team threads spin before they sleep. Default 1000.
 * - `eager`: 0, the default: the team's threads walk all commands of a graph in one job. 1: each command is a job of
 *   its own, at whose end all threads meet. The bits are the same.
 * - `weights`: memory from which weights are read; changes no result. `mapped`: the mapping of their file, which all
 *   processes that serve it share. `copied`: huge pages of this process, filled when the engine or replayer is
 *   created. These are faster to read (docs/performance.md), and an unreadable file fails there with LLMC_ERR_IO.
 *   `auto`, the default: weights of at least 64 MiB are copied in sixteen parts, one per step, from the 17th step on:
 *   the first token does not wait for the copy. Copying needs memory for the copy, the whole KV pool, the
 *   arena and another 256 MiB. If machine or control group have less, the rest stays mapped; the statistic
 *   copied_weight_bytes shows it.
 *
 * Kind "opencl":
 * - `library`: the loader of OpenCL drivers. Default libOpenCL.so.1.
 * - `device`: a number among all OpenCL devices of the machine. Default: the first GPU, else the first device.
 * - `eager`: 0, the default: record graphs once and replay them, if the driver has command buffers. 1: launch every
 *   kernel by itself. The bits are the same.
 * - `graph_mib`: MiB that recordings of graphs may take, by an estimate: 4 KiB for each command of a recording. Default:
 *   no limit. Further graphs are launched kernel by kernel.
 * - `graph_prompt_mib`: MiB of these for graphs of prefill and mixed steps; graphs of decode have the rest. If either
 *   kind has all its graphs, the other one gets what is left. Default: not divided; decode comes first.
 * - `graph_order`: graphs by number, between commas, the first ones to be recorded first. The others follow in the
 *   artifact's order.
 * - `sample`: 1, the default: the device samples tokens, if the artifact has the kernels. 0: the host does. The
 *   tokens are the same.
 * - `local_rank`: of several ranks of a host. Without `device` they share its GPUs out by these numbers. Default 0.
 * - `offload_mib`: MiB of weights that stay in the host's memory, where kernels read them. Default 0.
 * - `cache`: a folder for programs that the driver has built. Default: none.
 * - `overlap`: 1, the default, prepares the next step while one runs, and starts it before its tokens are known. It is
 *   then on its way when llmc_engine_step returns.
 *   0 plans a step when the one before has ended. The bits are the same.
 *
 * Kind "cuda":
 * - `library`: the driver. Default libcuda.so.1.
 * - `device`: a number among the GPUs that the process may use. Default: local_rank modulo their number.
 * - `local_rank`: among the ranks of a host, of an artifact with several. Default 0.
 * - `eager`: 0, the default: one CUDA graph per bucket. 1: launch every kernel by itself. The bits are the same.
 * - `graph_mib`: MiB of the GPU's memory for instances of graphs, as the driver takes it. Default: no limit. Further
 *   graphs are launched kernel by kernel.
 * - `graph_prompt_mib`, `graph_order`: as for kind "opencl".
 * - `overlap`: as for kind "opencl".
 * - `offload_mib`: MiB of the GPU's memory to save: weights stay in the host's memory. Default 0.
 * - `offload_ring_mib`: MiB of the GPU's memory through which these are streamed, ahead of kernels that read all of
 *   them. 0: kernels read them in place. Default: what two loads need, at most a quarter of these weights.
 * - `dependent_launches`: 1, the default: kernels begin while those before them end, where all of them wait for these.
 *   0: each begins when the one before has ended. The bits are the same.
 * - `collective`: how several ranks exchange results; the bits are the same. With auto, the default, NCCL does where
 *   all ranks of a stage can use it, else their hosts do. With host, the hosts do. With nccl, anything else is an error.
 *   The statistic nccl_ranks is 0 where hosts do. Another one, nccl_refusal, says why: 1: it was chosen, 2: a rank has
 *   no library, 3: two ranks have one GPU, 4: versions differ.
 * - `nccl_library`: NCCL 2.14 or later. Default libnccl.so.2.
 *
 * After an error that loses a device of kind "cuda" or "opencl", every step fails with LLMC_ERR_DEVICE_LOST, which
 * names that error. With several ranks, later steps name the rank. An OpenCL device is lost if it cannot copy a few
 * bytes when a call of it has failed, or when llmc_engine_check_device asks.
 *
 * N processes run an artifact for N ranks, each with its own device, which takes more options:
 * - On one host: `room` is the path of a shared memory file that all ranks open, such as /proc/self/fd/3 of an
 *   inherited memfd. `rank` is 0, the default, up to N - 1, and `ranks` is N. Rank 0 opens its device first.
 * - On any hosts, started by mpirun: `mpi` is the library of that mpirun, as dlopen takes it, and `ranks` is N or 0.
 *   Opening returns when all ranks have arrived. A process opens one such device, which starts MPI.
 * - `in_flight`: steps that several stages run at the same time, at most 64. Default 0: as many as stages.
 * - `overlap_sums`: steps of so many rows run in two parts, so that sums over MPI go on beside kernels. 0: never.
 *   Default: measured when the ranks have loaded. The bits are the same.
 *
 * Rank 0 creates the engine or the replayer, one in all; the other ranks call llmc_device_follow. If a rank ends or
 * fails, every step fails with LLMC_ERR_INTERNAL, which names the rank (docs/parallel.md). */
LLMC_API llmc_status llmc_device_open(const char *kind, const llmc_key_value *options, uint64_t num_options,
                                      llmc_device **out, llmc_error *error);
/* For ranks other than 0: takes part in every step of rank 0's engine, and returns when that engine is destroyed.
 * Blocks; the device cannot be used again. An error: this or another rank failed, or rank 0 is gone. */
LLMC_API llmc_status llmc_device_follow(const llmc_device *device, llmc_artifact *artifact, llmc_error *error);
/* For a device of several ranks: fails once one of the ranks has failed, and says which and why. Any thread. */
LLMC_API llmc_status llmc_device_check(const llmc_device *device, llmc_error *error);
/* Reports to all ranks of a room that one rank has ended, and why, in UTF-8. The process that started the rank knows
 * first. The first report stays. Any process. */
LLMC_API llmc_status llmc_room_report(const char *room, uint32_t rank, const char *why, llmc_error *error);
/* Closes the device. Engines and replayers that were made on it stay usable. NULL is allowed. */
LLMC_API void llmc_device_close(llmc_device *device);
/* Describes the device: at most `capacity` facts; *count is their number. The strings live as long as the device. */
LLMC_API llmc_status llmc_device_get_facts(const llmc_device *device, llmc_key_value *facts, uint64_t capacity,
                                           uint64_t *count, llmc_error *error);

/* ---- replayer: one graph at a time, for tools, tests and benchmarks -------------------------------------- */
typedef struct llmc_replayer llmc_replayer;

typedef struct llmc_replayer_options {
  uint32_t struct_size;
  uint32_t num_blocks; /* KV blocks besides the dummy block 0; 0: enough for one sequence of max_model_len */
  uint32_t num_states; /* slots of states besides the dummy slot 0; 0: as many as sequences of the largest graph */
  uint32_t reserved;
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
  /* [num_seqs][3] of a model with states: slot, keep_tokens, keep_slot (runtime/FORMAT.md); else NULL */
  const int32_t *state_slots;
  const int32_t *rope_positions; /* [num_tokens][3] of a model with LLMC_STATES_PLACED_ON_AXES; NULL: the positions */
} llmc_batch;
LLMC_API void llmc_batch_init(llmc_batch *batch, uint32_t struct_size);

typedef struct llmc_replay_stats {
  uint32_t struct_size;
  uint32_t num_threads;
  uint64_t num_replays;
  uint64_t total_ns;     /* wall time of replays; time in none of the fields below is overhead */
  uint64_t kernel_ns;    /* thread 0: time inside kernels */
  uint64_t family_ns[8]; /* the same by kernel family */
  uint64_t barrier_ns;   /* thread 0: time waiting for the other threads */
} llmc_replay_stats;

/* Creates a replayer on all threads of the device, even if other programs use their CPUs. It keeps a reference to the
 * artifact. LLMC_ERR_UNSUPPORTED_TARGET: the artifact is for another kind of device, or for a higher level. */
LLMC_API llmc_status llmc_replayer_create(const llmc_device *device, llmc_artifact *artifact,
                                          const llmc_replayer_options *options, llmc_replayer **out, llmc_error *error);
LLMC_API void llmc_replayer_destroy(llmc_replayer *replayer);
/* Copies the states of slot `from` to slot `to`, of a model that has states. */
LLMC_API llmc_status llmc_replayer_copy_state(llmc_replayer *replayer, uint32_t from, uint32_t to, llmc_error *error);
/* Replays graph `graph` and writes num_samples × vocab_size logits, or vectors of vector_width; capacity is in
 * floats. The batch is validated against the graph first; on failure nothing ran. */
LLMC_API llmc_status llmc_replayer_run(llmc_replayer *replayer, uint32_t graph, const llmc_batch *batch, float *logits,
                                       uint64_t capacity, llmc_error *error);
/* Runs a step one command at a time, for tools that read the results of each command. `begin` takes the inputs of a
 * batch, as run does. `run_command` computes command 0, 1, … of the graph to its end. `read_operand` copies the first
 * `bytes` of an operand other than a pool of the KV cache. After all commands the KV cache is as after run.
 * LLMC_ERR_INVALID_ARGUMENT: no step was begun, or the device only runs whole graphs. LLMC_ERR_OUT_OF_RANGE: there is
 * no such command or operand, or it has fewer bytes. */
LLMC_API llmc_status llmc_replayer_begin(llmc_replayer *replayer, uint32_t graph, const llmc_batch *batch,
                                         llmc_error *error);
LLMC_API llmc_status llmc_replayer_run_command(llmc_replayer *replayer, uint32_t command, llmc_error *error);
LLMC_API llmc_status llmc_replayer_read_operand(llmc_replayer *replayer, uint32_t command, uint32_t operand, void *out,
                                                uint64_t bytes, llmc_error *error);
/* While on, every thread records the times of every command, at the cost of three clock reads per command. */
LLMC_API llmc_status llmc_replayer_set_profiling(llmc_replayer *replayer, uint32_t on, llmc_error *error);
LLMC_API llmc_status llmc_replayer_get_stats(const llmc_replayer *replayer, llmc_replay_stats *stats,
                                             llmc_error *error);
/* Returns the last replay on one thread of the team, in nanoseconds since the replay began. Command i ran from
 * start_ns[i] to end_ns[i]; then the thread waited at a barrier until leave_ns[i]. The arrays have `capacity`
 * elements. LLMC_ERR_NOT_FOUND: that replay was not profiled. */
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
/* Keeps all threads busy for about `seconds` (at most 60). The rate is in bytes per second for LLMC_LIMIT_READ, else
 * in operations per second; a multiply-add is two. LLMC_ERR_UNSUPPORTED_TARGET: the CPU lacks the instructions. */
LLMC_API llmc_status llmc_probe_measure(llmc_probe *probe, uint32_t limit, double seconds, double *rate,
                                        llmc_error *error);

/* ---- engine: continuous batching ------------------------------------------------------------------------- */
typedef struct llmc_engine llmc_engine;

/* How to run a step that fits no graph of its phase. LARGER: in a graph of another phase, or in parts if none fits.
 * SPLIT: in parts, in graphs of its phase. ERROR: not at all; the requests that do not fit fail, last come first. A
 * host can compile the missing graph meanwhile: see llmc_engine_get_bucket_misses and llmc_engine_add_graphs. */
enum { LLMC_MISS_LARGER = 0, LLMC_MISS_ERROR = 1, LLMC_MISS_SPLIT = 2 };

typedef struct llmc_engine_options {
  uint32_t struct_size;
  uint32_t num_blocks; /* 0: from kv_bytes, or else enough for max_num_seqs sequences of max_model_len, at most 1 GiB */
  uint32_t max_num_seqs;        /* of each step in flight; as many again may wait for masks; 0: the artifact's */
  uint32_t max_waiting;         /* limit of waiting requests; 0: 65536 */
  uint32_t max_tokens_per_step; /* of a step with prefill; 0: the largest prefill or mixed graph */
  uint32_t prefix_cache;        /* 1 on (default), 0 off */
  uint32_t miss_policy;
  uint32_t swap_always; /* 1: swap blocks even if recomputing them is cheaper; 0: default */
  uint64_t kv_bytes;    /* bytes for KV blocks and states; 0: see num_blocks, and of 1 GiB for states */
  /* Steps with requests waiting behind a higher priority, after which the oldest of these gets the highest priority
   * until it ends; 0: 512. Only one request at a time has it. */
  uint32_t priority_patience;
  uint32_t reserved2;
  /* Limit of guessed next tokens of a sequence that a decode step checks; 0: none (default). Guesses come from
   * `draft`, or from prompt and output: the tokens that followed the last ones at an earlier place. Each step decides
   * how many it checks. No result depends on it, but one step may give several TOKEN events of a continuation. */
  uint32_t speculate_tokens;
  uint32_t speculate_always; /* 1: check all guesses that a graph holds, even if they do not pay off; for tests */
  /* A smaller model with the same tokens, which guesses; NULL: none. It is loaded on the engine's device, with a KV
   * pool of its own for as many tokens as the engine's. The engine keeps a reference. */
  const llmc_artifact *draft;
  uint64_t swap_bytes; /* host memory for KV blocks of preempted sequences; 0: they are recomputed */
  /* Slots of states, of a model that has states. A running sequence has one. The others keep states for texts that
   * begin alike. 0: as many as half of kv_bytes holds, at most 3 for each of max_num_seqs. These leave room for a
   * sequence of max_model_len where a smaller pool has it. */
  uint32_t num_states;
  uint32_t reserved3;
} llmc_engine_options;
#define LLMC_MAX_SPECULATE_TOKENS 64
LLMC_API void llmc_engine_options_init(llmc_engine_options *options, uint32_t struct_size);

/* Tells how many KV blocks and slots of states an engine has, without the dummies. info: of its artifact. options NULL:
 * the defaults. Fails as llmc_engine_create does for them. */
LLMC_API llmc_status llmc_artifact_info_get_pool_sizes(const llmc_artifact_info *info,
                                                       const llmc_engine_options *options, uint32_t *num_blocks,
                                                       uint32_t *num_states, llmc_error *error);

typedef struct llmc_logit_bias {
  int32_t token_id;
  float bias;
} llmc_logit_bias;

/* When a beam search ends, once there are beam_width finished beams. OFF: when no running beam, at its present
 * length, scores better than the worst of them. ON: at once. NEVER: when no running beam could score better within
 * max_tokens. */
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
  uint64_t seed;        /* random numbers depend on seed, continuation index and position, not on the batch */
  uint32_t has_seed;    /* 0: the engine draws a seed */
  int32_t num_logprobs; /* -1: none; 0: of the chosen token only; up to 20 alternatives */
  const int32_t *stop_token_ids;
  uint64_t num_stop_token_ids;
  const llmc_logit_bias *logit_bias;
  uint64_t num_logit_bias;
  /* Sample this many continuations and return the n with the highest sum of logprobs, best first; 0: n (default). */
  uint32_t best_of;
  /* Beam search with beam_width beams; 0: none (default). Each step keeps the likeliest continuations of all beams. A
   * finished beam's score is the sum of its logprobs, divided by its number of tokens to the power of length_penalty.
   * The n best are returned, best first. Beams share the KV blocks of common tokens. temperature, filters and seed
   * have no effect; penalties and logit_bias are refused. With beam_width or best_of, all events come at the end, and
   * guided is refused. */
  uint32_t beam_width;
  float length_penalty; /* default 1 */
  uint32_t early_stopping;
} llmc_sampling_params;
LLMC_API void llmc_sampling_params_init(llmc_sampling_params *params, uint32_t struct_size);

/* Rows that take the place of tokens of a prompt, such as those of an image (llmc_encoder_encode). */
typedef struct llmc_placed_rows {
  uint32_t struct_size;
  uint32_t num_rows;
  uint64_t first;       /* index in prompt_token_ids of the first token that they replace */
  const float *rows;    /* [num_rows][states_width], of finite numbers; copied by submit */
  uint8_t identity[32]; /* names their content, such as a digest: rows of equal names are taken to be equal */
  /* [num_rows][3] of a model with LLMC_STATES_PLACED_ON_AXES: rotary positions, counted from that of the first row. They
   * belong to the content. NULL: those of tokens. */
  const int32_t *positions;
  uint32_t advance; /* with positions: how much further the token behind the rows is than the first row, at least 1 */
  uint32_t reserved;
} llmc_placed_rows;

typedef struct llmc_request {
  uint32_t struct_size;
  int32_t priority; /* lower values run first, and evict running requests with a higher value; default 0 */
  const int32_t *prompt_token_ids;
  uint64_t num_prompt_tokens;
  const llmc_sampling_params *sampling; /* owned by the caller, read during submit only; NULL: the defaults */
  uint32_t guided;                      /* 1: every token needs a mask (llmc_engine_set_token_mask) */
  int32_t num_prompt_logprobs;          /* -1 none (default), 0 only the prompt's tokens, up to 20 alternatives */
  uint64_t deadline_ns;                 /* end with TIMEOUT at this time of llmc_event.time_ns's clock; 0: never */
  float *vector;                        /* result of a model that returns vectors, see below; else NULL */
  uint64_t vector_capacity;             /* in floats, at least vector_width */
  uint64_t adapter;                     /* id of llmc_engine_load_adapter; 0: none (default) */
  uint64_t num_output_tokens; /* tokens at the end of prompt_token_ids that are output, see below; default 0 */
  uint32_t output_index;      /* index of the continuation in the original request; default 0 */
  uint32_t reserved;
  /* Ascending and apart, of a model with LLMC_STATES_PLACED or LLMC_STATES_PLACED_ON_AXES. The struct_size of the first
   * holds for all. Any tokens may stand in their place; penalties count these. The prompt's last token cannot be
   * replaced. */
  const llmc_placed_rows *placed;
  uint64_t num_placed;
} llmc_request;
/* Initializes a request. These fields continue one continuation of another engine's request, with the bits of the
 * original:
 *
 * - prompt_token_ids: the prompt, followed by the output so far.
 * - num_output_tokens: the number of these output tokens, below max_tokens.
 * - output_index and sampling->seed: as in the original request. n is 1. */
LLMC_API void llmc_request_init(llmc_request *request, uint32_t struct_size);

enum {
  LLMC_EVENT_TOKEN = 0,
  LLMC_EVENT_FINISHED = 1,
  LLMC_EVENT_FAILED = 2,
  LLMC_EVENT_PROMPT_LOGPROBS = 3, /* of the prompt's token at `position`; before the first TOKEN */
  LLMC_EVENT_NEEDS_MASK = 4       /* the next token, after num_output_tokens tokens, waits for its mask */
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
  uint32_t output_index; /* index of the continuation, below n */
  int32_t token_id;      /* TOKEN: the token; FINISHED by eos or a stop id: that token; else -1 */
  uint32_t finish_reason;
  uint32_t num_prompt_tokens, num_cached_tokens;
  uint32_t num_output_tokens; /* sampled so far, including an eos or stop id at the end */
  int32_t error_code;
  float logprob;
  uint32_t num_top;
  int32_t top_token_ids[LLMC_MAX_TOP_LOGPROBS];
  float top_logprobs[LLMC_MAX_TOP_LOGPROBS];
  uint64_t time_ns;  /* monotonic clock */
  uint32_t position; /* with a token_id: of the token, counted from the prompt's first */
  uint32_t rank;     /* with logprob: 1 for the likeliest, ties by id, lowest first; else 0 */
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
  uint64_t schedule_ns, prepare_ns;         /* wall time before the replay: scheduling; inputs and copies of weights */
  uint64_t kernel_ns, barrier_ns;           /* parts of replay_ns on thread 0: in kernels; waiting for other threads */
  uint64_t decode_step_ns, decode_kernel_ns, decode_barrier_ns; /* the same for decode steps; the rest is overhead */
  uint64_t prefix_query_tokens, prefix_hit_tokens; /* prompt tokens looked up in the prefix cache, and found */
  uint64_t num_mixed_steps;                        /* steps of num_prefill_steps that also carried decodes */
  uint64_t num_missed_shapes;                      /* length of the list of llmc_engine_get_bucket_misses */
  /* Preemptions for waiting requests of a higher priority; requests that got the highest priority after their wait. */
  uint64_t num_evictions, num_promotions;
  uint64_t num_speculative_steps;                   /* steps of num_decode_steps that checked guesses */
  uint64_t drafted_tokens, accepted_tokens;         /* checked guesses; right guesses */
  uint64_t num_draft_blocks, num_free_draft_blocks; /* of the draft's KV pool; 0 without one */
  uint64_t draft_ns;                                /* part of step_ns in which the draft guesses or reads texts */
  /* Steps that were begun before the tokens of the step before were told: prepared while it ran, or of other
   * continuations, on a device that runs several steps; tokens that steps computed for continuations that had ended. */
  uint64_t num_ahead_steps, num_thrown_rows;
  uint64_t judged_tokens; /* guesses up to the first wrong one: accepted_tokens / judged_tokens are their odds */
  uint64_t num_states, num_free_states, num_kept_states; /* slots of states; 0 for a model without them */
  uint64_t mask_wait_ns; /* waits of steps for masks that were about to come; no part of step_ns */
} llmc_engine_stats;

/* A statistic of an engine's device. */
typedef struct llmc_device_stat {
  uint32_t struct_size, reserved;
  const char *name; /* lives as long as the library */
  uint64_t value;
} llmc_device_stat;

typedef struct llmc_graph_stats {
  uint32_t struct_size;
  uint32_t launched;                       /* 1: its steps launch kernels one by one, since it has no recording */
  uint64_t replays, tokens, padded_tokens; /* valid tokens and padding tokens of the replays */
  uint64_t replay_ns;                      /* wall time */
} llmc_graph_stats;

/* A step that fit no graph of its phase. */
typedef struct llmc_bucket_miss {
  uint32_t struct_size;
  uint32_t phase; /* 0 prefill, 1 decode; a step that fits no mixed graph is split, which is not a miss */
  uint32_t num_seqs, num_tokens;
  uint32_t num_blocks, reserved; /* of the longest sequence */
  uint64_t count;
  int32_t graph; /* graph that ran it; -1: it was split, or failed */
  uint32_t reserved2;
  /* The bucket to add with `llmc compile ARTIFACT --add PHASE:BATCHxSEQ`: the batch of the step, and the smallest
   * sufficient length among the phase's graphs. If none suffices, it is the step's own length (docs/c-abi.md). */
  uint32_t wanted_batch, wanted_seq;
} llmc_bucket_miss;
#define LLMC_MAX_BUCKET_MISSES 1024

/* Steps of one shape that ran in one graph. Times are of their replays. */
typedef struct llmc_step_shape {
  uint32_t struct_size;
  uint32_t phase; /* content of the steps: 0 prefills, 1 decodes, 2 both; their graph may be of another phase */
  uint32_t graph;
  uint32_t num_seqs, num_tokens, num_samples;
  uint32_t num_blocks;       /* of the longest sequence */
  uint32_t all_blocks;       /* of decodes: of all sequences together; else 0 */
  uint64_t count, replay_ns; /* sum */
  double replay_ns_squared;  /* sum of squares */
} llmc_step_shape;
#define LLMC_MAX_STEP_SHAPES 4096

/* A record of a step and a continuation. PREFILL: the step computed tokens [start, start + count) of the prompt, or
 * of the tokens that are recomputed after a preemption. PREEMPTED: the step took its KV blocks away. Decodes have
 * TOKEN events instead of marks. */
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

/* Evicted sequences of one priority: they gave their place to waiting ones of a higher priority. */
typedef struct llmc_eviction_count {
  uint32_t struct_size;
  int32_t priority;
  uint64_t count;
} llmc_eviction_count;
#define LLMC_MAX_EVICTED_PRIORITIES 64

enum { LLMC_READY_EVENTS = 1, LLMC_READY_WORK = 2 };

/* Creates an engine. All allocation happens here, except for a device's transfers between steps. The engine keeps a
 * reference to the artifact, and none to the device. LLMC_ERR_UNSUPPORTED_TARGET: as for llmc_replayer_create. */
LLMC_API llmc_status llmc_engine_create(const llmc_device *device, llmc_artifact *artifact,
                                        const llmc_engine_options *options, llmc_engine **out, llmc_error *error);
LLMC_API void llmc_engine_destroy(llmc_engine *engine);
/* Queues a request. Any thread may call submit, cancel, set_token_mask, wait, poll and the get_ functions, also while
 * another thread is in step.
 *
 * A model that returns vectors (vector_width of llmc_artifact_info) samples no token, and its prompt may fill the whole
 * max_model_len. request->vector is memory of the caller. The engine fills it before the FINISHED event with the reason
 * STOP. It must stay valid until the request's last event was polled, or the engine was destroyed. */
LLMC_API llmc_status llmc_engine_submit(llmc_engine *engine, const llmc_request *request, uint64_t *id,
                                        llmc_error *error);
/* Cancels a request at the start of the next step. A step in flight may still give a token. */
LLMC_API llmc_status llmc_engine_cancel(llmc_engine *engine, uint64_t id, llmc_error *error);
/* The term that a LoRA adapter adds to a part of a linear layer: scale · b a x. */
typedef struct llmc_adapter_matrix {
  uint32_t struct_size;
  uint32_t linear, part; /* indices as of llmc_artifact_get_adapter_linear */
  uint32_t rank;         /* 1 … adapter_rank of llmc_artifact_info */
  float scale;
  uint32_t reserved;
  const float *a; /* [rank][columns] */
  const float *b; /* [rows of the part][rank] */
} llmc_adapter_matrix;

/* Loads an adapter into a free slot. *id names it in requests and is never reused. Parts without a matrix are
 * unchanged. The matrices are copied in the type of the artifact's activations. The caller sets
 * matrices[0].struct_size. Any thread may call it; no step waits. LLMC_ERR_QUEUE_FULL: every slot is taken.
 * LLMC_ERR_INVALID_ARGUMENT: a matrix does not fit the artifact, or the artifact takes no adapters. On failure
 * nothing has changed. */
LLMC_API llmc_status llmc_engine_load_adapter(llmc_engine *engine, const llmc_adapter_matrix *matrices, uint64_t count,
                                              uint64_t *id, llmc_error *error);
/* Unloads an adapter: no new request may use it. Running requests finish with it; then its slot is free. Any thread
 * may call it; it returns at once. LLMC_ERR_NOT_FOUND: the adapter is not loaded. */
LLMC_API llmc_status llmc_engine_unload_adapter(llmc_engine *engine, uint64_t id, llmc_error *error);
/* A text whose cached KV blocks go from one engine to another, in parts. Make one on either side: it remembers where the
 * last part ended, so that the next one is found at once. It holds no blocks: some may leave the cache between two parts.
 * Blocks are whole blocks of block_size tokens; texts of adapters are not handed over.
 *
 * Use it from one thread at a time, and not after its engine. `seal` and `check` may run beside steps and beside
 * calls of other threads. The other calls wait for a step in flight, and steps wait for them. */
typedef struct llmc_hand_over llmc_hand_over;
/* Copies token_ids. LLMC_ERR_INVALID_ARGUMENT: the engine has no prefix cache. */
LLMC_API llmc_status llmc_hand_over_create(llmc_engine *engine, const int32_t *token_ids, uint64_t num_tokens,
                                           llmc_hand_over **out, llmc_error *error);
LLMC_API void llmc_hand_over_destroy(llmc_hand_over *hand_over);
/* Leading whole blocks of the text that are cached; of a model with states, up to the last one with states. */
LLMC_API llmc_status llmc_hand_over_count(llmc_hand_over *hand_over, uint64_t *num_blocks, llmc_error *error);
/* Writes cached blocks from block first_block on to `out`, for llmc_hand_over_import of another engine.
 *
 * - As many are written as are cached and fit, also while a request computes the text: blocks are cached step by step.
 * - *num_blocks is their number, and *num_bytes their size. That is 64 bytes, and for each block kv_block_bytes, 4 for
 *   each token, and 8. Both are 0 if there are none.
 * - Of a model with states, state_bytes and 8 more follow the text's last block, and `out` must have room for them in
 *   every call. Of the last blocks, those without states behind them are left out.
 * - Checksums are left out: they take longer than copying. Seal the bytes before they leave the process.
 * - With the last block of the text, all of them count as used, so they are kept longest.
 * - LLMC_ERR_OUT_OF_RANGE: capacity is too small for a block. LLMC_ERR_INVALID_ARGUMENT: the engine runs on several
 *   ranks. */
LLMC_API llmc_status llmc_hand_over_export(llmc_hand_over *hand_over, uint64_t first_block, void *out,
                                           uint64_t capacity, uint64_t *num_blocks, uint64_t *num_bytes,
                                           llmc_error *error);
/* Writes the checksums into blocks that llmc_hand_over_export wrote. */
LLMC_API llmc_status llmc_hand_over_seal(const llmc_hand_over *hand_over, void *data, uint64_t num_bytes,
                                         llmc_error *error);
/* Checks sealed blocks: all that llmc_hand_over_import checks, and the checksums.
 *
 * LLMC_ERR_INVALID_ARGUMENT: they are of another text or artifact. LLMC_ERR_CORRUPT: a checksum or a size is wrong.
 * LLMC_ERR_VERSION: the format is unknown. LLMC_ERR_OUT_OF_RANGE: they reach beyond the text. */
LLMC_API llmc_status llmc_hand_over_check(const llmc_hand_over *hand_over, const void *data, uint64_t num_bytes,
                                          llmc_error *error);
/* Enters blocks into the prefix cache. A request with this text then finds them there, and its results have the bits
 * that they would have had without.
 *
 * - The text must be the one whose blocks they are, or begin with it.
 * - *num_blocks is how many leading blocks of the text are cached afterwards. Fewer than given: no more are free, or an
 *   earlier block is missing. Blocks that are cached already are left as they are.
 * - It fails as `check` does, and nothing has changed then, but it compares no checksums: check the blocks first.
 * - Checksums find damage, not intent: take blocks only from engines that you trust.
 * - Another version of llmc, target, shape of the model or weight is found. How activations were quantized need not be:
 *   both artifacts must be compiled with the same options, but for buckets. */
LLMC_API llmc_status llmc_hand_over_import(llmc_hand_over *hand_over, const void *data, uint64_t num_bytes,
                                           uint64_t *num_blocks, llmc_error *error);
/* Sets the tokens that continuation `output_index` of a guided request may take next. Bit t % 32 of words[t / 32]
 * allows token t; tokens beyond the last word are not allowed.
 *
 * - A mask serves one token. Set a mask for each of the n continuations after submit, then one after each TOKEN
 *   event. NEEDS_MASK events ask for them. A request far back in the queue is asked for its first masks when its turn
 *   comes near.
 * - Until its mask is set, a continuation gives its row to others. Its prompt is computed except for the last token.
 * - A mask can be replaced until a step uses it.
 * - LLMC_ERR_NOT_FOUND: the request or continuation has ended. LLMC_ERR_INVALID_ARGUMENT: a step in flight uses a
 *   mask already, or the request is not guided.
 * - A mask without any token fails the request with LLMC_ERR_EMPTY_MASK. If a mask allows only eos and stop ids,
 *   min_tokens yields. */
LLMC_API llmc_status llmc_engine_set_token_mask(llmc_engine *engine, uint64_t id, uint32_t output_index,
                                                const uint32_t *words, uint64_t num_words, llmc_error *error);
/* Sets masks for the next token and for tokens after guesses, so that one step may check the guesses, too. The array
 * is words[num_guesses + 1][num_words]: a mask for the next token, then one after each of the consecutive guesses. A
 * guess that its mask forbids is wrong. Masks after a wrong guess are dropped: set new ones after the step's last
 * TOKEN event, when NEEDS_MASK asks for them. Guesses change no token, and the engine checks as many as pay off.
 * num_guesses: at most LLMC_MAX_SPECULATE_TOKENS. guesses may be NULL if there are none. */
LLMC_API llmc_status llmc_engine_set_token_masks(llmc_engine *engine, uint64_t id, uint32_t output_index,
                                                 const uint32_t *words, uint64_t num_words, const int32_t *guesses,
                                                 uint64_t num_guesses, llmc_error *error);
/* Returns guesses of the tokens that may follow the text of a guided continuation, after its NEEDS_MASK event. They
 * are repetitions of prompt and output, as many as are worth a mask each; none without speculate_tokens. *count
 * guesses are copied. LLMC_ERR_NOT_FOUND: the request or continuation is not guided, or has ended. */
LLMC_API llmc_status llmc_engine_get_guesses(llmc_engine *engine, uint64_t id, uint32_t output_index, int32_t *tokens,
                                             uint64_t capacity, uint64_t *count, llmc_error *error);
/* Runs one iteration: schedule, prepare, replay, sample, postprocess. On a device whose steps overlap, the next step may
 * be on its way when this returns; llmc_engine_wait reports LLMC_READY_WORK then. The call first waits for masks that are
 * about to come: up to a quarter of a decode step, or a 16th if other requests wait meanwhile. *progressed (may be NULL)
 * is 0 if there was nothing to do. An error means that the device failed or memory ran out.
 * - LLMC_ERR_DEVICE_FAILED, or LLMC_ERR_OUT_OF_MEMORY of the device: the requests of this step, and of others that
 *   were on their way, fail with one event each. All other requests go on. If another call, such as
 *   llmc_engine_enable_graph, had to end that step, the next llmc_engine_step returns its error.
 * - Any other error, or no memory of the host: every request fails with one event. That is in a later step if there is
 *   no memory for the events. The engine is then as after its creation. */
LLMC_API llmc_status llmc_engine_step(llmc_engine *engine, uint32_t *progressed, llmc_error *error);
/* Returns and removes at most `capacity` events, oldest first. The caller sets events[0].struct_size. */
LLMC_API llmc_status llmc_engine_poll(llmc_engine *engine, llmc_event *events, uint64_t capacity, uint64_t *count,
                                      llmc_error *error);
/* Blocks until there are events to poll or work for step, or for timeout_ns (UINT64_MAX: no limit). A submit, cancel,
 * set_token_mask or passing deadline wakes it. *ready has LLMC_READY_ bits, and is 0 after the timeout. */
LLMC_API llmc_status llmc_engine_wait(llmc_engine *engine, uint64_t timeout_ns, uint32_t *ready, llmc_error *error);
/* Asks the device for a sign of life, which launches nothing. Call it now and then while nothing runs: otherwise only the
 * next step finds that the device was lost. While a step is in flight it does nothing.
 * LLMC_ERR_DEVICE_LOST: the device is lost to this process, or did not answer within timeout_ns; every later step fails.
 * Calls that wait for a step also wait for this one. */
LLMC_API llmc_status llmc_engine_check_device(llmc_engine *engine, uint64_t timeout_ns, llmc_error *error);
/* Replays a full bucket of made-up tokens, which read any KV blocks and write only to the dummy block. This reads the
 * weights and touches the pages. *ns (may be NULL): wall time of the replay. It waits for a step in flight, and does
 * not count in the statistics. */
LLMC_API llmc_status llmc_engine_warm_graph(llmc_engine *engine, uint32_t graph, uint64_t *ns, llmc_error *error);
/* A load for llmc_engine_warm_load; fields that are 0 fill the bucket. */
typedef struct llmc_warm_load {
  uint32_t struct_size;
  uint32_t num_seqs;
  uint32_t tokens_each; /* new tokens of each sequence */
  uint32_t context;     /* tokens of each sequence in the cache afterwards */
} llmc_warm_load;
/* As llmc_engine_warm_graph, with a load of the caller's choice. LLMC_ERR_OUT_OF_RANGE: the load does not fit the
 * graph; nothing ran. */
LLMC_API llmc_status llmc_engine_warm_load(llmc_engine *engine, uint32_t graph, const llmc_warm_load *load,
                                           uint64_t *ns, llmc_error *error);
/* Calls every kernel of a graph with no rows, which takes microseconds. The graph is then as warm as another one with
 * the same kernels that was replayed before. *ns (may be NULL): wall time. Otherwise as llmc_engine_warm_graph. */
LLMC_API llmc_status llmc_engine_walk_graph(llmc_engine *engine, uint32_t graph, uint64_t *ns, llmc_error *error);
/* Replays each graph of the draft with one made-up token, which reads and writes only the dummy block. The first
 * guesses then find code and weights in memory. It waits for a step in flight. *ns (may be NULL): wall time of all
 * graphs. LLMC_ERR_INVALID_ARGUMENT: the engine has no draft. */
LLMC_API llmc_status llmc_engine_warm_draft(llmc_engine *engine, uint64_t *ns, llmc_error *error);
/* Turns a graph on or off for requests; all are on at first. Larger graphs take the work of a graph that is off; a
 * step that fits no other graph is a bucket miss. Changes no result. Any thread may call it; it waits for a step in
 * flight. */
LLMC_API llmc_status llmc_engine_enable_graph(llmc_engine *engine, uint32_t graph, uint32_t on, llmc_error *error);
/* Frees the memory that only this graph uses; the graph must be off. Once it is on again, its first step allocates
 * the memory anew. Changes no result. Any thread may call it; it waits for a step in flight.
 * LLMC_ERR_INVALID_ARGUMENT: the graph is on. */
LLMC_API llmc_status llmc_engine_release_graph(llmc_engine *engine, uint32_t graph, llmc_error *error);
/* Adds the new graphs of `artifact`, which must be the engine's own artifact with buckets added (llmc compile --add).
 * The engine keeps its weights, KV cache and requests, and takes a reference to `artifact`; results do not change.
 * The new graphs continue the numbering, and are off. Any thread may call it; the slow part runs beside steps. On
 * failure nothing has changed. */
LLMC_API llmc_status llmc_engine_add_graphs(llmc_engine *engine, const llmc_artifact *artifact, llmc_error *error);
LLMC_API llmc_status llmc_engine_get_stats(const llmc_engine *engine, llmc_engine_stats *stats, llmc_error *error);
/* Returns the statistics of the engine's device, always the same names in the same order: at most `capacity` of them;
 * *count is their number. The caller sets stats[0].struct_size. */
LLMC_API llmc_status llmc_engine_get_device_stats(const llmc_engine *engine, llmc_device_stat *stats, uint64_t capacity,
                                                  uint64_t *count, llmc_error *error);
/* The same of a replayer's device. */
LLMC_API llmc_status llmc_replayer_get_device_stats(const llmc_replayer *replayer, llmc_device_stat *stats,
                                                    uint64_t capacity, uint64_t *count, llmc_error *error);
/* Returns one entry per graph. The caller sets stats[0].struct_size. LLMC_ERR_OUT_OF_RANGE: capacity is below
 * num_graphs. */
LLMC_API llmc_status llmc_engine_get_graph_stats(const llmc_engine *engine, llmc_graph_stats *stats, uint64_t capacity,
                                                 uint64_t *count, llmc_error *error);
/* Returns the shapes that missed, in order of appearance: at most `capacity` of the first LLMC_MAX_BUCKET_MISSES.
 * Later shapes count only in num_bucket_misses. The caller sets misses[0].struct_size. Statistics and list are those
 * after the last finished step; num_missed_shapes of llmc_engine_stats shows cheaply whether the list has grown. */
LLMC_API llmc_status llmc_engine_get_bucket_misses(const llmc_engine *engine, llmc_bucket_miss *misses,
                                                   uint64_t capacity, uint64_t *count, llmc_error *error);
/* Returns the shapes of steps since the last call. The first call returns nothing and starts the count. There are at
 * most LLMC_MAX_STEP_SHAPES shapes, in order of appearance; *lost (may be NULL) counts steps of further shapes. The
 * caller sets shapes[0].struct_size. LLMC_ERR_OUT_OF_RANGE: capacity is below LLMC_MAX_STEP_SHAPES. */
LLMC_API llmc_status llmc_engine_take_step_shapes(llmc_engine *engine, llmc_step_shape *shapes, uint64_t capacity,
                                                  uint64_t *count, uint64_t *lost, llmc_error *error);
/* Returns the marks of requests since the last call, oldest first. The first call starts recording. A full list stops
 * it until the next call, so an engine that nobody observes has no cost. If marks may be missing, *complete (may be
 * NULL) is 0. The caller sets marks[0].struct_size. LLMC_ERR_OUT_OF_RANGE: capacity is below LLMC_MAX_REQUEST_MARKS. */
LLMC_API llmc_status llmc_engine_take_request_marks(llmc_engine *engine, llmc_request_mark *marks, uint64_t capacity,
                                                    uint64_t *count, uint32_t *complete, llmc_error *error);
/* Returns evictions by priority, in order of appearance: at most `capacity` of the first LLMC_MAX_EVICTED_PRIORITIES.
 * Later priorities count only in num_evictions. The caller sets counts[0].struct_size. */
LLMC_API llmc_status llmc_engine_get_evictions(const llmc_engine *engine, llmc_eviction_count *counts,
                                               uint64_t capacity, uint64_t *count, llmc_error *error);
/* Checks that reference counts, block tables, free list and prefix index agree. LLMC_ERR_INTERNAL says what does not. */
LLMC_API llmc_status llmc_engine_check_integrity(const llmc_engine *engine, llmc_error *error);

/* ---- encoder: a model that gives rows, such as those of an image, for the prompts of another model ---------- */
typedef struct llmc_encoder llmc_encoder;

/* What is encoded: an image as patches, each of states_width floats. */
typedef struct llmc_patches {
  uint32_t struct_size;
  uint32_t num_patches;
  uint32_t num_rows; /* of the result */
  uint32_t reserved;
  const float *patches;  /* [num_patches][states_width] */
  const int32_t *places; /* [num_patches], each below vocab_size: the place of a patch in the image */
  const int32_t *first;  /* [num_rows]: the first of the neighbouring patches that become this row */
} llmc_patches;

/* Creates an encoder for an artifact with LLMC_STATES_TAKEN and a vector_width. It allocates all memory, and keeps a
 * reference to the artifact, and none to the device. LLMC_ERR_UNSUPPORTED_TARGET: as for llmc_replayer_create. */
LLMC_API llmc_status llmc_encoder_create(const llmc_device *device, llmc_artifact *artifact, llmc_encoder **out,
                                         llmc_error *error);
LLMC_API void llmc_encoder_destroy(llmc_encoder *encoder);
/* Most patches of an image, and most rows of its result. */
LLMC_API llmc_status llmc_encoder_get_limits(const llmc_encoder *encoder, uint32_t *max_patches, uint32_t *max_rows,
                                             llmc_error *error);
/* Encodes an image: writes num_rows rows of vector_width floats. They depend on the patches alone. The call blocks; any
 * thread may call it, and calls take turns. LLMC_ERR_OUT_OF_RANGE: more patches or rows than the artifact's largest
 * bucket has, or an index outside its range. LLMC_ERR_NOT_FINITE: a row has a number that is NaN or infinite.
 * LLMC_ERR_DEVICE_FAILED, LLMC_ERR_DEVICE_LOST: as for llmc_engine_step. */
LLMC_API llmc_status llmc_encoder_encode(llmc_encoder *encoder, const llmc_patches *patches, float *rows,
                                         llmc_error *error);

/* ---- simulation: a trace through the engine in virtual time, over a device that computes nothing ----------- */
/* Cost of a replay in nanoseconds, by its token rows and its pairs of a new token and a token that it attends to.
 * Rows cost what the curve says: linear between its points, constant before the first, and extrapolated after the
 * last. Each pair adds ns_per_pair. A target that computes padding has one point, and no ns_per_pair. */
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
  const llmc_sim_cost *exact; /* of a replay in a graph made for exactly its load */
  uint32_t max_blocks;
  uint32_t reserved;
} llmc_sim_graph;

typedef struct llmc_sim_model {
  uint32_t struct_size;
  uint32_t num_graphs;
  int32_t block_size, max_model_len, max_num_seqs;
  uint32_t stages;              /* that have equal parts of each replay; 0: 1, at most 64 */
  uint64_t kv_block_bytes;      /* with options.kv_bytes, gives the size of the pool */
  const llmc_sim_graph *graphs; /* [num_graphs]; the struct_size of the first holds for all */
  double step_ns, token_ns;     /* time of a step outside its replay, and of each sampled token */
  /* With options.speculate_tokens: guesses are made up, each right with these odds if those before it are. 0: they are
   * looked up in the made-up text. */
  double guess_odds;
  double draft_ns; /* time in which a draft guesses a token of each sequence of a step; 0: guesses take no time */
  /* Of a memory bus that all stages read by. bus_share: what a stage takes of it, by itself, while it reads weights or
   * KV; 0: each stage has its own bus, at most 1. read_ns: part of each replay in which weights are read. A decode
   * step's pairs are read as well. */
  double bus_share, read_ns;
  uint32_t steps_in_flight; /* of several stages, as in the device option; 0: as many as stages, at most 64 */
  uint32_t reserved;
  uint64_t state_bytes; /* of a sequence's states; 0: the model has none */
} llmc_sim_model;

/* Requests in order of arrival. A request whose prompt does not fit max_model_len is an error. */
typedef struct llmc_sim_trace {
  uint32_t struct_size;
  uint32_t prefix_block; /* tokens per prefix id */
  uint64_t num_requests;
  const uint64_t *arrival_ns;    /* [num_requests], ascending */
  const uint32_t *prompt_tokens; /* [num_requests] */
  const uint32_t *output_tokens; /* [num_requests], at least 1 */
  const uint64_t *prefix_start;  /* [num_requests + 1] into prefix_ids; NULL: no two prompts have a common prefix */
  const int64_t *prefix_ids;     /* of the prompts' leading blocks: equal ids are equal blocks */
  /* Called from time to time with the number of requests that have ended; a value other than 0 stops the run. NULL:
   * never called. */
  uint32_t (*progress)(void *context, uint64_t num_ended);
  void *context;
} llmc_sim_trace;

/* Replays of one graph with num_seqs sequences, the longest of `length` tokens: new tokens in prefill and mixed steps,
 * tokens of context in decode steps. Contexts are rounded up to blocks here, as a graph holds whole blocks. Decode steps
 * with guesses have more rows than sequences; those of a load have equally many. */
typedef struct llmc_sim_load {
  uint32_t struct_size;
  uint32_t graph, num_seqs, length;
  uint64_t replays;
  uint64_t tokens, contexts; /* sums: valid rows, tokens of context of all sequences */
  double ns, exact_ns;       /* sums of what replays and draft took, and would take without padding */
  uint64_t longest;          /* sum of the longest sequence of each replay, not rounded */
  /* Of a graph with max_blocks, length is that of all contexts together, each in whole blocks. */
  uint64_t blocks; /* sum of the KV blocks of all sequences */
} llmc_sim_load;

/* Creates an engine whose device computes nothing and whose replays take virtual time. Scheduler, block manager and
 * choice of graphs are the real ones. It needs no artifact and copies its arguments. Of the options, those of the KV
 * pool and the scheduler apply. */
LLMC_API llmc_status llmc_engine_create_simulated(const llmc_sim_model *model, const llmc_engine_options *options,
                                                  llmc_engine **out, llmc_error *error);
/* Runs a trace through a simulated engine that has run none. Blocks; other threads may call get_ functions meanwhile.
 * For each request it returns the virtual times of the first and the last token, in nanoseconds. 0: the request was
 * refused (max_waiting), failed, or was not reached before progress stopped the run. LLMC_ERR_INVALID_ARGUMENT: the
 * engine is not simulated, or the trace is invalid; nothing ran. */
LLMC_API llmc_status llmc_engine_simulate(llmc_engine *engine, const llmc_sim_trace *trace, uint64_t *first_token_ns,
                                          uint64_t *last_token_ns, llmc_error *error);
/* Returns the loads of all replays so far, by graph, sequences and length: at most `capacity` of them; *count is
 * their number. The caller sets loads[0].struct_size. */
LLMC_API llmc_status llmc_engine_get_simulated_loads(const llmc_engine *engine, llmc_sim_load *loads, uint64_t capacity,
                                                     uint64_t *count, llmc_error *error);

#ifdef __cplusplus
}
#endif
#endif /* LLMC_LLMC_H_ */
