"""The structs and functions of llmc.h (ABI version 3) as ctypes."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char, c_char_p, c_double, c_float, c_int32, c_int64, c_uint8, c_uint32, c_uint64, c_void_p
from typing import Any

ABI_VERSION = 3
MAX_TOP_LOGPROBS = 20
MAX_BUCKET_MISSES = 1024
MAX_STEP_SHAPES = 4096
MAX_REQUEST_MARKS = 4096
MAX_EVICTED_PRIORITIES = 64
MAX_ADAPTER_PARTS = 8

I32P = POINTER(c_int32)
U32P = POINTER(c_uint32)
F32P = POINTER(c_float)
U64P = POINTER(c_uint64)
I64P = POINTER(c_int64)
F64P = POINTER(c_double)


def _each(kind: Any, *names: str) -> list[tuple[str, Any]]:
    """Several fields of one type, in order."""
    return [(name, kind) for name in names]


_GRAPH_SHAPE = ("phase", "batch", "seq", "max_tokens", "max_seqs", "max_samples", "max_blocks_per_seq")


class Error(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("code", c_int32), ("message", c_char * 1016)]


class ArtifactInfo(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        *_each(c_uint32, "num_graphs", "num_kernels", "num_commands", "num_weights"),
        *_each(
            c_int32,
            "num_layers",
            "num_kv_heads",
            "head_dim",
            "block_size",
            "vocab_size",
            "max_model_len",
            "max_num_seqs",
        ),
        ("target_level", c_uint32),
        *_each(c_uint64, "weight_bytes", "code_bytes", "max_arena_bytes", "kv_block_bytes"),
        ("target_kind", c_char * 256),
        ("target_name", c_char * 256),
        *_each(c_int32, "vector_width", "whole_prompts"),
        *_each(c_uint32, "num_adapter_linears", "adapter_slots", "adapter_rank", "num_ranks"),
        *_each(c_uint64, "adapter_bytes", "rank_weight_bytes", "max_kv_blocks", "state_bytes", "max_states"),
        *_each(c_uint32, "states_width", "states_use"),
    ]


class AdapterLinear(ctypes.Structure):
    _fields_ = [
        *_each(c_uint32, "struct_size", "columns", "num_parts"),
        ("rows", c_uint32 * MAX_ADAPTER_PARTS),
        ("name", c_char * 256),
    ]


class GraphInfo(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        *_each(c_uint32, *_GRAPH_SHAPE, "num_commands"),
        ("arena_bytes", c_uint64),
        *_each(c_uint32, "max_blocks", "reserved"),
    ]


class KeyValue(ctypes.Structure):
    _fields_ = _each(c_char_p, "key", "value")


class DeviceKind(ctypes.Structure):
    _fields_ = [*_each(c_uint32, "struct_size", "reserved"), *_each(c_char_p, "name", "summary")]


class DeviceStat(ctypes.Structure):
    _fields_ = [*_each(c_uint32, "struct_size", "reserved"), ("name", c_char_p), ("value", c_uint64)]


class ReplayerOptions(ctypes.Structure):
    _fields_ = _each(c_uint32, "struct_size", "num_blocks", "num_states", "reserved")


class Batch(ctypes.Structure):
    _fields_ = [
        *_each(c_uint32, "struct_size", "num_tokens", "num_seqs", "num_samples", "block_table_stride"),
        *_each(
            I32P,
            "input_ids",
            "positions",
            "slot_mapping",
            "block_tables",
            "context_lens",
            "query_start",
            "sample_index",
            "state_slots",
            "rope_positions",
        ),
    ]


class ReplayStats(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("num_threads", c_uint32),
        ("num_replays", c_uint64),
        ("total_ns", c_uint64),
        ("kernel_ns", c_uint64),
        ("family_ns", c_uint64 * 8),
        ("barrier_ns", c_uint64),
    ]


class ProbeOptions(ctypes.Structure):
    _fields_ = [
        *_each(c_uint32, "struct_size", "num_threads", "pin_threads", "reserved"),
        ("read_bytes", c_uint64),
    ]


class EngineOptions(ctypes.Structure):
    _fields_ = [
        *_each(
            c_uint32,
            "struct_size",
            "num_blocks",
            "max_num_seqs",
            "max_waiting",
            "max_tokens_per_step",
            "prefix_cache",
            "miss_policy",
            "swap_always",
        ),
        ("kv_bytes", c_uint64),
        *_each(c_uint32, "priority_patience", "reserved2"),
        *_each(c_uint32, "speculate_tokens", "speculate_always"),
        ("draft", c_void_p),
        ("swap_bytes", c_uint64),
        *_each(c_uint32, "num_states", "reserved3"),
    ]


class LogitBias(ctypes.Structure):
    _fields_ = [("token_id", c_int32), ("bias", c_float)]


class SamplingParams(ctypes.Structure):
    _fields_ = [
        *_each(c_uint32, "struct_size", "n", "max_tokens", "min_tokens"),
        *_each(c_float, "temperature", "top_p", "min_p"),
        ("top_k", c_int32),
        *_each(c_float, "repetition_penalty", "presence_penalty", "frequency_penalty"),
        ("ignore_eos", c_uint32),
        ("seed", c_uint64),
        ("has_seed", c_uint32),
        ("num_logprobs", c_int32),
        ("stop_token_ids", I32P),
        ("num_stop_token_ids", c_uint64),
        ("logit_bias", POINTER(LogitBias)),
        ("num_logit_bias", c_uint64),
        *_each(c_uint32, "best_of", "beam_width"),
        ("length_penalty", c_float),
        ("early_stopping", c_uint32),
    ]


class PlacedRows(ctypes.Structure):
    _fields_ = [
        *_each(c_uint32, "struct_size", "num_rows"),
        ("first", c_uint64),
        ("rows", F32P),
        ("identity", c_uint8 * 32),
        ("positions", I32P),
        *_each(c_uint32, "advance", "reserved"),
    ]


class Request(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("priority", c_int32),
        ("prompt_token_ids", I32P),
        ("num_prompt_tokens", c_uint64),
        ("sampling", POINTER(SamplingParams)),
        ("guided", c_uint32),
        ("num_prompt_logprobs", c_int32),
        ("deadline_ns", c_uint64),
        ("vector", POINTER(c_float)),
        ("vector_capacity", c_uint64),
        ("adapter", c_uint64),
        ("num_output_tokens", c_uint64),
        *_each(c_uint32, "output_index", "reserved"),
        ("placed", POINTER(PlacedRows)),
        ("num_placed", c_uint64),
    ]


class AdapterMatrix(ctypes.Structure):
    _fields_ = [
        *_each(c_uint32, "struct_size", "linear", "part", "rank"),
        ("scale", c_float),
        ("reserved", c_uint32),
        *_each(F32P, "a", "b"),
    ]


class Event(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("kind", c_uint32),
        ("request_id", c_uint64),
        ("output_index", c_uint32),
        ("token_id", c_int32),
        *_each(c_uint32, "finish_reason", "num_prompt_tokens", "num_cached_tokens", "num_output_tokens"),
        ("error_code", c_int32),
        ("logprob", c_float),
        ("num_top", c_uint32),
        ("top_token_ids", c_int32 * MAX_TOP_LOGPROBS),
        ("top_logprobs", c_float * MAX_TOP_LOGPROBS),
        ("time_ns", c_uint64),
        ("position", c_uint32),
        ("rank", c_uint32),
        *_each(c_uint64, "arrival_ns", "first_scheduled_ns", "first_token_ns"),
        ("message", c_char * 256),
    ]


class EngineStats(ctypes.Structure):
    _fields_ = [
        *_each(
            c_uint32,
            "struct_size",
            "num_running",
            "num_waiting",
            "num_blocks",
            "num_free_blocks",
            "num_cached_blocks",
            "max_request_tokens",
        ),
        *_each(
            c_uint64,
            "num_steps",
            "num_prefill_steps",
            "num_decode_steps",
            "num_preemptions",
            "num_finished",
            "num_bucket_misses",
            "prompt_tokens",
            "cached_tokens",
            "output_tokens",
            "scheduled_tokens",
            "padded_tokens",
            "step_ns",
            "replay_ns",
            "sample_ns",
            "schedule_ns",
            "prepare_ns",
            "kernel_ns",
            "barrier_ns",
            "decode_step_ns",
            "decode_kernel_ns",
            "decode_barrier_ns",
            "prefix_query_tokens",
            "prefix_hit_tokens",
            "num_mixed_steps",
            "num_missed_shapes",
            "num_evictions",
            "num_promotions",
            "num_speculative_steps",
            "drafted_tokens",
            "accepted_tokens",
            "num_draft_blocks",
            "num_free_draft_blocks",
            "draft_ns",
            "num_ahead_steps",
            "num_thrown_rows",
            "judged_tokens",
            "num_states",
            "num_free_states",
            "num_kept_states",
            "mask_wait_ns",
        ),
    ]


class GraphStats(ctypes.Structure):
    _fields_ = [
        *_each(c_uint32, "struct_size", "launched"),
        *_each(c_uint64, "replays", "tokens", "padded_tokens", "replay_ns"),
    ]


class WarmLoad(ctypes.Structure):
    _fields_ = _each(c_uint32, "struct_size", "num_seqs", "tokens_each", "context")


class BucketMiss(ctypes.Structure):
    _fields_ = [
        *_each(c_uint32, "struct_size", "phase", "num_seqs", "num_tokens", "num_blocks", "reserved"),
        ("count", c_uint64),
        ("graph", c_int32),
        *_each(c_uint32, "reserved2", "wanted_batch", "wanted_seq"),
    ]


class StepShape(ctypes.Structure):
    _fields_ = [
        *_each(c_uint32, "struct_size", "phase", "graph", "num_seqs", "num_tokens", "num_samples"),
        *_each(c_uint32, "num_blocks", "all_blocks"),
        *_each(c_uint64, "count", "replay_ns"),
        ("replay_ns_squared", c_double),
    ]


class RequestMark(ctypes.Structure):
    _fields_ = [
        *_each(c_uint32, "struct_size", "kind"),
        ("request_id", c_uint64),
        *_each(c_uint32, "output_index", "graph", "start", "count"),
        *_each(c_uint64, "begin_ns", "end_ns"),
    ]


class EvictionCount(ctypes.Structure):
    _fields_ = [("struct_size", c_uint32), ("priority", c_int32), ("count", c_uint64)]


class Patches(ctypes.Structure):
    _fields_ = [
        *_each(c_uint32, "struct_size", "num_patches", "num_rows", "reserved"),
        ("patches", F32P),
        *_each(I32P, "places", "first"),
    ]


class SimCost(ctypes.Structure):
    _fields_ = [
        *_each(c_uint32, "struct_size", "num_points"),
        ("tokens", U32P),
        ("ns", F64P),
        ("ns_per_pair", c_double),
    ]


class SimGraph(ctypes.Structure):
    _fields_ = [
        *_each(c_uint32, "struct_size", *_GRAPH_SHAPE),
        ("cost", POINTER(SimCost)),
        ("exact", POINTER(SimCost)),
        *_each(c_uint32, "max_blocks", "reserved"),
    ]


class SimModel(ctypes.Structure):
    _fields_ = [
        *_each(c_uint32, "struct_size", "num_graphs"),
        *_each(c_int32, "block_size", "max_model_len", "max_num_seqs"),
        ("stages", c_uint32),
        ("kv_block_bytes", c_uint64),
        ("graphs", POINTER(SimGraph)),
        *_each(c_double, "step_ns", "token_ns", "guess_odds", "draft_ns", "bus_share", "read_ns"),
        *_each(c_uint32, "steps_in_flight", "reserved"),
        ("state_bytes", c_uint64),
    ]


Progress = ctypes.CFUNCTYPE(c_uint32, c_void_p, c_uint64)


class SimTrace(ctypes.Structure):
    _fields_ = [
        *_each(c_uint32, "struct_size", "prefix_block"),
        ("num_requests", c_uint64),
        ("arrival_ns", U64P),
        *_each(U32P, "prompt_tokens", "output_tokens"),
        ("prefix_start", U64P),
        ("prefix_ids", I64P),
        ("progress", Progress),
        ("context", c_void_p),
    ]


class SimLoad(ctypes.Structure):
    _fields_ = [
        *_each(c_uint32, "struct_size", "graph", "num_seqs", "length"),
        *_each(c_uint64, "replays", "tokens", "contexts"),
        *_each(c_double, "ns", "exact_ns"),
        *_each(c_uint64, "longest", "blocks"),
    ]


_E = POINTER(Error)
# name → argument types; every function returns llmc_status.
STATUS_FUNCTIONS: dict[str, list[object]] = {
    "llmc_artifact_open": [c_char_p, POINTER(c_void_p), _E],
    "llmc_artifact_verify": [c_void_p, _E],
    "llmc_artifact_get_info": [c_void_p, POINTER(ArtifactInfo), _E],
    "llmc_artifact_info_get_pool_sizes": [POINTER(ArtifactInfo), POINTER(EngineOptions), U32P, U32P, _E],
    "llmc_artifact_get_graph": [c_void_p, c_uint32, POINTER(GraphInfo), _E],
    "llmc_artifact_get_adapter_linear": [c_void_p, c_uint32, POINTER(AdapterLinear), _E],
    "llmc_device_list_kinds": [POINTER(DeviceKind), c_uint64, U64P, _E],
    "llmc_device_open": [c_char_p, POINTER(KeyValue), c_uint64, POINTER(c_void_p), _E],
    "llmc_device_follow": [c_void_p, c_void_p, _E],
    "llmc_device_check": [c_void_p, _E],
    "llmc_room_report": [c_char_p, c_uint32, c_char_p, _E],
    "llmc_device_get_facts": [c_void_p, POINTER(KeyValue), c_uint64, U64P, _E],
    "llmc_replayer_create": [c_void_p, c_void_p, POINTER(ReplayerOptions), POINTER(c_void_p), _E],
    "llmc_replayer_copy_state": [c_void_p, c_uint32, c_uint32, _E],
    "llmc_replayer_run": [c_void_p, c_uint32, POINTER(Batch), F32P, c_uint64, _E],
    "llmc_replayer_begin": [c_void_p, c_uint32, POINTER(Batch), _E],
    "llmc_replayer_run_command": [c_void_p, c_uint32, _E],
    "llmc_replayer_read_operand": [c_void_p, c_uint32, c_uint32, c_void_p, c_uint64, _E],
    "llmc_replayer_set_profiling": [c_void_p, c_uint32, _E],
    "llmc_replayer_get_stats": [c_void_p, POINTER(ReplayStats), _E],
    "llmc_replayer_get_command_times": [c_void_p, c_uint32, U64P, U64P, U64P, c_uint64, U64P, _E],
    "llmc_probe_create": [POINTER(ProbeOptions), POINTER(c_void_p), _E],
    "llmc_probe_measure": [c_void_p, c_uint32, c_double, POINTER(c_double), _E],
    "llmc_engine_create": [c_void_p, c_void_p, POINTER(EngineOptions), POINTER(c_void_p), _E],
    "llmc_engine_submit": [c_void_p, POINTER(Request), U64P, _E],
    "llmc_engine_cancel": [c_void_p, c_uint64, _E],
    "llmc_engine_load_adapter": [c_void_p, POINTER(AdapterMatrix), c_uint64, U64P, _E],
    "llmc_engine_unload_adapter": [c_void_p, c_uint64, _E],
    "llmc_engine_set_token_mask": [c_void_p, c_uint64, c_uint32, U32P, c_uint64, _E],
    "llmc_engine_set_token_masks": [c_void_p, c_uint64, c_uint32, U32P, c_uint64, I32P, c_uint64, _E],
    "llmc_engine_get_guesses": [c_void_p, c_uint64, c_uint32, I32P, c_uint64, U64P, _E],
    "llmc_engine_wait": [c_void_p, c_uint64, POINTER(c_uint32), _E],
    "llmc_engine_check_device": [c_void_p, c_uint64, _E],
    "llmc_engine_warm_graph": [c_void_p, c_uint32, U64P, _E],
    "llmc_engine_warm_load": [c_void_p, c_uint32, POINTER(WarmLoad), U64P, _E],
    "llmc_engine_enable_graph": [c_void_p, c_uint32, c_uint32, _E],
    "llmc_engine_release_graph": [c_void_p, c_uint32, _E],
    "llmc_engine_add_graphs": [c_void_p, c_void_p, _E],
    "llmc_engine_warm_draft": [c_void_p, U64P, _E],
    "llmc_engine_walk_graph": [c_void_p, c_uint32, U64P, _E],
    "llmc_engine_step": [c_void_p, POINTER(c_uint32), _E],
    "llmc_engine_poll": [c_void_p, POINTER(Event), c_uint64, U64P, _E],
    "llmc_engine_get_stats": [c_void_p, POINTER(EngineStats), _E],
    "llmc_engine_get_device_stats": [c_void_p, POINTER(DeviceStat), c_uint64, U64P, _E],
    "llmc_replayer_get_device_stats": [c_void_p, POINTER(DeviceStat), c_uint64, U64P, _E],
    "llmc_engine_get_graph_stats": [c_void_p, POINTER(GraphStats), c_uint64, U64P, _E],
    "llmc_engine_get_bucket_misses": [c_void_p, POINTER(BucketMiss), c_uint64, U64P, _E],
    "llmc_engine_take_step_shapes": [c_void_p, POINTER(StepShape), c_uint64, U64P, U64P, _E],
    "llmc_engine_take_request_marks": [c_void_p, POINTER(RequestMark), c_uint64, U64P, POINTER(c_uint32), _E],
    "llmc_engine_get_evictions": [c_void_p, POINTER(EvictionCount), c_uint64, U64P, _E],
    "llmc_hand_over_create": [c_void_p, I32P, c_uint64, POINTER(c_void_p), _E],
    "llmc_hand_over_count": [c_void_p, U64P, _E],
    "llmc_hand_over_export": [c_void_p, c_uint64, c_void_p, c_uint64, U64P, U64P, _E],
    "llmc_hand_over_seal": [c_void_p, c_void_p, c_uint64, _E],
    "llmc_hand_over_check": [c_void_p, c_void_p, c_uint64, _E],
    "llmc_hand_over_import": [c_void_p, c_void_p, c_uint64, U64P, _E],
    "llmc_engine_check_integrity": [c_void_p, _E],
    "llmc_encoder_create": [c_void_p, c_void_p, POINTER(c_void_p), _E],
    "llmc_encoder_get_limits": [c_void_p, U32P, U32P, _E],
    "llmc_encoder_encode": [c_void_p, POINTER(Patches), F32P, _E],
    "llmc_engine_create_simulated": [POINTER(SimModel), POINTER(EngineOptions), POINTER(c_void_p), _E],
    "llmc_engine_simulate": [c_void_p, POINTER(SimTrace), U64P, U64P, _E],
    "llmc_engine_get_simulated_loads": [c_void_p, POINTER(SimLoad), c_uint64, U64P, _E],
}
VOID_FUNCTIONS: dict[str, list[object]] = {
    "llmc_hand_over_destroy": [c_void_p],
    "llmc_error_init": [_E, c_uint32],
    "llmc_artifact_close": [c_void_p],
    "llmc_device_close": [c_void_p],
    "llmc_replayer_options_init": [POINTER(ReplayerOptions), c_uint32],
    "llmc_replayer_destroy": [c_void_p],
    "llmc_probe_options_init": [POINTER(ProbeOptions), c_uint32],
    "llmc_probe_destroy": [c_void_p],
    "llmc_batch_init": [POINTER(Batch), c_uint32],
    "llmc_engine_options_init": [POINTER(EngineOptions), c_uint32],
    "llmc_encoder_destroy": [c_void_p],
    "llmc_engine_destroy": [c_void_p],
    "llmc_sampling_params_init": [POINTER(SamplingParams), c_uint32],
    "llmc_request_init": [POINTER(Request), c_uint32],
    "llmc_machine_limit_isa_level": [c_uint32],
}
